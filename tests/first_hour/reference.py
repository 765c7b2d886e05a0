"""Plain vLLM for all stages: ``python -m tests.first_hour.reference PLATFORM``, until ended."""

from __future__ import annotations

import functools
import importlib.util
import re
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from epd_portable.config.load import load_topology
from epd_portable.demo import servers
from epd_portable.platforms.traits import TRAITS
from tests.e2e.conftest import CONFIG, serving

GIB = 1 << 30
DTYPES = {"cuda": "float32", "npu": "bfloat16", "cpu": "float32"}
"""Ascend's attention has no float32."""
ENV = {"TRITON_F32_DEFAULT": "ieee", "TORCH_COMPILE_DISABLE": "1"}
"""Variables of both sides of a comparison: Triton multiplies float32 as TF32 by default."""
GRAPH_SIZES = [1, 2, 4, 8, 16, 32]
IS_SIMULATED = importlib.util.find_spec("ascend_sim") is not None
"""True in a rehearsal over the simulated Ascend runtime, which is small and has no graphs."""


def engine_args(platform: str) -> dict[str, Any]:
    """Return the arguments that both sides have."""
    args: dict[str, Any] = {"dtype": DTYPES[platform]}
    if IS_SIMULATED:
        return {**args, "enforce_eager": True, "max_num_batched_tokens": 512}
    if TRAITS[platform].needs_device_copy:
        args["compilation_config"] = {"cudagraph_capture_sizes": GRAPH_SIZES}
    return args


def reference(folder: Path, platform: str) -> AbstractContextManager[servers.Server]:
    """Return plain vLLM with the engine arguments of the topologies that are compared with it."""
    args: dict[str, Any] = dict(load_topology(CONFIG, platform=platform).engine_args)
    args |= engine_args(platform)
    if TRAITS[platform].needs_device_copy:
        args |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": GIB}
    report = functools.partial(print, flush=True)
    log = folder / "reference.log"
    return serving(
        servers.one_process(
            "demo", log=log, engine_args=args, platform=platform, env=ENV, report=report
        )
    )


def url_of(log: Path) -> str:
    """Wait for the reference whose log this is; return its address, empty if it has ended."""
    while not (
        told := re.search(r"^(?:ready: (\S+)|ended)$", log.read_text("utf-8"), re.MULTILINE)
    ):
        time.sleep(0.5)
    return told[1] or ""


if __name__ == "__main__":
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            reference(Path(scratch), sys.argv[1]) as server,
        ):
            print(f"ready: {server.url}", flush=True)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        print("ended", flush=True)

"""Topologies of the real vllm-ascend over the simulated runtime; the reference is vLLM-CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from epd_portable.demo import servers
from tests import forked
from tests.e2e.conftest import (
    CONFIG,
    ENGINE_MODULES,
    ROOT,
    VIDEOS,
    Split,
    forking,
    reference,
    running,
)
from tests.forked import Popen
from tests.warm import Nursery

# No graphs are simulated, and a simulated device is small; and slow, on a machine with other work.
SIMULATED = (
    "engine_args.enforce_eager=true",
    "engine_args.gpu_memory_utilization=0.4",
    "engine_args.max_num_batched_tokens=512",
    "engine_args.skip_mm_profiling=true",
    "transfer.pool_bytes=16MiB",
    "transfer.lease_s=60",
    "transfer.wait_timeout_s=120",
)
DEVICES = {"ASCEND_SIM_DEVICES": "3", "ASCEND_SIM_MEM_MB": "2048"}
MODULES = (*ENGINE_MODULES, "vllm_ascend.worker.worker", "vllm_ascend.worker.model_runner_v1")


INTERPRETER = Path(sys.prefix) / "interpreter"
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join((str(INTERPRETER), str(ROOT))),
}
"""Variables of engines whose Triton is in its interpreter: those with the second runner."""
ON_CPU = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_PLUGINS": "epd_portable_media_guard"}
"""Variables of a process that imports vLLM, which has chosen its platform then."""


@pytest.fixture(scope="session")
def fork() -> Iterator[Popen]:
    """Start engines on the CPU."""
    with forking(env=ON_CPU) as popen:
        yield popen


@pytest.fixture(scope="session")
def npu_nursery() -> Iterator[Nursery]:
    """Return what processes on simulated devices are forked from."""
    nursery = forked.nursery(*MODULES, env=DEVICES)
    try:
        yield nursery
    finally:
        nursery.close()


@pytest.fixture(scope="session")
def npu_fork(npu_nursery: Nursery) -> Popen:
    """Start engines on simulated devices."""
    return forked.popen_of(npu_nursery)


@pytest.fixture(scope="session")
def begun(
    fork: Popen, npu_fork: Popen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    """Begin to start plain vLLM in float32, once for all modules; `npu_fork` imports meanwhile."""
    folder = tmp_path_factory.mktemp("reference")
    with reference(folder, fork, ready=False, dtype="float32", **VIDEOS) as server:
        yield server


@pytest.fixture(scope="session")
def reference_url(begun: servers.Server) -> str:
    """Wait for that vLLM."""
    begun.wait_until_ready()
    assert "device_config=cpu" in begun.log.read_text()
    return begun.url


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Popen]:
    """Start engines that have Triton, in its interpreter."""
    assert (INTERPRETER / "triton").is_dir(), f"{INTERPRETER} is not there: make npu-sim"
    with forking(MODULES, {**DEVICES, **INTERPRETED}) as popen:
        yield popen


def simulated(
    folder: Path,
    settings: Sequence[str],
    *,
    dtype: str = "float32",
    config: Path = CONFIG,
    env: Mapping[str, str] | None = None,
    popen: Popen = subprocess.Popen,
) -> AbstractContextManager[Split]:
    """Return a topology on simulated devices.

    Args:
        folder: For logs and traces.
        settings: Beyond those that the simulation needs.
        dtype: Of the model.
        config: The topology file.
        env: Variables of the topology.
        popen: What starts it.
    """
    return running(
        folder,
        [*SIMULATED, f"engine_args.dtype={dtype}", *settings],
        config=config,
        platform="npu",
        env={**DEVICES, **(env or {})},
        popen=popen,
    )

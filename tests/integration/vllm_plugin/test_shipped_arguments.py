"""Engine arguments of shipped topology files are those of the installed engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.config.roles import ROLES

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def arguments() -> Iterator[tuple[str, Any]]:
    for path in CONFIGS.glob("*.yaml"):
        for platform in PLATFORMS:
            topology = load_topology(path, platform)
            for group in (topology, *map(topology.instances.of, ROLES)):
                yield from group.engine_args.items()


def test_engine_arguments_of_shipped_files_exist() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    found = {name for name, _ in arguments()}
    assert {"max_model_len", "kv_cache_memory_bytes"} <= found <= known

"""Engine arguments of shipped topology files are those of the installed engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.config.roles import ROLES

pytestmark = pytest.mark.needs_vllm

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def arguments() -> Iterator[tuple[str, Any]]:
    for path in CONFIGS.glob("*.yaml"):
        for platform in PLATFORMS:
            topology = load_topology(path, platform)
            for group in (topology, *map(topology.instances.of, ROLES)):
                yield from group.engine_args.items()


def test_the_engine_knows_each_argument_and_each_key_of_its_compilation() -> None:
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    compilation = {each.name for each in dataclasses.fields(CompilationConfig)}
    found = dict(arguments())
    assert {"mm_processor_device", "mm_tensor_ipc", "compilation_config"} <= found.keys() <= known
    assert found["compilation_config"].keys() <= compilation


def test_the_engine_s_decoder_takes_the_options_of_videos() -> None:
    from vllm.multimodal.video_decoders import resolve_video_backend_kwargs

    (options,) = (value["video"] for name, value in arguments() if name == "media_io_kwargs")
    sampling, decoder = resolve_video_backend_kwargs(
        options["backend"], {key: value for key, value in options.items() if key != "backend"}
    )
    assert (sampling, decoder["device"]) == ({}, "cuda")

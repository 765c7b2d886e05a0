"""The front answers as one process does, for every kind of model and of media.

Each encode engine encodes a part of a video where that can be divided.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_portable.demo import servers
from tests.checkpoints import NAMES
from tests.e2e.asking import ask
from tests.e2e.conftest import running, serving
from tests.e2e.equality import assert_equal
from tests.e2e.modalities.contents import ASK, CONTENTS, MODALITIES, SETTINGS, checkpoint_of
from tests.e2e.modalities.parts import frames
from tests.forked import Popen

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

DIVIDED = {"qwen2_vl": 12, "qwen2_5_vl": 12, "qwen3_vl": 9}
"""Size of the receive pool in KiB, by model: it cannot hold both parts of the longest video."""
LONG = "frames that the pool cannot hold"


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_one_process(
    name: str, fork: Popen, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    divided = name in DIVIDED
    model = str(checkpoint_of(name, tmp_path, fork))
    fixed = {"model": name, "max_tokens": 8, "ignore_eos": True}
    arguments = {
        "dtype": "float32",
        "max_model_len": 2048,
        "skip_mm_profiling": True,
        "trust_request_mm_kwargs": True,
        "limit_mm_per_prompt": dict.fromkeys(MODALITIES[name], 4),
    }
    settings = [f"engine_args.{key}={json.dumps(value)}" for key, value in arguments.items()]
    pool_bytes = DIVIDED.get(name, 16 << 10) << 10
    settings += [f"model={model}", f"transfer.pool_bytes={pool_bytes}"]
    settings += ["instances.encode.count=2"]
    videos = {"frames of four pairs": [frames(20, 8), ASK], LONG: [frames(21, 32), ASK]}
    contents = CONTENTS[name] | (videos if divided else {})
    cases = [(title, each, SETTINGS.get(title, {})) for title, each in contents.items()]
    with running(tmp_path, settings, popen=fork) as split:
        ours = [ask(split.url, content, **fixed, **more) for _, content, more in cases]
    parts = {item["mm_hash"].rpartition("#")[2] for each in ours for item in each.items}
    assert {"0-1", "1-2", "0-2", "2-4"} <= parts if divided else parts.isdisjoint({"0-1", "0-2"})
    for (title, *_), answer in zip(cases, ours, strict=True):
        assert title != LONG or sum(item["nbytes"] for item in answer.items) > pool_bytes
    reference = servers.one_process(
        model,
        log=tmp_path / "reference.log",
        engine_args={**arguments, "enforce_eager": True},
        env={"TORCH_COMPILE_DISABLE": "1"},
        popen=fork,
    )
    with serving(reference) as server:
        for answer, (title, content, more) in zip(ours, cases, strict=True):
            with subtests.test(title):
                assert set(answer.sources) == {"transfer"}
                theirs = ask(server.url, content, **fixed, **more)
                assert_equal(answer, theirs)

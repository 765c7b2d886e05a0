"""The engine front answers as one process does, for every kind of model and of media."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_portable.bench import servers
from tests.e2e.asking import ask
from tests.e2e.conftest import running, serving
from tests.e2e.equality import assert_equal
from tests.e2e.modalities.test_models import (
    CONTENTS,
    MODALITIES,
    NAMES,
    SETTINGS,
    TOLERANCE,
    checkpoint_of,
)
from tests.forked import Popen

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(1200),
]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_one_process(
    name: str, fork: Popen, tmp_path: Path, subtests: pytest.Subtests
) -> None:
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
    settings += ["front=engine", f"model={model}", "transfer.pool_bytes=16MiB"]
    cases = [(title, each, SETTINGS.get(title, {})) for title, each in CONTENTS[name].items()]
    with running(tmp_path, settings, popen=fork) as split:
        ours = [ask(split.url, content, **fixed, **more) for _, content, more in cases]
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
                assert_equal(answer, theirs, tolerance=TOLERANCE)

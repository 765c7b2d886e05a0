"""Overlapped encoding of an engine on simulated devices: responses of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from epd_portable.demo import servers
from tests.e2e.asking import ask, assert_equal, generating, picture
from tests.e2e.cases import ASK, SINGLE
from tests.e2e.conftest import ROOT, Pair
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import INTERPRETED, simulated

pytestmark = pytest.mark.timeout(1200)

ONE = ("instances.encode_prefill_decode.count=1", "encode_priority=tokens")
WAYS: dict[str, tuple[str, ...]] = {
    "chunks": (),
    "stream": ("env.EPD_ENCODE_OVERLAP=stream",),
    "two ranks": (
        "instances.encode_prefill_decode.tensor_parallel_size=2",
        # They have two cores for themselves and the reference.
        "engine_args.distributed_executor_backend=epd_portable.vllm_plugin.executor.EPDExecutor",
    ),
    "second runner": ('env.VLLM_USE_V2_MODEL_RUNNER="1"',),
}
CHUNKS_PX, CHUNKS = 448, 3
"""Side of an image, and chunks of its encoder of three blocks."""


@pytest.fixture(
    scope="module",
    params=[
        "chunks",
        *(pytest.param(each, marks=pytest.mark.full) for each in WAYS if each != "chunks"),
    ],
)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    way: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    begun: servers.Server,
) -> Iterator[Pair]:
    """A topology, which starts while its reference does."""
    second = way == "second runner"
    popen: Popen = request.getfixturevalue("interpreting" if second else "npu_fork")
    config, settings = ROOT / "configs" / "replicas.yaml", [*ONE, *WAYS[way]]
    env = INTERPRETED if second else None
    folder = tmp_path_factory.mktemp("overlap")
    with simulated(folder, settings, config=config, env=env, popen=popen) as split:
        yield Pair(split=split, reference_url=request.getfixturevalue("reference_url"))


@pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
def test_overlapped_response_equals_one_process(pair: Pair, content: Any) -> None:
    answer = ask(pair.split.url, content)
    assert_equal(answer, ask(pair.reference_url, content))
    assert set(answer.sources) <= {"local", "encoder_cache"}


def test_steps_compute_tokens_between_chunks(pair: Pair, way: str) -> None:
    contents = [[picture(seed, CHUNKS_PX), ASK] for seed in range(300, 303)]
    with generating(pair.split.url):
        since_s = time.monotonic()
        answers = [ask(pair.split.url, content) for content in contents]
    for content, answer in zip(contents, answers, strict=True):
        assert_equal(answer, ask(pair.reference_url, content))
    between = []
    for event in pair.split.events(since_s=since_s):
        if event["event"] in ("encode.begin", "encode.end"):
            between.append(0)
        elif event["event"] == "step" and between:
            between[-1] += 1
    assert between, "something was encoded"
    if way == "two ranks":
        return  # Both write events.
    encodes = between[::2]
    assert len(encodes) == len(contents)
    if way == "chunks":
        assert encodes == [CHUNKS - 1] * len(contents), "one step between two chunks"
    else:
        assert min(encodes) >= CHUNKS - 1

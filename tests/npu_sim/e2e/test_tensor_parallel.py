"""A PD instance of two ranks on two simulated devices, each with the item in its memory.

The path is the one that devices take by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import Pair
from tests.e2e.ranks import TWO_RANKS, TwoRanks
from tests.forked import Popen
from tests.npu_sim.e2e.conftest import simulated


@pytest.fixture(scope="module")
def pair(
    npu_fork: Popen, tmp_path_factory: pytest.TempPathFactory, reference_url: str
) -> Iterator[Pair]:
    backend = "instances.prefill_decode.engine_args.distributed_executor_backend"
    # The ranks have two cores for themselves, the encoder and the reference.
    rests = f"{backend}=epd_portable.vllm_plugin.executor.EPDExecutor"
    settings = ["transfer.path=auto", TWO_RANKS, rests]
    folder = tmp_path_factory.mktemp("ranks")
    with simulated(folder, settings, popen=npu_fork) as split:
        yield Pair(split=split, reference_url=reference_url)


class TestTwoRanks(TwoRanks):
    """The item is copied into the slab of the first rank, which the second opens."""

    def test_items_travel_by_the_path_between_devices(self, pair: Pair) -> None:
        answer = ask(pair.split.url, [picture(42), ASK])
        assert [item["path"] for item in answer.items] == ["ipc"]

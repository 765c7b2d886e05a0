"""Engines on NVIDIA devices answer as one process does, with graphs, by every path.

Encode and prefill-decode share the first device, on which the reference is too; two ranks take a
second one. Their twins on Ascend are in tests/npu_sim/e2e.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd_portable.bench import servers
from epd_portable.config.load import load_topology
from epd_portable.platforms import registry
from tests.e2e.asking import ask, ask_all, assert_equal, picture
from tests.e2e.cases import ASK
from tests.e2e.conftest import CONFIG, Pair, running, serving
from tests.e2e.equality import TOLERANCE, FloatEquality
from tests.e2e.ranks import TWO_RANKS, TwoRanks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.needs_cuda,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(1800),
]

GIB = 1 << 30
SHARED = (
    "engine_args.dtype=float32",
    "transfer.pool_bytes=64MiB",
    "instances.encode.devices=[0]",
    "instances.encode.engine_args.gpu_memory_utilization=0.2",
    "instances.encode.engine_args.enforce_eager=true",
    "instances.prefill_decode.engine_args.gpu_memory_utilization=0.3",
    f"instances.prefill_decode.engine_args.kv_cache_memory_bytes={GIB}",
)
GRAPHS = "instances.prefill_decode.engine_args.compilation_config.cudagraph_mode"


@contextmanager
def split_and_whole(folder: Path, *settings: str) -> Iterator[Pair]:
    """Start the reference, and a topology beside it once that has measured the device."""
    args: dict[str, Any] = dict(load_topology(CONFIG, platform="cuda").engine_args)
    args |= {"dtype": "float32", "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": GIB}
    whole = servers.one_process(
        "demo", log=folder / "reference.log", engine_args=args, platform="cuda"
    )
    with (
        serving(whole, "plain vLLM on cuda") as reference,
        running(folder, [*SHARED, *settings], platform="cuda") as split,
    ):
        yield Pair(split=split, reference_url=reference.url)


class TestByEveryPath(FloatEquality):
    """One device, both kinds of graphs, and every path that it has; scheduling is asynchronous."""

    @pytest.fixture(
        scope="class",
        params=[
            ("ipc", "FULL_AND_PIECEWISE"),
            ("ipc", "PIECEWISE"),
            ("shm", "FULL_AND_PIECEWISE"),
            ("tcp", "FULL_AND_PIECEWISE"),
        ],
        ids="-".join,
    )
    def way(self, request: pytest.FixtureRequest) -> tuple[str, str]:
        path, graphs = request.param
        return path, graphs

    @pytest.fixture(scope="class")
    def pair(
        self, way: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pair]:
        path, graphs = way
        with split_and_whole(
            tmp_path_factory.mktemp("cuda"),
            "instances.prefill_decode.devices=[0]",
            f"transfer.path={path}",
            f"{GRAPHS}={graphs}",
        ) as made:
            yield made

    def test_items_travel_by_the_path_that_was_asked_for(
        self, pair: Pair, way: tuple[str, str]
    ) -> None:
        answer = ask(pair.split.url, [picture(40), picture(41), ASK])
        assert [item["path"] for item in answer.items] == [way[0], way[0]]

    def test_items_that_change_from_step_to_step_are_those_of_their_requests(
        self, pair: Pair
    ) -> None:
        """A graph that had recorded an address would replay another request's picture."""
        contents = [[picture(seed), ASK] for seed in range(60, 92)]
        for content, split in zip(contents, ask_all(pair.split.url, contents), strict=True):
            assert_equal(split, ask(pair.reference_url, content), tolerance=TOLERANCE)


class TestTwoRanks(TwoRanks):
    """The second rank opens the slab of the first, on another device."""

    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        if registry.get("cuda").device_count() < 2:
            pytest.skip("takes two devices")
        with split_and_whole(
            tmp_path_factory.mktemp("ranks"),
            TWO_RANKS,
            "instances.prefill_decode.devices=[0, 1]",
            "transfer.path=ipc",
        ) as made:
            yield made

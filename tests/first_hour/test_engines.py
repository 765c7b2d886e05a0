"""Engines on a device answer as one process does, with graphs, by every path.

Encode and prefill-decode share the first device, on which the reference is too; two ranks take a
second one. On the CPU, with `--full` only, the same is a rehearsal.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_portable.launch.plan.machine import has_shares
from epd_portable.platforms import registry
from epd_portable.platforms.traits import TRAITS
from tests.e2e.asking import ask, ask_all, assert_close, assert_equal, picture
from tests.e2e.cases import ASK, SINGLE
from tests.e2e.conftest import Pair, Split, running
from tests.e2e.engines import instance
from tests.e2e.equality import TOLERANCE, FloatEquality, FloatSmoke
from tests.e2e.ranks import TWO_RANKS, TwoRanks
from tests.first_hour.reference import ENV, IS_SIMULATED, engine_args, reference

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(1800)]

GIB = 1 << 30
SHARED = (
    "transfer.pool_bytes=64MiB",
    "instances.encode.devices=[0]",
    "instances.encode.engine_args.gpu_memory_utilization=0.2",
    "instances.encode.engine_args.enforce_eager=true",
    "instances.prefill_decode.engine_args.gpu_memory_utilization=0.3",
    f"instances.prefill_decode.engine_args.kv_cache_memory_bytes={GIB}",
)
"""Of instances that share a device."""
ENCODE_BYTES = 2 * GIB
"""Context, workspaces of kernels and the demo model's tower; its share is a fifth of a device."""
GRAPHS = "instances.prefill_decode.engine_args.compilation_config.cudagraph_mode"


def assert_many_equal(pair: Pair, seeds: Iterable[int]) -> None:
    """Ask for many pictures at once, and one process for each of them."""
    contents = [[picture(seed), ASK] for seed in seeds]
    for content, split in zip(contents, ask_all(pair.split.url, contents), strict=True):
        assert_equal(split, ask(pair.reference_url, content), tolerance=TOLERANCE)


def memory_by_process() -> dict[int, int]:
    """Return the device memory of each process that the driver tells of, in bytes."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    rows = [line.split(",") for line in asked.splitlines() if line.strip()]
    return {int(pid): int(mib) << 20 for pid, mib in rows if mib.strip().isdigit()}


@contextmanager
def split_and_whole(folder: Path, platform: str, *settings: str) -> Iterator[Pair]:
    """Start a topology beside the reference, which is there or has measured the device by then."""
    shared = SHARED if TRAITS[platform].needs_device_copy else ()
    both = [
        f"engine_args.{name}={json.dumps(value)}" for name, value in engine_args(platform).items()
    ]
    with ExitStack() as stack:
        url = os.environ.get("EPD_TEST_REFERENCE")
        if not url:
            url = stack.enter_context(reference(folder, platform)).url
        split = stack.enter_context(
            running(folder, [*both, *shared, *settings], platform=platform, env=ENV)
        )
        yield Pair(split=split, reference_url=url)


def told(split: Split, instance: str) -> dict[str, Any]:
    """Return what an instance says of itself."""
    loaded = split.events("model.loaded", since_s=0)
    return next(event for event in loaded if event["instance"] == instance)


@dataclass(frozen=True)
class Way:
    """How items travel, and how the PD instance computes.

    Attributes:
        path: Of the items.
        graphs: Which of its steps are graphs; the simulated runtime has none.
        runner: Of both instances; ``None`` is vLLM's choice.
        ahead: Whether it schedules steps ahead, as it does by itself.
    """

    platform: str
    path: str
    graphs: str = ""
    runner: int | None = None
    ahead: bool = True

    def __str__(self) -> str:
        runner = f"runner{self.runner}" if self.runner else ""
        differs = self.graphs or runner or ("" if self.ahead else "synchronous")
        return f"{self.platform}-{self.path}-{differs or 'usual'}"

    @property
    def settings(self) -> list[str]:
        chosen = [f"transfer.path={self.path}"]
        if TRAITS[self.platform].visible_devices_env:
            chosen.append("instances.prefill_decode.devices=[0]")
        if self.graphs:
            chosen.append(f"{GRAPHS}={self.graphs}")
        if self.runner:
            chosen.append(f'env.VLLM_USE_V2_MODEL_RUNNER="{self.runner - 1}"')
        if not self.ahead:
            chosen.append("instances.prefill_decode.engine_args.async_scheduling=false")
        return chosen


def ways(*found: Way) -> list[Any]:
    """Mark each with what it needs; on the CPU others compare the same in every run."""
    return [
        pytest.param(
            way,
            id=str(way),
            marks=pytest.mark.full
            if way.platform == "cpu"
            else getattr(pytest.mark, f"needs_{way.platform}"),
        )
        for way in found
    ]


class ByEveryPath:
    """Starts a topology for each way."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, way: Way, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp(str(way))
        with split_and_whole(folder, way.platform, *way.settings) as made:
            yield made

    def test_items_travel_by_the_path_that_was_asked_for(self, pair: Pair, way: Way) -> None:
        answer = ask(pair.split.url, [picture(40), picture(41), ASK])
        assert [item["path"] for item in answer.items] == [way.path, way.path]


class TestInBfloat16(ByEveryPath):
    """Where attention has no float32."""

    @pytest.fixture(
        scope="class",
        params=ways(
            *(Way("npu", path) for path in ("ipc", "shm", "tcp")),
            *(() if IS_SIMULATED else (Way("npu", "ipc", graphs="FULL_DECODE_ONLY"),)),
            Way("npu", "ipc", ahead=False),
        ),
    )
    @classmethod
    def way(cls, request: pytest.FixtureRequest) -> Way:
        way: Way = request.param
        return way

    @pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
    def test_an_answer_is_as_likely_as_that_of_one_process(self, pair: Pair, content: Any) -> None:
        split = ask(pair.split.url, content)
        assert_close(split, ask(pair.reference_url, content), tolerance=0.1)
        assert set(split.sources) <= {"transfer"}


class TestByEveryPath(ByEveryPath, FloatEquality):
    """In float32."""

    @pytest.fixture(
        scope="class",
        params=ways(
            *(Way("cuda", path) for path in ("ipc", "shm", "tcp")),
            Way("cuda", "ipc", graphs="PIECEWISE"),
            Way("cuda", "ipc", runner=1),
            Way("cuda", "ipc", ahead=False),
            *(Way("cpu", path) for path in ("shm", "tcp")),
        ),
    )
    @classmethod
    def way(cls, request: pytest.FixtureRequest) -> Way:
        way: Way = request.param
        return way

    def test_it_computes_as_it_was_asked_to(self, pair: Pair, way: Way) -> None:
        encode, decode = (told(pair.split, f"{role}-0") for role in ("encode", "prefill_decode"))
        assert encode["runner"] == decode["runner"]
        assert way.runner in (None, decode["runner"])
        # On the CPU no step is scheduled ahead.
        assert (encode["ahead"], decode["ahead"]) == (False, way.ahead and way.platform != "cpu")

    def test_items_that_change_from_step_to_step_are_those_of_their_requests(
        self, pair: Pair
    ) -> None:
        """A graph that had recorded an address would replay another request's picture."""
        assert_many_equal(pair, range(60, 92))

    def test_an_encode_job_is_answered_behind_its_computation(self, pair: Pair, way: Way) -> None:
        if way.platform == "cpu":
            pytest.skip("computed is what has been called")
        begin_s = time.monotonic()
        ask(pair.split.url, [picture(42), ASK])
        (begun,), (ended,), (ready,), (answered,) = (
            [event["t_s"] for event in pair.split.events(name, since_s=begin_s)]
            for name in ("encode.begin", "encode.end", "output.ready", "encode.answered")
        )
        assert begun < ended <= ready <= answered

    def test_an_encode_instance_takes_the_memory_of_its_tower_and_no_more(
        self, pair: Pair, way: Way
    ) -> None:
        """Nothing is profiled there, so nothing may be taken for a KV cache or activations."""
        if way.platform != "cuda":
            pytest.skip("asks nvidia-smi")
        used = memory_by_process()
        server = instance(pair.split.pid, "ec_producer")
        pids = {server.pid, *(child.pid for child in server.children(recursive=True))}
        if not pids & used.keys():
            pytest.skip("nvidia-smi does not tell memory by process here (another pid namespace)")
        assert sum(used.get(pid, 0) for pid in pids) < ENCODE_BYTES


@pytest.mark.needs_cuda
class TestGraphsOfTheEncoder(FloatSmoke):
    """The encoder's graphs write where they wrote before; what is sent must be a copy."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        args = "instances.encode.engine_args"
        with split_and_whole(
            tmp_path_factory.mktemp("graphs"),
            "cuda",
            "instances.prefill_decode.devices=[0]",
            "transfer.path=ipc",
            f"{args}.enforce_eager=false",
            f"{args}.compilation_config.cudagraph_mm_encoder=true",
        ) as made:
            yield made

    def test_items_that_are_encoded_one_after_the_other_stay_what_they_were(
        self, pair: Pair
    ) -> None:
        assert_many_equal(pair, range(160, 192))


@pytest.mark.needs_cuda
@pytest.mark.skipif(
    not has_shares(TRAITS["cuda"], os.environ), reason="NVIDIA's MPS does not run here"
)
class TestShares(FloatSmoke):
    """Both instances compute at the same moment, each with its part of one device."""

    @pytest.fixture(scope="class", params=["ipc", "shm"])
    @classmethod
    def pair(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pair]:
        with split_and_whole(
            tmp_path_factory.mktemp("shares"),
            "cuda",
            "instances.prefill_decode.devices=[0]",
            f"transfer.path={request.param}",
            "instances.encode.share=30",
            "instances.prefill_decode.share=70",
        ) as made:
            yield made

    def test_each_instance_is_told_its_part(self, pair: Pair) -> None:
        variable = str(TRAITS["cuda"].share_env)
        both = [instance(pair.split.pid, role) for role in ("ec_producer", "ec_consumer")]
        assert [server.environ().get(variable) for server in both] == ["30", "70"]

    def test_many_at_once_are_answered_as_by_one_process(self, pair: Pair) -> None:
        assert_many_equal(pair, range(260, 292))


@pytest.mark.needs_cuda
class TestTwoRanks(TwoRanks):
    """The second rank opens the slab of the first, on another device."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        if registry.get("cuda").device_count() < 2:
            pytest.skip("takes two devices")
        with split_and_whole(
            tmp_path_factory.mktemp("ranks"),
            "cuda",
            TWO_RANKS,
            "instances.prefill_decode.devices=[0, 1]",
            "transfer.path=ipc",
        ) as made:
            yield made

"""Engines on a device answer as one process does, with graphs, by every path.

Encode and prefill-decode share the first device, on which the reference is too; two ranks take a
second one. On the CPU, with `--full` only, the same is a rehearsal.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_portable.platforms import registry
from epd_portable.platforms.traits import TRAITS
from tests.e2e.asking import ask, ask_all, assert_brought, assert_close, assert_equal, picture
from tests.e2e.cases import ASK, SINGLE
from tests.e2e.conftest import Pair, Split, running
from tests.e2e.engines import instance
from tests.e2e.equality import FloatEquality
from tests.e2e.ranks import TWO_RANKS, TwoRanks
from tests.first_hour.reference import ENV, IS_SIMULATED, engine_args, reference, url_of

pytestmark = [pytest.mark.e2e, pytest.mark.needs_vllm, pytest.mark.timeout(1800)]

GIB = 1 << 30
PD, ENCODE = "instances.prefill_decode", "instances.encode"
SHARED = (
    "transfer.pool_bytes=64MiB",
    f"{ENCODE}.devices=[0]",
    f"{ENCODE}.engine_args.gpu_memory_utilization=0.2",
    f"{ENCODE}.engine_args.enforce_eager=true",
    f"{PD}.devices=[0]",
    f"{PD}.engine_args.gpu_memory_utilization=0.3",
    f"{PD}.engine_args.kv_cache_memory_bytes={GIB}",
)
"""Settings of instances that share a device."""
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ENCODE_BYTES = 2 * GIB
"""Context, workspaces of kernels and the demo model's tower; its share is a fifth of a device."""
GRAPHS = f"{PD}.engine_args.compilation_config.cudagraph_mode"
SYNCHRONOUS = ("synchronous", f"{PD}.engine_args.async_scheduling=false")


@dataclass(frozen=True)
class Way:
    """Transfer path of items, and further settings of the topology.

    Attributes:
        path: Of the items.
        mode: Name of what it is asked for, and settings, as ``--set`` takes them.
    """

    platform: str
    path: str
    mode: tuple[str, ...] = ("usual",)

    def __str__(self) -> str:
        return f"{self.platform}-{self.path}-{self.mode[0]}"


FLOAT32 = [
    *(Way("cuda", path) for path in ("ipc", "shm", "tcp")),
    *(Way("cpu", path) for path in ("shm", "tcp")),
    Way("cuda", "ipc", ("piecewise", f"{GRAPHS}=PIECEWISE")),
    Way("cuda", "ipc", ("first-runner", 'env.VLLM_USE_V2_MODEL_RUNNER="0"')),
    Way("cuda", "ipc", SYNCHRONOUS),
    # They write where they wrote before, so what is sent must be a copy.
    Way(
        "cuda",
        "ipc",
        (
            "encoder-graphs",
            f"{ENCODE}.engine_args.enforce_eager=false",
            f"{ENCODE}.engine_args.compilation_config.cudagraph_mm_encoder=true",
        ),
    ),
    *(
        Way("cuda", path, ("shares", f"{ENCODE}.env.{SHARE}='30'", f"{PD}.env.{SHARE}='70'"))
        for path in ("ipc", "shm")
    ),
]
BFLOAT16 = [
    *(Way("npu", path) for path in ("ipc", "shm", "tcp")),
    Way("npu", "ipc", SYNCHRONOUS),
    Way("npu", "ipc", ("full-graphs", f"{GRAPHS}=FULL_DECODE_ONLY")),
]
RANKS = [Way("cuda", "ipc", ("two-ranks", TWO_RANKS, f"{PD}.devices=[0, 1]"))]


def by(ways: list[Way]) -> pytest.MarkDecorator:
    """Start a topology for each; on the CPU others compare the same in every run."""

    def marks(way: Way) -> Iterator[pytest.MarkDecorator]:
        yield (
            pytest.mark.full
            if way.platform == "cpu"
            else getattr(pytest.mark, f"needs_{way.platform}")
        )
        if way.mode[0] == "shares":
            pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
            runs = Path(pipes, "control").exists()
            yield pytest.mark.skipif(not runs, reason="NVIDIA's MPS does not run here")
        if way.mode[0] == "full-graphs":
            yield pytest.mark.skipif(IS_SIMULATED, reason="engines' graphs are not simulated")

    found = [pytest.param(way, id=str(way), marks=[*marks(way)]) for way in ways]
    return pytest.mark.parametrize("way", found, scope="class")


@pytest.fixture(scope="class")
def pair(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start it, beside the reference that the first hour starts if there is one."""
    if way.mode[0] == "two-ranks" and registry.get("cuda").device_count() < 2:
        pytest.skip("takes two devices")
    folder = tmp_path_factory.mktemp(str(way))
    shared = SHARED if TRAITS[way.platform].needs_device_copy else ()
    both = [
        f"engine_args.{name}={json.dumps(value)}"
        for name, value in engine_args(way.platform).items()
    ]
    settings = [*both, *shared, f"transfer.path={way.path}", *way.mode[1:]]
    log = os.environ.get("EPD_TEST_REFERENCE")
    with ExitStack() as stack:
        split = stack.enter_context(running(folder, settings, platform=way.platform, env=ENV))
        url = url_of(Path(log)) if log else ""
        url = url or stack.enter_context(reference(folder, way.platform)).url
        yield Pair(split=split, reference_url=url)


def told(split: Split, instance: str) -> dict[str, Any]:
    """Return what an instance says of itself."""
    loaded = split.events("model.loaded", since_s=0)
    return next(event for event in loaded if event["instance"] == instance)


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


class Items:
    """Tests of the items, with any front end."""

    def test_items_travel_by_the_path_that_was_asked_for(self, pair: Pair, way: Way) -> None:
        answer = ask(pair.split.url, [picture(40), picture(41), ASK])
        assert [item["path"] for item in answer.items] == [way.path, way.path]


class ManyItems(Items):
    """In float32."""

    def test_changing_items_reach_their_own_requests(self, pair: Pair) -> None:
        """A graph that had recorded an address would replay another request's picture."""
        contents = [[picture(seed), ASK] for seed in range(60, 92)]
        for content, split in zip(contents, ask_all(pair.split.url, contents), strict=True):
            assert_equal(split, ask(pair.reference_url, content))


@by(BFLOAT16)
class TestInBfloat16(Items):
    """Tests where attention has no float32."""

    @pytest.mark.parametrize("content", SINGLE.values(), ids=SINGLE)
    def test_an_answer_is_as_likely_as_that_of_one_process(self, pair: Pair, content: Any) -> None:
        split = ask(pair.split.url, content)
        assert_close(split, ask(pair.reference_url, content))
        assert_brought(split, content, "transfer")


@by(FLOAT32)
class TestInFloat32(ManyItems, FloatEquality):
    """Equal."""

    def test_engines_run_in_the_configured_mode(self, pair: Pair, way: Way) -> None:
        encode, decode = (told(pair.split, f"{role}-0") for role in ("encode", "prefill_decode"))
        assert encode["runner"] == decode["runner"]
        assert way.mode[0] != "first-runner" or decode["runner"] == 1
        # On the CPU no step is scheduled ahead.
        ahead = way.platform != "cpu" and way.mode != SYNCHRONOUS
        assert (encode["ahead"], decode["ahead"]) == (False, ahead)
        servers = [instance(pair.split.pid, role) for role in ("ec_producer", "ec_consumer")]
        shares = [server.environ().get(SHARE) for server in servers]
        assert shares == (["30", "70"] if way.mode[0] == "shares" else [None, None])

    def test_an_encode_job_is_answered_behind_its_computation(self, pair: Pair, way: Way) -> None:
        if way.platform == "cpu":
            pytest.skip("computed is what has been called")
        begin_s = time.monotonic()
        ask(pair.split.url, [picture(42), ASK])
        (begun,), (ended,), (ready,), (answered,) = (
            [event["t_s"] for event in pair.split.events(name, since_s=begin_s)]
            for name in ("encode.begin", "encode.end", "output.ready", "encode.finished")
        )
        # The first runner hands an output on within what it traces as encoding.
        assert begun < min(ended, ready)
        assert max(ended, ready) <= answered

    def test_encoder_takes_memory_of_its_tower_and_no_more(self, pair: Pair, way: Way) -> None:
        """No model is profiled there, so no memory may be taken for a KV cache or activations."""
        if way.platform == "cpu" or way.mode[0] == "encoder-graphs":
            pytest.skip("asks nvidia-smi, of a tower without graphs")
        used = memory_by_process()
        server = instance(pair.split.pid, "ec_producer")
        pids = {server.pid, *(child.pid for child in server.children(recursive=True))}
        if not pids & used.keys():
            pytest.skip("nvidia-smi does not tell memory by process here (another pid namespace)")
        assert sum(used.get(pid, 0) for pid in pids) < ENCODE_BYTES


@by(RANKS)
class TestTwoRanks(TwoRanks):
    """The second rank opens the slab of the first, on another device."""

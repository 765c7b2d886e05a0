"""Reports of an encode worker: its device has computed, not only received the work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.pairs import Pair, Route
from tests.kit.encode_side import WIDTH
from tests.kit.ends import PrefillSide
from tests.npu_sim.transfer.ends import Encode

LATE_S = 0.6
TOKENS = 30


@pytest.fixture(scope="module", params=[Route(path, Pair("npu", "npu")) for path in ("ipc", "shm")])
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture
def encode(route: Route, pd: PrefillSide, tmp_path: Path) -> Iterator[Encode]:
    made = Encode(route.path)
    # The environment was read in the process that this one is forked off.
    made.run("from epd_portable.log import trace")
    made.run(f"trace._folder = {str(tmp_path)!r}")
    yield made
    made.close()


def deliver(encode: Encode, pd: PrefillSide, name: str) -> float:
    """Have an item granted, put out to be computed late, and placed; say when that began."""
    pd.arrive(name, name, TOKENS)
    encode.order(f"t-{name}", name, pd.address, (TOKENS, WIDTH))
    pd.step_until(lambda: pd.granted(f"t-{name}"))
    encode.wait_until_granted(f"t-{name}")
    begin_s = time.monotonic()
    encode.put_out_all([name], TOKENS, int(LATE_S * 1e6))
    pd.step_until(lambda: name in pd.placed)
    encode.wait_until_ended(f"t-{name}")
    return begin_s


def traced(folder: Path, event: str) -> list[dict[str, Any]]:
    (file,) = folder.glob("process-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def test_write_begins_when_its_output_is_computed(
    encode: Encode, pd: PrefillSide, tmp_path: Path
) -> None:
    for name in ("before", "cat"):  # The first opens the consumer's memory.
        begin_s = deliver(encode, pd, name)
        (ready,) = [e for e in traced(tmp_path, "output.ready") if e["mm_hash"] == name]
        (written,) = [e for e in traced(tmp_path, "transfer.written") if e["mm_hash"] == name]
        assert ready["t_s"] - begin_s >= LATE_S * 0.9
        assert written["t_s"] >= ready["t_s"]
    assert written["write_s"] < LATE_S / 2, "it waited for the computation in that time"

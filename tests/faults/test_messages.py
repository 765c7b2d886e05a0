"""Control messages that are lost, repeated, late, out of order, cut, or from a former life."""

from __future__ import annotations

import random
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.ends import PATIENT, Close, addresses, consumer, deliver, producer, settle
from tests.faults.meddler import (
    FAULTS,
    LOSSY,
    Fault,
    Meddler,
    delayed,
    dropped,
    duplicated,
    everything,
    reordered,
    untouched,
)
from tests.faults.seeds import SEEDS
from tests.kit.encode_side import WIDTH

PATHS = ("shm", "tcp", "collective", "nixl")
ALWAYS = {(everything, path) for path in PATHS} | {
    (dropped, "shm"),
    (duplicated, "tcp"),
    (reordered, "shm"),
}
"""Everything at once by every path; alone what waits for no deadline, and losses, which show what
is never answered. The rest with ``--full``."""
CASES = [
    pytest.param(
        fault,
        path,
        id=f"{fault.__name__}-{path}",
        marks=() if (fault, path) in ALWAYS else pytest.mark.full,
    )
    for fault in FAULTS
    for path in PATHS
]


TOKEN_BYTES = WIDTH * 4


def items(name: str, seed: int, count: int) -> dict[str, int]:
    """Return tokens of items by their names."""
    chance = random.Random(f"{name}/{seed}")
    return {f"{name}-{number}": chance.choice((16, 60, 200)) for number in range(count)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "path"), CASES)
def test_requests_get_their_own_items_and_nothing_is_retained(
    tmp_path: Path, close: Close, fault: Fault, path: str, seed: int
) -> None:
    address, front = addresses(tmp_path)
    pd = consumer(path, address, close, pool_bytes=500 * TOKEN_BYTES)
    close(Meddler(front, address, fault, seed).close)
    sender = producer(path, close)
    asked = items(fault.__name__, seed, 20)
    sources = deliver(pd, sender, front, asked, seed)
    assert len(sources) == len(asked)
    # Where messages are lost, items that wait behind a lost one may pass their deadlines.
    enough = 1 if fault in LOSSY else len(asked) // 2
    assert list(sources.values()).count("transfer") >= enough, sources
    settle(pd, sender)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("path", PATHS)
def test_messages_of_a_former_life_change_nothing(
    tmp_path: Path, close: Close, path: str, seed: int
) -> None:
    address, front = addresses(tmp_path)
    with ExitStack() as life:
        first = consumer(path, address, life.callback)
        meddler = Meddler(front, address, untouched, seed)
        close(meddler.close)
        sender = producer(path, close, **PATIENT)
        deliver(first, sender, front, items("first", seed, 10), seed)
        for name, num_tokens in items("lost", seed, 4).items():
            first.arrive(name, name, num_tokens)
        first.step()
        former = list(meddler.seen)
    second = consumer(
        path, address, close, pool=first.pool, pool_bytes=500 * TOKEN_BYTES, **PATIENT
    )
    for _ in range(3):
        meddler.replay(former)
        asked = items(f"second-{uuid.uuid4().hex}", seed, 10)
        sources = deliver(second, sender, front, asked, seed)
        assert set(sources.values()) == {"transfer"}
    settle(second, sender)


@pytest.mark.parametrize(
    "path",
    [
        "shm",
        pytest.param("tcp", marks=pytest.mark.full),
        pytest.param("collective", marks=pytest.mark.full),
    ],
)
def test_pool_for_one_item_serves_all_despite_late_messages(
    tmp_path: Path, close: Close, path: str
) -> None:
    address, front = addresses(tmp_path)
    pd = consumer(path, address, close, pool_bytes=200 * TOKEN_BYTES)
    close(Meddler(front, address, delayed, 1).close)
    sender = producer(path, close)
    asked = {f"wide-{number}": 200 for number in range(6)}
    assert len(deliver(pd, sender, front, asked, 1)) == len(asked)
    settle(pd, sender)

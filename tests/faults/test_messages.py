"""Control messages that are lost, repeated, late, out of order, cut, or from a former life."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.ends import PATIENT_S, Consumer, addresses, deliver, make_sender, settle
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
from tests.faults.small.pictures import TOKEN_BYTES, Picture

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


@pytest.fixture
def pool() -> str:
    return f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def close() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Name what is closed at the end, the last first."""
    closing: list[Callable[[], None]] = []
    yield closing.append
    for each in reversed(closing):
        each()


def pictures(name: str, seed: int, count: int) -> list[Picture]:
    chance = random.Random(f"{name}/{seed}")
    return [Picture(f"{name}-{number}", chance.choice((16, 60, 200))) for number in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "path"), CASES)
def test_every_request_is_served_with_its_own_item_and_nothing_is_kept(
    tmp_path: Path,
    pool: str,
    close: Callable[[Callable[[], None]], None],
    fault: Fault,
    path: str,
    seed: int,
) -> None:
    address, front = addresses(tmp_path)
    consumer = Consumer(address, pool, path, pool_bytes=500 * TOKEN_BYTES)
    close(consumer.close)
    meddler = Meddler(front, address, fault, seed)
    close(meddler.close)
    sender = make_sender(path)
    close(sender.close)
    asked = pictures(fault.__name__, seed, 20)
    sources = deliver(consumer, sender, front, asked, seed)
    assert len(sources) == len(asked)
    # Where messages are lost, items that wait behind a lost one may pass their deadlines.
    enough = 1 if fault in LOSSY else len(asked) // 2
    assert list(sources.values()).count("transfer") >= enough, sources
    settle(consumer, sender)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("path", PATHS)
def test_messages_of_a_former_life_change_nothing(
    tmp_path: Path, pool: str, close: Callable[[Callable[[], None]], None], path: str, seed: int
) -> None:
    address, front = addresses(tmp_path)
    first = Consumer(address, pool, path)
    meddler = Meddler(front, address, untouched, seed)
    close(meddler.close)
    sender = make_sender(path, lease_s=PATIENT_S, wait_s=PATIENT_S)
    close(sender.close)
    deliver(first, sender, front, pictures("first", seed, 10), seed)
    half_way = pictures("lost", seed, 4)
    for picture in half_way:
        first.arrive(picture, f"t-{picture.name}")
    first.step()
    former = list(meddler.seen)
    first.close()
    second = Consumer(
        address, pool, path, pool_bytes=500 * TOKEN_BYTES, lease_s=PATIENT_S, wait_s=PATIENT_S
    )
    close(second.close)
    for _ in range(3):
        meddler.replay(former)
        asked = pictures(f"second-{uuid.uuid4().hex}", seed, 10)
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
def test_a_pool_for_one_item_serves_everybody_through_late_messages(
    tmp_path: Path, pool: str, close: Callable[[Callable[[], None]], None], path: str
) -> None:
    address, front = addresses(tmp_path)
    consumer = Consumer(address, pool, path, pool_bytes=200 * TOKEN_BYTES)
    close(consumer.close)
    meddler = Meddler(front, address, delayed, 1)
    close(meddler.close)
    sender = make_sender(path)
    close(sender.close)
    asked = [Picture(f"wide-{number}", 200) for number in range(6)]
    assert len(deliver(consumer, sender, front, asked, 1)) == len(asked)
    settle(consumer, sender)

"""Requests whose right answers are known, and what must hold when a run is over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.faults.small.pictures import Picture
from tests.faults.topology import Reply, Topology

ROUNDS = 30
LOST = 503
"""Status of a response when an engine or the front was lost."""


def requests(name: str, seed: int, count: int) -> list[list[Picture]]:
    """Return requests of one to three pictures; some share a picture, some are large."""
    chance = random.Random(f"{name}/{seed}")
    shared = Picture(f"{name}/{seed}/shared", 12, 0.02)
    return [
        [
            shared
            if chance.random() < 0.15
            else Picture(
                f"{name}/{seed}/{number}/{place}",
                chance.choice((4, 6, 12, 40, 200)),
                chance.choice((0.0, 0.01, 0.05)),
            )
            for place in range(chance.choice((1, 1, 2, 3)))
        ]
        for number in range(count)
    ]


def send(topology: Topology, asked: Sequence[Sequence[Picture]]) -> list[Reply]:
    """Send requests at the same time; returns how each ended, in order."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(topology.ask, asked))


def send_until_struck(
    topology: Topology, name: str, seed: int, count: int
) -> tuple[list[list[Picture]], list[Reply]]:
    """Send requests until the armed fault has struck; returns them and how each ended.

    Encoders take what arrives together in one step, so a point may be passed less often than items
    are encoded.
    """
    asked: list[list[Picture]] = []
    replies: list[Reply] = []
    for number in range(ROUNDS):
        more = requests(f"{name}/{number}", seed, count)
        asked += more
        replies += send(topology, more)
        if topology.faults.struck():
            return asked, replies
    raise AssertionError(f"{name}: the point was not passed often enough by {len(asked)} requests")


def expected(pictures: Sequence[Picture]) -> str:
    """Return the answer of an undisturbed run."""
    return " ".join(picture.digest() for picture in pictures)


def check(
    asked: Sequence[Sequence[Picture]],
    replies: Sequence[Reply],
    *,
    failures: bool,
    broken: bool = False,
) -> int:
    """Check that every answer is right, or a clear error where those are allowed.

    Args:
        asked: Requests.
        replies: How they ended.
        failures: Whether an error is allowed.
        broken: Whether the connection may be lost.

    Returns:
        How many were answered.
    """
    answered = 0
    for pictures, reply in zip(asked, replies, strict=True):
        if reply.status == 200:
            assert reply.text == expected(pictures), "an answer to another picture"
            answered += 1
        elif reply.status == 0:
            assert broken, reply
        else:
            assert failures and reply.status == LOST and reply.text, reply
    return answered


def quiet(topology: Topology) -> list[str]:
    """Return what instances still keep although nothing is under way, besides cached items."""
    left = []
    for name in topology.names:
        state = topology.state(name, reset=True)
        left += [f"{name}: {count} {kind}" for kind, count in state.items() if count]
    return left

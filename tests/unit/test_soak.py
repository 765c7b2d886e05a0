"""Problems that a long run reports: growth of processes, and responses of its requests."""

from __future__ import annotations

import random
from collections.abc import Callable

import httpx
import pytest

from ci.soak import MEMORY, Clients, growth

COUNT = 480
"""Samples of forty minutes."""


def series(value: Callable[[int], float]) -> list[float]:
    """Return samples with noise of 8, which is that of memory in MiB under load."""
    chance = random.Random(1)
    return [value(number) + chance.uniform(-4, 4) for number in range(COUNT)]


STEADY = {
    "noise": lambda number: 300,
    "a step": lambda number: 300 + 40 * (number > COUNT / 2),
    "a peak": lambda number: 300 + 200 * (COUNT / 3 < number < COUNT / 2),
    "a cache that fills": lambda number: 300 + 40 * min(1.0, 4 * number / COUNT),
    "release of memory": lambda number: 300 - 40 * number / COUNT,
}


@pytest.mark.parametrize("value", STEADY.values(), ids=STEADY)
def test_steady_memory_is_no_growth(value: Callable[[int], float]) -> None:
    assert growth({("front", MEMORY): series(value)}) == []


def test_leak_of_16_mib_is_found_in_noise() -> None:
    leaking, steady = series(lambda number: 300 + 16 * number / COUNT), series(lambda number: 300)
    (line,) = growth({("front", MEMORY): leaking, ("encode-1", MEMORY): steady})
    assert line.startswith(f"front: {MEMORY} rises by ")


@pytest.mark.parametrize("quantity", ["threads", "sockets", "other files"])
def test_leak_of_one_every_minute_is_found(quantity: str) -> None:
    leaking = [float(20 + number // 12) for number in range(COUNT)]
    pool = [20 + random.Random(number).randrange(4) for number in range(COUNT)]
    (line,) = growth({("front", quantity): leaking, ("encode-1", quantity): pool})
    assert line.startswith(f"front: {quantity} rises by ")


def clients_of(response: httpx.Response) -> Clients:
    """Return clients of a front that sends this response to every request."""
    transport = httpx.MockTransport(lambda request: response)
    return Clients(lambda: httpx.Client(base_url="http://front", transport=transport))


def test_error_without_a_body_is_a_failure_of_each_kind() -> None:
    clients = clients_of(httpx.Response(503))
    for number in range(len(clients.kinds)):
        clients.send(number)
    kinds = enumerate(clients.kinds)
    assert clients.failed == [f"{kind} {number}: status 503: " for number, kind in kinds]
    assert "described" not in clients.counts


@pytest.mark.parametrize("lines", [[], ["data: {}"]], ids=["empty", "cut"])
def test_stream_without_an_end_is_a_failure(lines: list[str]) -> None:
    clients = clients_of(httpx.Response(200, text="\n\n".join(lines)))
    number = [*clients.kinds].index("stream")
    clients.send(number)
    assert clients.failed == [f"stream {number}: ended with {lines}"]


def test_empty_stream_that_is_to_be_aborted_is_a_failure() -> None:
    clients = clients_of(httpx.Response(200, text=""))
    number = [*clients.kinds].index("aborted stream")
    clients.send(number)
    assert clients.failed == [f"aborted stream {number}: began with ''"]


def test_run_without_enough_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="3 samples: at least 4 are needed"):
        growth({("front", "threads"): [1.0, 1.0, 1.0]})

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable

import pytest
from starlette.types import Message

from epd_portable.errors import RequestError
from epd_portable.router import incoming
from epd_portable.router.incoming import SMALL_BYTES, Bodies, ClientGoneError

MEBIBYTE = 1 << 20
CHUNKED = {"transfer-encoding": "chunked"}


class Transport(asyncio.Transport):
    """Takes what is written, and notes whether more may come."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.paused = False
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return False


class Arriving:
    """A request whose body arrives in pieces; counts those that were taken."""

    def __init__(self, sizes: Iterable[int], headers: dict[str, str]) -> None:
        self._sizes = list(sizes)
        self.taken = 0


def bodies(max_bytes: int, max_sum_bytes: int = 1 << 30) -> Bodies:
    return Bodies(max_bytes=max_bytes, max_sum_bytes=max_sum_bytes)


async def read(all_bodies: Bodies, arriving: Arriving, headers: dict[str, str]) -> bytes:
    with all_bodies.holding() as body:
        return bytes(await body.read(headers, arriving.receive))


async def test_a_body_within_the_limit_is_read_whole() -> None:
    assert await read(bodies(10), Arriving([3, 4, 3]), CHUNKED) == b"x" * 10


@pytest.mark.parametrize("headers", [{}, {"content-length": "0"}])
async def test_without_a_body_nothing_is_waited_for(headers: dict[str, str]) -> None:
    arriving = Arriving([])
    assert await read(bodies(10), arriving, headers) == b""


@pytest.mark.parametrize("headers", [CHUNKED, {"content-length": str(100 * MEBIBYTE)}])
async def test_a_body_of_100_mb_is_dropped_while_it_arrives(headers: dict[str, str]) -> None:
    arriving = Arriving([MEBIBYTE] * 100)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"at most 2097152 bytes.*max_body_bytes") as caught:
            await read(bodies(2 * MEBIBYTE), arriving, headers)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert caught.value.status == 413
    assert arriving.taken == 100
    assert peak_bytes < 8 * MEBIBYTE


async def test_a_client_that_waits_for_permission_is_refused_unread() -> None:
    arriving = Arriving([MEBIBYTE])
    headers = {"content-length": str(MEBIBYTE), "expect": "100-Continue"}
    with pytest.raises(RequestError, match="1048576 bytes"):
        await read(bodies(10), arriving, headers)
    assert arriving.taken == 0


async def test_a_client_that_sends_for_too_long_is_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stalls() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(incoming, "DRAIN_TIMEOUT_S", 0.0)
    with bodies(10).holding() as body, pytest.raises(RequestError, match="11 bytes"):
        await body.read({"content-length": "11"}, stalls)


@pytest.mark.parametrize("headers", [CHUNKED, {"content-length": "100"}])
async def test_a_client_that_goes_away_is_no_error_of_the_request(headers: dict[str, str]) -> None:
    with pytest.raises(ClientGoneError):
        await read(bodies(10), Arriving([]), headers)


async def test_what_came_counts_and_not_what_was_announced() -> None:
    all_bodies = bodies(MEBIBYTE, MEBIBYTE)
    with all_bodies.holding() as announced:
        waiting = asyncio.create_task(
            announced.read({"content-length": str(MEBIBYTE)}, asyncio.Event().wait)
        )
        await asyncio.sleep(0)
        assert all_bodies.held_bytes == 0
        assert len(await read(all_bodies, Arriving([MEBIBYTE]), CHUNKED)) == MEBIBYTE
        waiting.cancel()


async def test_the_sum_is_bounded_and_falls_when_bodies_are_done_with() -> None:
    all_bodies = bodies(MEBIBYTE, 2 * MEBIBYTE)
    with all_bodies.holding() as first, all_bodies.holding() as second:
        await first.read(CHUNKED, Arriving([MEBIBYTE]).receive)
        await second.read(CHUNKED, Arriving([MEBIBYTE - 1]).receive)
        with pytest.raises(RequestError, match="max_bodies_bytes of 2097152") as caught:
            await read(all_bodies, Arriving([SMALL_BYTES + 1, 1]), CHUNKED)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2)
        # Small ones are no danger.
        assert await read(all_bodies, Arriving([SMALL_BYTES]), CHUNKED)
    assert all_bodies.held_bytes == 0

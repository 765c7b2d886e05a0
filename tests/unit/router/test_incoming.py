from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from epd_portable.errors import RequestError
from epd_portable.router.http import incoming
from epd_portable.router.http.incoming import SMALL_BYTES, Bodies, ClientGoneError, HeldBytes

MEBIBYTE = 1 << 20
CHUNKED = {"transfer-encoding": "chunked"}


class Arriving:
    """A request whose body arrives in pieces; counts those that were taken."""

    def __init__(self, sizes: Iterable[int], headers: dict[str, str]) -> None:
        self.headers = headers
        self._sizes = list(sizes)
        self.taken = 0

    def _next(self) -> int:
        if self.taken == len(self._sizes):
            raise ClientGoneError("")
        self.taken += 1
        return self._sizes[self.taken - 1]

    async def body(self, count: Callable[[int], None]) -> bytearray:
        data = bytearray(b"x" * self._next())
        count(len(data))
        while self.taken < len(self._sizes):
            data += b"x" * self._next()
            count(len(data))
        return data

    async def drop_body(self) -> None:
        if not self._sizes:
            raise ClientGoneError("")
        while self.taken < len(self._sizes):
            self._next()


class Stalled:
    """A request whose body does not come."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    async def body(self, count: Callable[[int], None]) -> bytearray:
        await asyncio.Event().wait()
        raise AssertionError

    async def drop_body(self) -> None:
        await asyncio.Event().wait()


def bodies(max_bytes: int, max_sum_bytes: int = 1 << 30) -> Bodies:
    return Bodies(max_bytes=max_bytes, held=HeldBytes(max_sum_bytes))


async def read(all_bodies: Bodies, sizes: Iterable[int], headers: dict[str, str]) -> bytes:
    return await read_from(all_bodies, Arriving(sizes, headers))


async def read_from(all_bodies: Bodies, arriving: Any) -> bytes:
    with all_bodies.holding() as body:
        return bytes(await body.read(arriving))


async def test_a_body_within_the_limit_is_read_whole() -> None:
    assert await read(bodies(10), [3, 4, 3], CHUNKED) == b"x" * 10


@pytest.mark.parametrize("headers", [{}, {"content-length": "0"}])
async def test_without_a_body_nothing_is_waited_for(headers: dict[str, str]) -> None:
    assert await read(bodies(10), [], headers) == b""


@pytest.mark.parametrize("headers", [CHUNKED, {"content-length": str(100 * MEBIBYTE)}])
async def test_a_body_of_100_mb_is_dropped_while_it_arrives(headers: dict[str, str]) -> None:
    arriving = Arriving([MEBIBYTE] * 100, headers)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"at most 2097152 bytes.*max_body_bytes") as caught:
            await read_from(bodies(2 * MEBIBYTE), arriving)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert caught.value.status == 413
    assert arriving.taken == 100
    assert peak_bytes < 8 * MEBIBYTE


async def test_a_client_that_waits_for_permission_is_refused_unread() -> None:
    headers = {"content-length": str(MEBIBYTE), "expect": "100-Continue"}
    arriving = Arriving([MEBIBYTE], headers)
    with pytest.raises(RequestError, match="1048576 bytes"):
        await read_from(bodies(10), arriving)
    assert arriving.taken == 0


async def test_a_client_that_sends_for_too_long_is_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "DRAIN_TIMEOUT_S", 0.0)
    with pytest.raises(RequestError, match="11 bytes"):
        await read_from(bodies(10), Stalled({"content-length": "11"}))


@pytest.mark.parametrize("headers", [CHUNKED, {"content-length": "100"}])
async def test_a_client_that_goes_away_is_no_error_of_the_request(headers: dict[str, str]) -> None:
    with pytest.raises(ClientGoneError):
        await read(bodies(10), [], headers)


async def test_what_came_counts_and_not_what_was_announced() -> None:
    all_bodies = bodies(MEBIBYTE, MEBIBYTE)
    with all_bodies.holding() as announced:
        waiting = asyncio.create_task(
            announced.read(cast(Any, Stalled({"content-length": str(MEBIBYTE)})))
        )
        await asyncio.sleep(0)
        assert all_bodies.held.count == 0
        assert len(await read(all_bodies, [MEBIBYTE], CHUNKED)) == MEBIBYTE
        waiting.cancel()


async def test_the_sum_is_bounded_and_falls_when_bodies_are_done_with() -> None:
    all_bodies = bodies(MEBIBYTE, 2 * MEBIBYTE)
    with all_bodies.holding() as first, all_bodies.holding() as second:
        await first.read(cast(Any, Arriving([MEBIBYTE], CHUNKED)))
        await second.read(cast(Any, Arriving([MEBIBYTE - 1], CHUNKED)))
        with pytest.raises(RequestError, match="max_bodies_bytes of 2097152") as caught:
            await read(all_bodies, [SMALL_BYTES + 1, 1], CHUNKED)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2)
        # Small ones are no danger.
        assert await read(all_bodies, [SMALL_BYTES], CHUNKED)
    assert all_bodies.held.count == 0

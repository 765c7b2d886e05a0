from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from epd_portable.errors import RequestError
from epd_portable.router.http import incoming
from epd_portable.router.http.incoming import SMALL_BYTES, Bodies, HeldBytes

MEBIBYTE = 1 << 20
CHUNKED = {"transfer-encoding": "chunked"}


class Arriving:
    """A request whose body arrives in pieces, and does not end if there are none."""

    def __init__(self, sizes: Iterable[int], headers: dict[str, str]) -> None:
        self.headers = headers
        self._sizes = list(sizes)

    async def body(self, count: Callable[[int], None]) -> bytearray:
        data = bytearray()
        for size in self._sizes:
            data += b"x" * size
            count(len(data))
        if not self._sizes:
            await asyncio.Event().wait()
        return data

    async def drop_body(self) -> None:
        if not self._sizes:
            await asyncio.Event().wait()


def bodies(max_bytes: int, max_sum_bytes: int = 1 << 30) -> Bodies:
    return Bodies(max_bytes=max_bytes, held=HeldBytes(max_sum_bytes))


async def read(all_bodies: Bodies, sizes: Iterable[int], headers: dict[str, str]) -> bytes:
    return await read_from(all_bodies, Arriving(sizes, headers))


async def read_from(all_bodies: Bodies, arriving: Any) -> bytes:
    with all_bodies.holding() as body:
        return bytes(await body.read(arriving))


async def test_a_client_that_sends_for_too_long_is_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "DRAIN_TIMEOUT_S", 0.0)
    with pytest.raises(RequestError, match="11 bytes"):
        await read_from(bodies(10), Arriving([], {"content-length": "11"}))


async def test_what_came_counts_and_not_what_was_announced() -> None:
    all_bodies = bodies(MEBIBYTE, MEBIBYTE)
    with all_bodies.holding() as announced:
        waiting = asyncio.create_task(
            announced.read(cast(Any, Arriving([], {"content-length": str(MEBIBYTE)})))
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

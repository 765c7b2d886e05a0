from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from epd_portable.errors import RequestError
from epd_portable.router import client_exchange
from epd_portable.router.client_exchange import read_body
from epd_portable.router.contents.body import SMALL_BYTES, Body, HeldBytes

MEBIBYTE = 1 << 20
CHUNKED = {"transfer-encoding": "chunked"}


class Arriving:
    """A request whose body arrives in pieces, and does not end if there are none."""

    def __init__(self, sizes: Iterable[int], headers: dict[str, str]) -> None:
        self.headers = headers
        self.dropped = False
        self._sizes = list(sizes)

    async def body(self, count: Callable[[int], None]) -> bytearray:
        data = bytearray()
        for size in self._sizes:
            data += b"x" * size
            count(len(data))
        if not self._sizes:
            await asyncio.wait_for(asyncio.Event().wait(), 10)
        return data

    async def drop_body(self) -> None:
        if not self._sizes:
            await asyncio.Event().wait()
        self.dropped = True


async def read(held: HeldBytes, sizes: Iterable[int]) -> int:
    with Body(held, MEBIBYTE) as body:
        return len(await read_body(cast(Any, Arriving(sizes, CHUNKED)), body))


async def test_a_client_that_sends_for_too_long_is_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_exchange, "DRAIN_TIMEOUT_S", 0.0)
    with Body(HeldBytes(MEBIBYTE), 10) as body, pytest.raises(RequestError, match="11 bytes"):
        await read_body(cast(Any, Arriving([], {"content-length": "11"})), body)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_client_is_refused_when_it_has_sent_all_unless_it_waits_to_be_asked(
    waits: bool,
) -> None:
    headers = {"content-length": "11"} | ({"expect": "100-Continue"} if waits else {})
    request = Arriving([11], headers)
    with Body(HeldBytes(MEBIBYTE), 10) as body, pytest.raises(RequestError, match="11 bytes"):
        await read_body(cast(Any, request), body)
    # Else it would find its connection broken, and not the answer.
    assert request.dropped is not waits


async def test_the_sum_is_bounded_and_falls_when_bodies_are_done_with() -> None:
    held = HeldBytes(2 * MEBIBYTE)
    with Body(held, MEBIBYTE) as first, Body(held, MEBIBYTE) as second:
        await read_body(cast(Any, Arriving([MEBIBYTE], CHUNKED)), first)
        await read_body(cast(Any, Arriving([MEBIBYTE - 1], CHUNKED)), second)
        with pytest.raises(RequestError, match="max_bodies_bytes of 2097152") as caught:
            await read(held, [SMALL_BYTES + 1, 1])
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2)
        # Small ones are no danger.
        assert await read(held, [SMALL_BYTES])
    assert held.count == 0

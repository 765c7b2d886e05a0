from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from epd_portable.errors import RequestError
from epd_portable.router import bodies
from epd_portable.router.bodies import read_body

MEBIBYTE = 1 << 20


class Arriving:
    """A body that arrives in pieces; counts those that were taken."""

    def __init__(self, sizes: Iterable[int], **headers: str) -> None:
        self._sizes = list(sizes)
        self.taken = 0
        names = [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()]
        self.request = Request({"type": "http", "method": "POST", "headers": names}, self.receive)

    async def receive(self) -> Message:
        if self.taken == len(self._sizes):
            return {"type": "http.disconnect"}
        size = self._sizes[self.taken]
        self.taken += 1
        more = self.taken < len(self._sizes)
        return {"type": "http.request", "body": b"x" * size, "more_body": more}


async def test_a_body_within_the_limit_is_read_whole() -> None:
    arriving = Arriving([3, 4, 3])
    assert await read_body(arriving.request, max_bytes=10) == b"x" * 10


@pytest.mark.parametrize("headers", [{}, {"content_length": str(100 * MEBIBYTE)}])
async def test_a_body_of_100_mb_is_dropped_while_it_arrives(headers: dict[str, str]) -> None:
    arriving = Arriving([MEBIBYTE] * 100, **headers)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"at most 2097152 bytes.*max_body_bytes") as caught:
            await read_body(arriving.request, max_bytes=2 * MEBIBYTE)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert caught.value.status == 413
    assert arriving.taken == 100
    assert peak_bytes < 8 * MEBIBYTE


async def test_a_client_that_waits_for_permission_is_refused_unread() -> None:
    arriving = Arriving([MEBIBYTE], content_length=str(MEBIBYTE), expect="100-Continue")
    with pytest.raises(RequestError, match="1048576 bytes"):
        await read_body(arriving.request, max_bytes=10)
    assert arriving.taken == 0


async def test_a_client_that_sends_for_too_long_is_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stalls() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bodies, "DRAIN_TIMEOUT_S", 0.0)
    headers = [(b"content-length", b"11")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, stalls)
    with pytest.raises(RequestError, match="11 bytes"):
        await read_body(request, max_bytes=10)


@pytest.mark.parametrize("headers", [{}, {"content_length": "100"}])
async def test_a_client_that_goes_away_is_no_error_of_the_request(headers: dict[str, str]) -> None:
    arriving = Arriving([], **headers)
    with pytest.raises(ClientDisconnect):
        await read_body(arriving.request, max_bytes=10)

"""Request bodies from the socket, with a limit that holds while reading."""

from __future__ import annotations

import anyio
from starlette.requests import ClientDisconnect, Request

from epd_portable.errors import RequestError

DRAIN_TIMEOUT_S = 10.0
"""How long the rest of a too large body is read and dropped.

Most clients read no answer before they have sent everything: one that came earlier would reach
them as a broken connection without a reason.
"""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the whole body.

    Raises:
        RequestError: 413; it is larger than ``max_bytes``. No more than that was held in memory.
        ClientDisconnect: The client is gone.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        if request.headers.get("expect", "").lower() != "100-continue":
            await drain(request)
        raise _too_large(f"{announced} bytes", max_bytes)
    pieces: list[bytes] = []
    size = 0
    stream = request.stream()
    async for piece in stream:
        size += len(piece)
        if size > max_bytes:
            pieces.clear()
            await drain(request)
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


async def drain(request: Request) -> None:
    """Read and drop the rest of a body, for a limited time.

    Raises:
        ClientDisconnect: The client is gone.
    """
    with anyio.move_on_after(DRAIN_TIMEOUT_S):
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if not message.get("more_body", False):
                return


def _too_large(size: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"request body of {size}: at most {max_bytes} bytes are accepted; send smaller images, or "
        "raise max_body_bytes of the router",
        status=413,
        code="body_too_large",
    )

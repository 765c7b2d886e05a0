"""Answers to clients, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from epd_portable.errors import RequestError
from epd_portable.wire.messages import Nack, NackCode

RETRY_AFTER_S = 2
"""What clients are told to wait when no instance can serve them at the moment."""

_ERROR_TYPES = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer whose beginning is there.

    Attributes:
        status: HTTP status.
        headers: To be sent; names in lower case.
        body: First piece, or the whole.
        rest: Further pieces, if it is streamed.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    rest: AsyncIterator[bytes] | None = None


def error_body(message: str, *, status: int, code: str) -> bytes:
    """Return an error as OpenAI clients expect it."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}
    )


def error_reply(error: RequestError) -> Reply:
    """Return a refused request's answer."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return Reply(
        status=error.status,
        headers=headers,
        body=error_body(str(error), status=error.status, code=error.code),
    )


def error_event(message: str, *, status: int, code: str) -> bytes:
    """Return an error as the last server-sent event of a broken stream."""
    return b"data: " + error_body(message, status=status, code=code) + b"\n\n"


def unavailable(message: str) -> RequestError:
    """Return the error for a request that may succeed later."""
    return RequestError(
        message, status=503, code="service_unavailable", retry_after_s=RETRY_AFTER_S
    )


def refusal(nacks: list[Nack]) -> RequestError | None:
    """Return what the client is told of a PD instance's decisive refusals."""
    too_large = next((nack for nack in nacks if nack.code is NackCode.TOO_LARGE), None)
    if too_large is not None:
        return RequestError(too_large.detail, status=413, code="item_too_large")
    return unavailable(nacks[0].detail) if nacks else None

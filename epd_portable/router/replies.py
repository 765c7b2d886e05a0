"""Answers of the router's own, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.errors import RequestError

RETRY_AFTER_S = 2
"""What clients are told to wait when no instance can serve them at the moment."""
JSON = {"content-type": "application/json"}

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Reply(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        status: HTTP status.
        headers: To be sent; names in lower case.
        body: As it is sent.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def error_body(message: str, *, status: int, code: str) -> bytes:
    """Return an error as OpenAI clients expect it."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}
    )


def error_reply(error: RequestError) -> Reply:
    """Return a refused request's answer."""
    headers = dict(JSON)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Reply(
        error.status, headers, error_body(str(error), status=error.status, code=error.code)
    )


def error_event(message: str, *, status: int, code: str) -> bytes:
    """Return an error as the last server-sent event of a broken stream."""
    return b"data: " + error_body(message, status=status, code=code) + b"\n\n"


def json_reply(value: object, status: int = 200) -> Reply:
    """Return a value as JSON."""
    return Reply(status, JSON, msgspec.json.encode(value))


def unavailable(message: str) -> RequestError:
    """Return the error for a request that may succeed later."""
    return RequestError(
        message, status=503, code="service_unavailable", retry_after_s=RETRY_AFTER_S
    )

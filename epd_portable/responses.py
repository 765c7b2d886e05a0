"""HTTP responses of fronts and gateway, and errors in the form of each interface."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.errors import RequestError

RETRY_AFTER_S = 2
"""Seconds in ``Retry-After`` of a 503."""
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a request besides its body: its head, and what frames a body in chunks. A read of
the socket may go beyond."""
BODY_TIMEOUT_S = 60.0
"""Longest time for a request's body: a part of it takes memory."""

_INVALID = "invalid_request_error"
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

_ANTHROPICS = "/v1/messages"
_ANTHROPIC_TYPES = {**_ERROR_TYPES, 403: "permission_error", 503: "overloaded_error"}


def body_timeout(within_s: float) -> RequestError:
    """Return the error for a body that did not come in time."""
    return RequestError(
        f"the request body did not end within {within_s:g} s: send it faster",
        status=408,
        code="body_timeout",
    )


class Reply(msgspec.Struct, frozen=True):
    """A whole response; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def error_reply(error: RequestError, path: str = "") -> Reply:
    """Return the response for a refused request.

    Args:
        path: Requested path. Below ``/v1/messages`` the body has Anthropic's form, which has no
            code for programs, otherwise OpenAI's.
    """
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    message, status = str(error), error.status
    if path.startswith(_ANTHROPICS):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else _INVALID)
        body: object = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else _INVALID)
        body = {"error": {"message": message, "type": kind, "param": None, "code": error.code}}
    return Reply(status, headers, msgspec.json.encode(body))


def unavailable(message: str) -> RequestError:
    """Return the error for a request that may succeed later."""
    return RequestError(
        message, status=503, code="service_unavailable", retry_after_s=RETRY_AFTER_S
    )

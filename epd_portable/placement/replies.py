"""Answers of our own, and errors in the form of the interface that was asked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd_portable.errors import RequestError

RETRY_AFTER_S = 2
"""What clients are told to wait when no instance can serve them at the moment."""
BODY_TIMEOUT_S = 60.0
"""Longest time in which a request's body must have come: what has come of it takes memory."""
NAMES_MEDIA = "/inference/v1/"
"""Below it are vLLM's endpoints at which who asks names the media."""
WHY_NO_NAMES = (
    "it takes names of media from whoever asks, under which others would find them: send a prompt "
    "or messages"
)
JSON = {"content-type": "application/json"}

_INVALID = "invalid_request_error"
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

_ANTHROPICS = "/v1/messages"
_ANTHROPIC_TYPES = {**_ERROR_TYPES, 403: "permission_error", 503: "overloaded_error"}


def not_served(method: str, path: str, why: str) -> RequestError:
    """Return the error for an address that is vLLM's and not served on purpose."""
    problem = f"{method} {path[:256]} is not served here: {why}"
    return RequestError(problem, status=404, code="not_served")


def body_timeout(within_s: float) -> RequestError:
    """Return the error for a body that did not come in time."""
    return RequestError(
        f"the request body did not end within {within_s:g} s: send it faster",
        status=408,
        code="body_timeout",
    )


class Reply(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        headers: To be sent; names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def error_body(message: str, *, status: int, code: str, path: str = "") -> bytes:
    """Return an error as clients of an interface expect it.

    Args:
        code: For programs; Anthropic's form has no place for it.
        path: That was asked: below ``/v1/messages`` it is Anthropic's form, else OpenAI's.
    """
    if path.startswith(_ANTHROPICS):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else _INVALID)
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else _INVALID)
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}
    )


def error_reply(error: RequestError, path: str = "") -> Reply:
    """Return a refused request's answer, see `error_body`."""
    headers = dict(JSON)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Reply(
        error.status,
        headers,
        error_body(str(error), status=error.status, code=error.code, path=path),
    )


def json_reply(value: object, status: int = 200) -> Reply:
    """Return a value as JSON."""
    return Reply(status, JSON, msgspec.json.encode(value))


def unavailable(message: str) -> RequestError:
    """Return the error for a request that may succeed later."""
    return RequestError(
        message, status=503, code="service_unavailable", retry_after_s=RETRY_AFTER_S
    )

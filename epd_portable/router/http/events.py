"""Answers that come event by event."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from epd_portable.delivery.replies import JSON, Reply
from epd_portable.router.http.upstream_connection import InstanceAnswer

EVENTS = "text/event-stream"
"""Content type of such answers."""
_ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
"""How streams begin that failed before their first token; Anthropic's interface names events."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LAST_EVENTS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
"""How the last event of a stream begins, in either interface."""
_MAX_HELD_BYTES = 1 << 20
"""The longest part of an event that is buffered until the rest of it is there."""
_TOKENS = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
USAGE_BYTES = 4096
"""At the end of an answer, in which its ``usage`` is looked for."""


class ResponseWriter(Protocol):
    """Takes the body of an answer in pieces."""

    def write(self, data: bytes) -> bool:
        """Send a piece; return whether more is taken at once."""

    def end_answer(self) -> None:
        """Send the end."""


async def first_event(answer: InstanceAnswer) -> bytes:
    """Return the beginning of a stream, with a whole event: a client gets nothing before that."""
    first = await answer.piece()
    while first and not _whole_events(first) and len(first) < _MAX_HELD_BYTES:
        more = await answer.piece()
        if not more:
            break
        first += more
    return first


class WholeEvents:
    """Passes whole events on as they come: what ends within one is none to the client."""

    def __init__(self, out: ResponseWriter) -> None:
        self._out = out
        self._held = b""
        self._passed = b""

    @property
    def is_complete(self) -> bool:
        """Whether the last event that passed says that none comes after it."""
        passed = self._passed.rstrip()
        begin = max(passed.rfind(b"\n\n"), passed.rfind(b"\r\n\r\n"))
        return passed[begin + 1 :].lstrip().startswith(_LAST_EVENTS)

    def take(self, data: bytes) -> bool:
        """Take a piece of the stream; return whether the client takes more at once."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_EVENT_ENDS) and len(data) < _MAX_HELD_BYTES:
            end = _whole_events(data)
            data, self._held = data[:end], data[end:]
        if not data:
            return True
        self._passed = data
        return self._out.write(data)

    def end_answer(self) -> None:
        """Send what is left, and the end."""
        if self._held:
            self._out.write(self._held)
        self._out.end_answer()


def tokens_told(end: bytes) -> int | None:
    """Return how many tokens were generated, as ``usage`` in the end of an answer has it.

    Within a generated text such words have escapes, and are not found.
    """
    found = _TOKENS.findall(end)
    return int(found[-1]) if found else None


def _whole_events(data: bytes) -> int:
    """Return how many of these bytes are whole events."""
    return max(place + len(end) if (place := data.rfind(end)) >= 0 else 0 for end in _EVENT_ENDS)


class _EngineError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EngineError


def failed_stream(first: bytes) -> Reply | None:
    """Return the answer to a streamed request that failed before its first token."""
    if not first.startswith(_ERROR_EVENTS):
        return None
    lines = first.removeprefix(b"event: error\n")
    event = lines.partition(b"\n")[0].rstrip().removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = 500
    return Reply(status if 400 <= status <= 599 else 500, JSON, event)

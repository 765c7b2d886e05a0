"""Takes streamed answers apart, after they have come. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a streamed answer said, and when.

    Attributes:
        times_s: Of the pieces of text, on the clock of what was read.
        tokens: As the server counts them.
        prompt_tokens: The same of the request.
        problem: What is wrong with it, or empty.
    """

    times_s: tuple[float, ...]
    tokens: int
    prompt_tokens: int
    problem: str


def read(pieces: Sequence[tuple[float, bytes]], *, output_tokens: int) -> Reading:
    """Read an answer.

    Args:
        pieces: When something came, and what; as the socket had it.
        output_tokens: Length that was asked for: answers of other lengths are other work.
    """
    times: list[float] = []
    usage = _Usage()
    problem = "the answer ended without [DONE]"
    for now_s, data in _events(pieces):
        if data == _DONE:
            problem = ""
            break
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            problem = f"an event is not what it should be ({error}): {data[:200]!r}"
            break
        if event.error is not None:
            problem = f"the answer broke off: {event.error}"
            break
        if any(choice.delta.content for choice in event.choices):
            times.append(now_s)
        usage = event.usage or usage
    if not problem and usage.completion_tokens != output_tokens:
        problem = f"{usage.completion_tokens} tokens in place of {output_tokens}"
    if not problem and not times:
        problem = "the answer has no text"
    return Reading(
        times_s=tuple(times),
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        problem=problem,
    )


def gaps(times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the time between each piece and the one before."""
    return tuple(after - before for before, after in itertools.pairwise(times_s))


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each whole event, and when its last byte came."""
    rest = b""
    for now_s, piece in pieces:
        *whole, rest = (rest + piece.replace(b"\r\n", b"\n")).split(EVENT_END)
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(_DATA):
                    yield now_s, line[len(_DATA) :]

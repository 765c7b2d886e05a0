"""Where the time of requests went, by the event traces that a topology's processes write. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from epd_portable.bench.load.commands import Ask, TimedAnswer
from epd_portable.bench.traces import Event, named, time_of

STAGES = ("reach", "encode", "transfer", "prefill", "decode")
"""``reach``: from the sending until the encoder begins; of a text, and of pictures that the
prefill+decode instance encodes itself, until that begins to compute. ``encode``: until the last of
its pictures is encoded. ``transfer``: until the last is in the encoder cache of the prefill+decode
instance. ``prefill``: until the first token is at the client. ``decode``: until the end."""


class RequestStages(msgspec.Struct, frozen=True, kw_only=True):
    """One request's way through the instances.

    Attributes:
        index: Of the request in its turn.
        kind: ``text`` or ``pictures``.
        sent_s: From the beginning of the turn.
        ends_s: When each stage ended, from the sending, by its name; in the order of `STAGES`.
    """

    index: int
    kind: str
    sent_s: float
    ends_s: dict[str, float]

    @property
    def lengths_s(self) -> dict[str, float]:
        """How long each stage took."""
        ends = list(self.ends_s.values())
        return {
            name: end_s - before_s
            for name, end_s, before_s in zip(self.ends_s, ends, [0.0, *ends[:-1]], strict=True)
        }


def request_stages(
    events: Sequence[Event],
    asks: Sequence[Ask],
    answers: Sequence[TimedAnswer],
    *,
    turn_name: str,
    begin_s: float,
) -> tuple[RequestStages, ...]:
    """Return the stages of every request whose way can be told from end to end.

    Args:
        events: Of the turn, in the order of time.
        asks: Of the turn.
        answers: To them.
        turn_name: With which the ids of its requests begin, see `request_id`.
        begin_s: When the clients began, on the clock of the events.
    """
    arrived = {
        _index(str(event["request"]), turn_name): event
        for event in named(events, "request.arrived")
    }
    computed = _first_steps(events, turn_name)
    begun, ended, placed = (_by_item(events, name) for name in _ITEM_EVENTS)
    found = []
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        if index not in computed or answer.problem:
            continue
        sent_s = begin_s + answer.sent_s
        first_s = sent_s + answer.ttft_s
        # What has no media, or is encoded by the prefill+decode instance, awaits nothing.
        items = arrived[index]["awaited"] if index in arrived else []
        assert isinstance(items, list)
        ends = {"reach": computed[index]}
        if items:
            times = [
                [_within(of[str(item)], sent_s, first_s) for item in items]
                for of in (begun, ended, placed)
            ]
            if any(None in each for each in times):
                continue
            begins_s, ends_s, places_s = ([s for s in each if s is not None] for each in times)
            ends = {"reach": min(begins_s), "encode": max(ends_s), "transfer": max(places_s)}
        ends |= {"prefill": first_s, "decode": sent_s + answer.e2e_s}
        found.append(
            RequestStages(
                index=index,
                kind=ask.kind,
                sent_s=answer.sent_s,
                ends_s={name: end_s - sent_s for name, end_s in ends.items()},
            )
        )
    return tuple(found)


def request_id(turn_name: str, index: int) -> str:
    """Return the id with which a request is sent, and which the events name it by."""
    return f"{turn_name}-{index}"


_ITEM_EVENTS = ("encode.begin", "encode.end", "item.placed")


def _first_steps(events: Sequence[Event], turn_name: str) -> dict[int, float]:
    """Return when the prefill+decode instances first computed something of each request."""
    seen: set[str] = set()
    found: dict[int, float] = {}
    for event in named(events, "step"):
        tokens = event["tokens"]
        assert isinstance(tokens, dict)
        for name in tokens.keys() - seen:
            seen.add(name)
            index = _index(name, turn_name)
            if index is not None:
                found.setdefault(index, time_of(event))
    return found


def _by_item(events: Sequence[Event], name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in named(events, name):
        items = event.get("items", [event.get("mm_hash")])
        assert isinstance(items, list)
        for item in items:
            found[str(item)].append(time_of(event))
    return found


def _within(times_s: Sequence[float], after_s: float, before_s: float) -> float | None:
    """Return the first time between two others."""
    return next((time_s for time_s in times_s if after_s <= time_s <= before_s), None)


def _index(name: str, turn_name: str) -> int | None:
    """Return which request of a turn an engine's name of it means; engines add to it."""
    _, found, rest = name.partition(f"{turn_name}-")
    number = rest.partition("-")[0]
    return int(number) if found and number.isdigit() else None

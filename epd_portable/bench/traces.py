"""Arithmetic on the event traces that instances write into ``EPD_TRACE_DIR``.

All times are of one monotonic clock per host, so events of different processes compare.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

Event = dict[str, JsonValue]
"""One line of a trace; see `epd_portable.log.EventTrace`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One item's way from the encoder's output to the consumer's encoder cache.

    Attributes:
        transfer: Transfer id.
        mm_hash: The item.
        path: Transfer path.
        nbytes: Size of the item.
        granted_s: The producer knew its slot.
        ready_s: The encoder had put the item out.
        write_begin_s: The producer had a grant and a free writer.
        written_s: All bytes were in the slot.
        landed_s: The consumer's scheduler knew that.
        placed_s: The tensor was in the encoder cache of the consumer's worker.
        turns: Turns of the consumer's engine that began after the item was put out, up to and with
            the one that placed it.
    """

    transfer: str
    mm_hash: str
    path: str
    nbytes: int
    granted_s: float
    ready_s: float
    write_begin_s: float
    written_s: float
    landed_s: float
    placed_s: float
    turns: int

    @property
    def granted_before(self) -> bool:
        """Whether the grant was there before the output, so that nothing was waited for."""
        return self.granted_s <= self.ready_s

    @property
    def control_s(self) -> float:
        """From the output to the scheduler's knowledge, without the write."""
        return self.grant_wait_s + self.notice_s

    @property
    def grant_wait_s(self) -> float:
        """From the output until the write began: waiting for a grant and for a writer."""
        return self.write_begin_s - self.ready_s

    @property
    def write_s(self) -> float:
        """The write itself."""
        return self.written_s - self.write_begin_s

    @property
    def notice_s(self) -> float:
        """From the end of the write until the consumer's scheduler knew of it."""
        return self.landed_s - self.written_s

    @property
    def place_s(self) -> float:
        """From the scheduler's knowledge to the tensor in the worker."""
        return self.placed_s - self.landed_s

    @property
    def total_s(self) -> float:
        """From the output to the placed tensor."""
        return self.placed_s - self.ready_s


def read_events(folder: Path) -> list[Event]:
    """Return the events of all processes that wrote into a folder, in the order of time.

    A last line that its process did not finish is left out.
    """
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                events.append(json.loads(line))
    events.sort(key=time_of)
    return events


def time_of(event: Event) -> float:
    """Return when an event was recorded, in seconds."""
    return _number(event, "t_s")


def since(events: Iterable[Event], begin_s: float) -> list[Event]:
    """Return the events from a moment on."""
    return [event for event in events if time_of(event) >= begin_s]


def named(events: Iterable[Event], name: str) -> list[Event]:
    """Return the events of one name."""
    return [event for event in events if event["event"] == name]


def handovers(events: Sequence[Event], *, end: str = "item.placed") -> list[Handover]:
    """Return every complete way of an item, in the order of the writes.

    An item that was encoded or placed several times is matched by time: the last output before
    the write, the first placement after the landing. Ways that lack an event (aborted, or not
    ended when the trace was read) are left out.

    Args:
        events: In the order of time, see `read_events`.
        end: Event with which the way of an item ends.
    """
    ready: dict[str, list[float]] = defaultdict(list)
    placed: dict[str, list[float]] = defaultdict(list)
    for event in named(events, "output.ready"):
        ready[str(event["mm_hash"])].append(time_of(event))
    for event in named(events, end):
        placed[str(event["mm_hash"])].append(time_of(event))
    granted: dict[str, list[float]] = defaultdict(list)
    for event in named(events, "transfer.granted"):
        granted[str(event["transfer"])].append(time_of(event))
    turns: dict[str, list[float]] = defaultdict(list)
    for event in named(events, "turn"):
        turns[str(event["instance"])].append(time_of(event))
    landed = {str(event["transfer"]): event for event in named(events, "item.landed")}
    found = []
    for written in named(events, "transfer.written"):
        transfer, mm_hash = str(written["transfer"]), str(written["mm_hash"])
        arrival = landed.get(transfer)
        written_s = time_of(written)
        write_begin_s = written_s - _number(written, "write_s")
        before = bisect_right(ready[mm_hash], write_begin_s)
        grants = bisect_right(granted[transfer], write_begin_s)
        if arrival is None or not before or not grants:
            continue
        landed_s = time_of(arrival)
        after = bisect_left(placed[mm_hash], landed_s)
        if after == len(placed[mm_hash]):
            continue
        begun = turns[str(arrival["instance"])]
        ready_s, placed_s = ready[mm_hash][before - 1], placed[mm_hash][after]
        found.append(
            Handover(
                transfer=transfer,
                mm_hash=mm_hash,
                path=str(written["path"]),
                nbytes=int(_number(written, "nbytes")),
                granted_s=granted[transfer][grants - 1],
                ready_s=ready_s,
                write_begin_s=write_begin_s,
                written_s=written_s,
                landed_s=landed_s,
                placed_s=placed_s,
                turns=bisect_right(begun, placed_s) - bisect_right(begun, ready_s),
            )
        )
    return found


def _number(event: Event, name: str) -> float:
    value = event[name]
    assert isinstance(value, int | float), f"{name} of {event} is no number"
    return float(value)

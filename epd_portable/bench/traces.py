"""Event traces that instances write into ``EPD_TRACE_DIR``, and an item's way through them.

All times are of one monotonic clock per host, so events of different processes compare.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

Event = dict[str, JsonValue]
"""One line of a trace; see `epd_portable.log.EventTrace`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One item's way from the encoder's output to the consumer's encoder cache; times in seconds.

    Attributes:
        transfer: Transfer id.
        path: Transfer path.
        nbytes: Size of the item.
        granted_before: The grant was there before the output, so that it was not waited for.
        grant_wait_s: From the output until the write begins: waiting for a grant and a writer.
        write_s: The write itself.
        notice_s: From the end of the write until the consumer's scheduler knows of it.
        place_s: From there to the tensor in the worker's encoder cache.
    """

    transfer: str
    path: str
    nbytes: int
    granted_before: bool
    grant_wait_s: float
    write_s: float
    notice_s: float
    place_s: float

    @property
    def control_s(self) -> float:
        """From the output to the scheduler's knowledge, without the write."""
        return self.grant_wait_s + self.notice_s

    @property
    def total_s(self) -> float:
        """From the output to the placed tensor."""
        return self.grant_wait_s + self.write_s + self.notice_s + self.place_s


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
    ready, placed = (_times(events, name, "mm_hash") for name in ("output.ready", end))
    granted, landed = (
        _times(events, name, "transfer") for name in ("transfer.granted", "item.landed")
    )
    found = []
    for written in named(events, "transfer.written"):
        transfer, mm_hash = str(written["transfer"]), str(written["mm_hash"])
        write_s = _number(written, "write_s")
        begin_s = time_of(written) - write_s
        outputs = ready[mm_hash][: bisect_right(ready[mm_hash], begin_s)]
        grants = granted[transfer][: bisect_right(granted[transfer], begin_s)]
        arrivals = landed[transfer][:1]
        placements = [each for each in placed[mm_hash] if arrivals and each >= arrivals[0]]
        if outputs and grants and placements:
            found.append(
                Handover(
                    transfer=transfer,
                    path=str(written["path"]),
                    nbytes=int(_number(written, "nbytes")),
                    granted_before=grants[-1] <= outputs[-1],
                    grant_wait_s=begin_s - outputs[-1],
                    write_s=write_s,
                    notice_s=arrivals[0] - time_of(written),
                    place_s=placements[0] - arrivals[0],
                )
            )
    return found


def _times(events: Iterable[Event], name: str, key: str) -> dict[str, list[float]]:
    """Return when events of a name were recorded, by the value of one of their fields."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in named(events, name):
        times[str(event[key])].append(time_of(event))
    return times


def _number(event: Event, name: str) -> float:
    value = event[name]
    assert isinstance(value, int | float), f"{name} of {event} is no number"
    return float(value)

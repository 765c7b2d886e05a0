"""Event traces that instances write into ``EPD_TRACE_DIR``, and an item's way through them.

All times are of one monotonic clock per host, so events of different processes compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""One line of a trace; see `epd_portable.log.EventTrace`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One item's way from the encoder's output to the consumer's encoder cache; times in seconds.

    Attributes:
        granted_before: The grant was there before the output, so that it was not waited for.
        grant_wait_s: From the output until the write begins: waiting for a grant and a writer.
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
    events.sort(key=lambda event: event["t_s"])
    return events


def handovers(events: Iterable[Event], *, end: str = "item.placed") -> list[Handover]:
    """Return every complete way of an item that is encoded and transferred once.

    Ways that lack an event (aborted, or not ended when the trace was read) are left out.

    Args:
        events: In the order of time, see `read_events`.
        end: Event with which the way of an item ends.
    """
    first: dict[tuple[Any, Any], Event] = {}
    for event in events:
        for key in (event.get("transfer"), event.get("mm_hash")):
            first.setdefault((event["event"], key), event)
    found = []
    for (name, transfer), written in first.items():
        if name != "transfer.written" or transfer != written["transfer"]:
            continue
        mm_hash = written["mm_hash"]
        needed = [
            first.get(each)
            for each in (
                ("transfer.granted", transfer),
                ("output.ready", mm_hash),
                ("item.landed", transfer),
                (end, mm_hash),
            )
        ]
        times_s = [event["t_s"] for event in needed if event is not None]
        if len(times_s) < len(needed):
            continue
        granted_s, ready_s, landed_s, end_s = times_s
        written_s, write_s = written["t_s"], written["write_s"]
        found.append(
            Handover(
                transfer=transfer,
                path=written["path"],
                nbytes=written["nbytes"],
                granted_before=granted_s <= ready_s,
                grant_wait_s=written_s - write_s - ready_s,
                write_s=write_s,
                notice_s=landed_s - written_s,
                place_s=end_s - landed_s,
            )
        )
    return found

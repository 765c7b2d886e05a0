from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_portable.bench.traces import Event, handovers, read_events

RECORDED = Path(__file__).parent / "recorded"
"""Traces of two transfers of 4 KiB and 1 MiB by ``shm``, written by `epd_portable.bench.ends`."""


def event(name: str, t_s: float, **fields: str | int | float | list[str]) -> Event:
    return {"event": name, "t_s": t_s, "instance": "x", **fields}


def way(transfer: str, begin_s: float) -> list[Event]:
    """Return the events of one transfer of item ``a``: 1, 2, 3 and 4 seconds long in its parts."""
    return [
        event("transfer.granted", begin_s - 1, transfer=transfer),
        event("output.ready", begin_s, mm_hash="a"),
        event(
            "transfer.written",
            begin_s + 3,
            mm_hash="a",
            transfer=transfer,
            path="tcp",
            nbytes=8,
            write_s=2.0,
        ),
        event("item.landed", begin_s + 6, mm_hash="a", transfer=transfer, path="tcp"),
        event("item.placed", begin_s + 10, mm_hash="a"),
    ]


def test_the_parts_of_a_recorded_handover_add_up_to_its_total() -> None:
    found = handovers(read_events(RECORDED))
    assert [(item.path, item.nbytes) for item in found] == [("shm", 4096), ("shm", 1 << 20)]
    for item in found:
        parts = item.grant_wait_s + item.write_s + item.notice_s + item.place_s
        assert item.total_s == pytest.approx(parts)
        assert min(item.grant_wait_s, item.write_s, item.notice_s, item.place_s) > 0
        assert 0 < item.total_s < 0.1
        assert item.granted_before


def test_each_part_is_between_its_two_events() -> None:
    (found,) = handovers(way("t", 100.0))
    assert (found.grant_wait_s, found.write_s, found.notice_s, found.place_s) == (1, 2, 3, 4)
    assert found.total_s == 10


@pytest.mark.parametrize(("granted_s", "before"), [(99.0, True), (100.5, False)])
def test_a_grant_is_there_before_the_output_or_comes_after_it(
    granted_s: float, before: bool
) -> None:
    events = [item for item in way("t", 100.0) if item["event"] != "transfer.granted"]
    (found,) = handovers([*events, event("transfer.granted", granted_s, transfer="t")])
    assert found.granted_before is before


def test_a_way_ends_with_the_event_that_was_asked_for() -> None:
    events = [*way("t", 100.0), event("item.complete", 112.0, mm_hash="a")]
    (queued,), (complete,) = handovers(events), handovers(events, end="item.complete")
    assert (queued.place_s, complete.place_s) == (4, 6)
    assert handovers(way("t", 100.0), end="item.complete") == []


@pytest.mark.parametrize(
    "missing", ["transfer.granted", "output.ready", "item.landed", "item.placed"]
)
def test_a_way_that_lacks_an_event_is_left_out(missing: str) -> None:
    assert handovers([item for item in way("t", 100.0) if item["event"] != missing]) == []


def test_events_of_several_files_are_in_the_order_of_time_and_a_cut_line_is_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(event("late", 2.0)) + '\n{"event": "cut')
    (tmp_path / "b.jsonl").write_text(json.dumps(event("early", 1.0)) + "\n")
    events = read_events(tmp_path)
    assert [item["event"] for item in events] == ["early", "late"]

from __future__ import annotations

from epd_portable.runners.load_reports import MAX_ROUTERS, LoadReports
from epd_portable.wire.messages import LOAD_EVERY_S, LOAD_HEARTBEAT_S, LOAD_LEASE_S, LoadReport


class Engine:
    def __init__(self) -> None:
        self.waiting = 0
        self.read = 0
        self.told: list[tuple[bytes, int | None]] = []
        self.reports = LoadReports(
            self._read, lambda to, load: self.told.append((to, load.waiting))
        )

    def _read(self) -> LoadReport:
        self.read += 1
        return LoadReport(waiting=self.waiting)

    def tick(self, now: float) -> list[tuple[bytes, int | None]]:
        self.told = []
        self.reports.tick(now)
        return self.told


def test_a_load_is_read_and_told_when_it_has_changed_not_too_often_and_now_and_then() -> None:
    e = Engine()
    assert e.tick(-1.0) == []
    assert e.read == 0, "no router wants to know"
    e.reports.subscribe(b"r", 0.0)
    assert e.tick(0.0) == [(b"r", 0)]
    e.waiting = 1
    assert e.tick(LOAD_EVERY_S / 2) == []
    assert e.tick(LOAD_EVERY_S) == [(b"r", 1)]
    assert e.tick(3 * LOAD_EVERY_S) == []
    assert e.tick(LOAD_EVERY_S + LOAD_HEARTBEAT_S) == [(b"r", 1)]


def test_who_comes_later_is_told_at_once_and_who_stays_away_no_more() -> None:
    e = Engine()
    e.reports.subscribe(b"old", 0.0)
    e.tick(0.0)
    later = LOAD_LEASE_S - 1
    e.tick(later)
    e.reports.subscribe(b"new", later + 0.1)
    assert e.tick(later + 0.1) == [(b"old", 0), (b"new", 0)]
    assert e.tick(LOAD_LEASE_S + 0.5) == [(b"new", 0)]
    e.reports.subscribe(b"new", LOAD_LEASE_S + 0.6)
    assert e.tick(LOAD_LEASE_S + 0.7) == []


def test_routers_that_come_and_go_are_forgotten() -> None:
    e = Engine()
    for number in range(MAX_ROUTERS + 2):
        e.reports.subscribe(str(number).encode(), 0.0)
    told = e.tick(0.0)
    assert len(told) == MAX_ROUTERS
    assert told[0] == (b"2", 0)

"""Says at the end of every run where its time went: by test, folder, fixture and engine start.

What tests start is known to them alone, so they report it by `note_start`. Workers of pytest-xdist
send their part to the run's own process, which prints the sum; the seconds of two workers add up
to more than the run took.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import pytest

SLOWEST_TESTS = 15
LEAST_FIXTURE_S = 0.5
PHASES = ("setup", "call", "teardown")

Row: TypeAlias = Sequence[str | int | float]
Fixture: TypeAlias = tuple[str, str, str]

# Of this process: note_start is called by code that has no session in its hands.
_starts: list[tuple[str, float]] = []


def note_start(kind: str, seconds: float) -> None:
    """Report that something which takes long to start, as an engine does, has become ready.

    Args:
        kind: What was started; starts of one kind are one row.
        seconds: From its start until it was ready.
    """
    _starts.append((kind, seconds))


def folder_of(nodeid: str) -> str:
    """Return the first two folders of a test's file, "." for a file that lies in none."""
    return "/".join(nodeid.split("::")[0].split("/")[:-1][:2]) or "."


def cpu_s() -> float:
    """Return what this process and its children that have ended computed."""
    return sum(os.times()[:4])


class Timetable:
    """What one process saw, and in the process that prints also what the workers sent."""

    def __init__(self) -> None:
        # Test -> seconds of each phase; here from the reports, which workers send by themselves.
        self.tests: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        # Folder -> seconds of CPU.
        self.cpu_s: dict[str, float] = defaultdict(float)
        # Name, scope and place of a fixture -> how often it was set up, and seconds.
        self.fixtures: dict[Fixture, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self.starts: list[tuple[str, float]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before_s = cpu_s()
        result = yield
        self.cpu_s[folder_of(item.nodeid)] += cpu_s() - before_s
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        # Those that it asks for as arguments are set up before this.
        start_s = perf_counter()
        try:
            return (yield)
        finally:
            key = (fixturedef.argname, fixturedef.scope, fixturedef.baseid)
            times, seconds = self.fixtures[key]
            self.fixtures[key] = (times + 1, seconds + perf_counter() - start_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in PHASES:
            self.tests[report.nodeid][report.when] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.starts += _starts
        _starts.clear()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            # Lists and dictionaries of plain values only: it travels as such.
            output["timetable"] = {
                "cpu_s": dict(self.cpu_s),
                "fixtures": [[*key, *value] for key, value in self.fixtures.items()],
                "starts": [list(start) for start in self.starts],
            }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in what a worker of pytest-xdist sent; nothing came from one that crashed."""
        sent = getattr(node, "workeroutput", {}).get("timetable")
        if sent is None:
            return
        for folder, seconds in sent["cpu_s"].items():
            self.cpu_s[folder] += seconds
        for name, scope, place, times, seconds in sent["fixtures"]:
            known_times, known_s = self.fixtures[name, scope, place]
            self.fixtures[name, scope, place] = (known_times + times, known_s + seconds)
        self.starts += [(kind, seconds) for kind, seconds in sent["starts"]]

    # Reporters close their sections last, and the short summary is to stay at the end.
    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("where the time went")
        for title, heads, rows in (
            ("tests, slowest first", ("seconds", "test"), self.slowest()),
            ("jobs", ("tests", *PHASES, "CPU", "folder"), self.folders()),
            ("fixtures", ("set up", "seconds", "scope", "fixture", "of"), self.slow_fixtures()),
            ("starts", ("starts", "seconds", "slowest", "what"), self.kinds()),
        ):
            if rows:
                terminalreporter.write_line(f"{title}:")
                for line in aligned([heads, *rows]):
                    terminalreporter.write_line(f"  {line}")

    def slowest(self) -> list[Row]:
        totals = [(sum(phases.values()), nodeid) for nodeid, phases in self.tests.items()]
        return sorted(totals, key=lambda row: -row[0])[:SLOWEST_TESTS]

    def folders(self) -> list[Row]:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for nodeid, phases in self.tests.items():
            found[folder_of(nodeid)].append(phases)
        return [
            (
                len(tests),
                *(sum(phases[phase] for phases in tests) for phase in PHASES),
                self.cpu_s[folder],
                folder,
            )
            for folder, tests in sorted(found.items())
        ]

    def slow_fixtures(self) -> list[Row]:
        rows = [
            (times, seconds, scope, name, place)
            for (name, scope, place), (times, seconds) in self.fixtures.items()
            if seconds >= LEAST_FIXTURE_S
        ]
        return sorted(rows, key=lambda row: -row[1])

    def kinds(self) -> list[Row]:
        found: dict[str, list[float]] = defaultdict(list)
        for kind, seconds in self.starts:
            found[kind].append(seconds)
        rows = [(len(each), sum(each), max(each), kind) for kind, each in found.items()]
        return sorted(rows, key=lambda row: -row[1])


def aligned(rows: Iterable[Row]) -> list[str]:
    """Return each row as a line: seconds with one digit, numbers to the right."""
    cells = [
        [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [cell.replace(".", "").isdigit() for cell in cells[-1]]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Timetable(), "timetable of the run")

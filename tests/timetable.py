"""Says at the end of every run what each folder's tests took, in seconds of wall and of CPU.

Workers of pytest-xdist send their part to the run's own process, which prints the sum; the seconds
of two workers add up to more than the run took. Single tests and fixtures: ``--durations``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

PHASES = ("setup", "call", "teardown")


def folder_of(nodeid: str) -> str:
    """Return the first two folders of a test's file, "." for a file that lies in none."""
    return "/".join(nodeid.split("::")[0].split("/")[:-1][:2]) or "."


def cpu_s() -> float:
    """Return what this process and its children that have ended computed."""
    return sum(os.times()[:4])


class Timetable:
    """Events of one process, and in the process that prints also the events of the workers."""

    def __init__(self) -> None:
        # By folder and phase; from the reports, which workers send by themselves.
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.cpu_s: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before_s = cpu_s()
        result = yield
        self.cpu_s[folder_of(item.nodeid)] += cpu_s() - before_s
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in PHASES:
            self.seconds[folder_of(report.nodeid), report.when] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["timetable"] = dict(self.cpu_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in what a worker of pytest-xdist sent; nothing came from one that crashed."""
        self.cpu_s.update(getattr(node, "workeroutput", {}).get("timetable", {}))

    # Reporters close their sections last, and the short summary is to stay at the end.
    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("where the time went, in seconds")
        terminalreporter.write_line(f"{'setup':>9}{'call':>9}{'teardown':>9}{'CPU':>9}  folder")
        for folder in sorted({folder for folder, _ in self.seconds}):
            values = (*(self.seconds[folder, phase] for phase in PHASES), self.cpu_s[folder])
            terminalreporter.write_line(
                "".join(f"{value:9.1f}" for value in values) + f"  {folder}"
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Timetable(), "timetable of the run")

"""Strikes a process at a named point of the protocol; tests put this folder on PYTHONPATH.

Every process of the topology calls `epd_portable.log.trace` at each point. A test that wants a
strike puts tickets for that event into ``EPD_TEST_FAULTS``: ``<event>.3`` … ``<event>.1``. Each
occurrence, in whichever process, takes the highest one; who takes the last sends its signal. So it
happens once, at the n-th occurrence, and not again in the victim's next life.

``EPD_TEST_CLOCK`` lets ``time.time`` jump by up to a day at every call, but for signatures: the
clocks of who signs a request and who lets it in must agree within half a minute.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

MOST_TICKETS = 9
DAY_S = 86400.0
PARTS = {
    "model.loaded": "worker",
    "transfer.ordered": "scheduler",
    "request.arrived": "scheduler",
}
"""Events by which the processes of a real engine show what they are."""


def _strike(ticket: Path, folder: Path) -> None:
    order = json.loads(ticket.read_text())
    instance = os.environ.get("EPD_INSTANCE", "")
    # The instance at whose point it happens, if it has that role; one that was named otherwise.
    name = instance if instance.startswith(order["role"]) else order["instance"]
    victim = f"{name}.{order['part']}" if order["part"] else name
    pid = int((folder / "pids" / victim).read_text())
    fired = {"victim": victim, "pid": pid, "by": instance}
    (folder / "striking").write_text(json.dumps(fired))
    (folder / "striking").rename(folder / "struck")
    os.kill(pid, order["signal"])


def install() -> None:
    """Look at every point from now on; what was forked has imported `epd_portable` anew."""
    from epd_portable import log
    from tests.faults.points import name_process

    folder = Path(os.environ["EPD_TEST_FAULTS"])
    record = log.EventTrace.__call__
    if record.__module__ == __name__:
        return

    def call(self: log.EventTrace, event: str, **fields: object) -> None:
        record(self, event, **fields)
        if event in PARTS:
            name_process(folder, f"{os.environ.get('EPD_INSTANCE')}.{PARTS[event]}", os.getpid())
        for number in range(MOST_TICKETS, 0, -1):
            taken = folder / f"taken-{os.getpid()}"
            try:
                (folder / f"{event}.{number}").rename(taken)
            except FileNotFoundError:
                continue
            if number == 1:
                _strike(taken, folder)
            taken.unlink()
            return

    log.EventTrace.__call__ = call  # type: ignore[method-assign]
    if os.environ.get("EPD_INSTANCE") == "router":
        name_process(folder, "router", os.getpid())


def _let_the_wall_clock_jump() -> None:
    right, right_ns = time.time, time.time_ns
    chance = random.Random(os.getpid())

    def jumping() -> float:
        signs = sys._getframe(1).f_globals["__name__"] == "epd_portable.config.secret"
        return right() + (0.0 if signs else chance.uniform(-DAY_S, DAY_S))

    time.time = jumping
    time.time_ns = lambda: right_ns() + int(chance.uniform(-DAY_S, DAY_S) * 1e9)


if os.environ.get("EPD_TEST_CLOCK"):
    _let_the_wall_clock_jump()
if os.environ.get("EPD_TEST_FAULTS"):
    install()

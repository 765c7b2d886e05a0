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
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

MOST_TICKETS = 9
DAY_S = 86400.0
PARTS = {"model.loaded": "worker", "transfer.ordered": "scheduler", "request.arrived": "scheduler"}
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


class _Hook(MetaPathFinder):
    """Looks at every point of `epd_portable.log`, however often a process imports it.

    What the launcher forks imports it anew.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, whose loader patches it."""
        spec = PathFinder.find_spec(name, path) if name == "epd_portable.log" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _patch(module)

            spec.loader.exec_module = exec_module
        return spec


def _patch(log: Any) -> None:
    from tests.faults.points import name_process

    folder = Path(os.environ["EPD_TEST_FAULTS"])
    record = log.EventTrace.__call__

    def call(self: Any, event: str, **fields: object) -> None:
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

    log.EventTrace.__call__ = call
    if os.environ.get("EPD_INSTANCE") == "front":
        name_process(folder, "front", os.getpid())


def install() -> None:
    """Look at every point from now on."""
    if not any(isinstance(each, _Hook) for each in sys.meta_path):
        sys.meta_path.insert(0, _Hook())
        if (log := sys.modules.get("epd_portable.log")) is not None:
            _patch(log)


def let_the_wall_clock_jump() -> None:
    right, right_ns = time.time, time.time_ns
    chance = random.Random(os.getpid())

    def jumping() -> float:
        signs = sys._getframe(1).f_globals["__name__"] == "epd_portable.config.secret"
        return right() + (0.0 if signs else chance.uniform(-DAY_S, DAY_S))

    time.time = jumping
    time.time_ns = lambda: right_ns() + int(chance.uniform(-DAY_S, DAY_S) * 1e9)


if os.environ.get("EPD_TEST_CLOCK"):
    let_the_wall_clock_jump()
if os.environ.get("EPD_TEST_FAULTS"):
    install()

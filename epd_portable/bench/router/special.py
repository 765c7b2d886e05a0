"""Cases that start a router of their own: many idle instances, several workers, a choice alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epd_portable.bench.router import choice, stand
from epd_portable.bench.router.cases import Case, CaseFigure, Values
from epd_portable.bench.router.commands import InstanceAddress
from epd_portable.bench.router.stage import Measured, Stage
from epd_portable.bench.router.stand import PlayedInstances
from epd_portable.bench.servers import free_port
from epd_portable.errors import LaunchError, MeasurementError

ROUTER = frozenset({"router"})
IDLE_SETTLE_S = 5.0
IDLE_WINDOW_S = 10.0
IDLE_START_TIMEOUT_S = 90.0
CHOICE_NAMES = 10_000
CHOICE_REPEATS = 51
WORKER_CONNECTIONS = 512
"""Spread over the workers by a hash: the more there are, the more even is it."""
WORKER_RATE = 400.0


class NotMeasuredError(MeasurementError):
    """A side does not have what a case measures; says what."""


@contextmanager
def own_router(
    stage: Stage,
    measured: Measured,
    instances: tuple[InstanceAddress, ...],
    cores: frozenset[int],
    **settings: Any,
) -> Iterator[Measured]:
    """Start another router of a side, for as long as the block."""
    server = stand.router(
        measured.side, instances, stage.secret_file, cores, stage.folder, **settings
    )
    with server:
        yield Measured(measured.side, stand.port_of(server), server)


def many_addresses(count: int) -> list[InstanceAddress]:
    """Return instances at a port each has on a loopback address of its own, half of either role."""
    http, control = free_port(), free_port()
    found = []
    for number in range(count):
        host = f"127.1.{number // 250}.{number % 250 + 1}"
        if number % 2:
            found.append(
                InstanceAddress(name=f"encode-{number}", role="encode", host=host, port=http)
            )
        else:
            found.append(
                InstanceAddress(
                    name=f"pd-{number}",
                    role="prefill-decode",
                    host=host,
                    port=http,
                    control=f"tcp://{host}:{control}",
                )
            )
    return found


def idle(stage: Stage, measured: Measured) -> Values:
    """What many instances cost of which nobody asks anything."""
    addresses = many_addresses(stage.effort.idle_instances)
    played = PlayedInstances(addresses, stage.secret_file, stage.cores, stage.folder)
    begin_s = time.monotonic()
    with (
        played,
        own_router(stage, measured, played.addresses, stage.cores.measured) as alone,
    ):
        assert alone.server is not None
        deadline_s = begin_s + IDLE_START_TIMEOUT_S
        while played.counts().probed < len(addresses) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        start_s = time.monotonic() - begin_s
        time.sleep(IDLE_SETTLE_S)
        probes, cpu_s, from_s = played.counts().probes, alone.cpu_s(), time.monotonic()
        with stage.window(alone):
            time.sleep(IDLE_WINDOW_S)
        wall_s = time.monotonic() - from_s
        return {
            "share": (alone.cpu_s() - cpu_s) / wall_s * 100,
            "probes": (played.counts().probes - probes) / wall_s,
            "mb": stand.memory_bytes(alone.server) / 1e6,
            "start_s": start_s,
            "missing": len(addresses) - played.counts().probed,
        }


def choose(stage: Stage, measured: Measured) -> Values:
    """The choice alone, in a process that does nothing else."""
    text = Path(choice.__file__).read_text("utf-8")
    argv = [sys.executable, "-c", text, str(CHOICE_NAMES), str(CHOICE_REPEATS)]
    done = subprocess.run(
        argv,
        cwd=stage.folder,
        env={**os.environ, "PYTHONPATH": measured.side.path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NotMeasuredError(done.stderr.strip().rpartition("\n")[2])
    return {f"{role} us": each for role, each in json.loads(done.stdout).items()}


def workers(stage: Stage, measured: Measured) -> Values:
    """Two processes against one, by CPU time and, with cores enough, by requests a second.

    By CPU time: two workers answer as much as one until the busier of them is full.
    """
    cpu_s: dict[int, float] = {}
    rate: dict[int, float] = {}
    busiest = 1.0
    for count in (1, 2):
        cores = stage.cores.measured if count == 1 else stage.cores.both
        more: dict[str, Any] = {} if count == 1 else {"workers": count}
        try:
            with own_router(stage, measured, stage.instances.addresses, cores, **more) as alone:
                assert alone.server is not None
                flow = stage.flow(alone, "warm-up", count=200, connections=50)
                stage.run(alone, flow)
                flow = stage.flow(
                    alone,
                    "text",
                    count=round(WORKER_RATE * 2 * stage.effort.window_s),
                    rate=WORKER_RATE,
                    connections=WORKER_CONNECTIONS,
                )
                before = stand.processes_cpu_s(alone.server)
                sent = len(stage.run(alone, flow).flows["text"])
                after = stand.processes_cpu_s(alone.server)
                used = [each - before.get(pid, 0.0) for pid, each in after.items()]
                cpu_s[count], busiest = sum(used) / sent, max(used) / sum(used)
                if stage.cores.rates_of_two:
                    flow = stage.flow(alone, "most", seconds=stage.effort.window_s, connections=256)
                    rate[count] = stage.run(alone, flow).rate("most")
        except LaunchError as error:
            if more and "workers" in str(error):
                raise NotMeasuredError("its settings have no key 'workers'") from error
            raise
    values = {"by_cpu": cpu_s[1] / (cpu_s[2] * busiest), "busiest": busiest * 100}
    if rate:
        values["by_rate"] = rate[2] / rate[1]
    return values


SPECIAL_CASES: tuple[Case, ...] = (
    Case(
        name="idle",
        about="1,000 instances of which nobody asks anything",
        figures=(
            CaseFigure(key="share", what="1,000 idle instances: % of a core", clock="CPU", limit=5),
            CaseFigure(
                key="probes",
                what="1,000 idle instances: asked for their health, times/s",
                clock="counted",
                better="higher",
            ),
            CaseFigure(key="mb", what="1,000 idle instances: MB", clock="counted", limit=200),
            CaseFigure(
                key="start_s", what="until all were asked for their health: s", clock="wall"
            ),
            CaseFigure(key="missing", what="of these never asked", clock="counted", limit=0),
        ),
        measure=idle,
        kinds=ROUTER,
        once=True,
        seconds=lambda effort: IDLE_SETTLE_S + IDLE_WINDOW_S + 15,
    ),
    Case(
        name="choice",
        about=f"the choice among {CHOICE_NAMES:,} instances, alone",
        figures=tuple(
            CaseFigure(
                key=f"{role} us",
                what=f"choice among {CHOICE_NAMES:,} of role {role}: µs",
                clock="CPU",
                limit=50,
            )
            for role in ("encode", "prefill-decode")
        ),
        measure=choose,
        kinds=ROUTER,
        seconds=lambda effort: 2.5,
    ),
    Case(
        name="workers",
        about="two workers against one",
        figures=(
            CaseFigure(
                key="by_cpu",
                what="two workers by one: by CPU time of the busier",
                clock="CPU",
                better="higher",
                limit=1.8,
            ),
            CaseFigure(key="busiest", what="share of the busier: %", clock="CPU"),
            CaseFigure(
                key="by_rate",
                what="two workers by one: requests/s",
                clock="wall",
                better="higher",
                limit=1.8,
            ),
        ),
        measure=workers,
        kinds=ROUTER,
        once=True,
        seconds=lambda effort: 4 * effort.window_s + 4,
    ),
)
"""Cases of routers only."""

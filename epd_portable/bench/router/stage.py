"""What all cases share: processes that stay up while cases come and go, and windows of load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_portable.bench.router import stand
from epd_portable.bench.router.commands import AnswerRecord, Done, Flow, Release, Run, Watch
from epd_portable.bench.router.stand import Cores, LoadProcess, PlayedInstances, Side
from epd_portable.bench.scratch import scratch_folder
from epd_portable.bench.servers import Server
from epd_portable.bench.stats import quantile
from epd_portable.router.http import open_files

HEAVY_NICENESS = 10
"""Bodies of many megabytes come from a process that stands back for the one that is timed."""
UNBOUNDED = 10**6
"""Requests of a flow that ends by time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long is measured.

    Attributes:
        rounds: Turns of every side in every case.
        window_s: Of one load within a turn.
        idle_instances: Of the case `idle`.
        in_flight: Requests of the case `faults`.
    """

    rounds: int
    window_s: float
    idle_instances: int = 1000
    in_flight: int = 1000


QUICK = Effort(rounds=1, window_s=1.5)
FULL = Effort(rounds=3, window_s=3.0)


@dataclass(kw_only=True, slots=True)
class CaseRecord:
    """What is known of the measuring itself, of one case and side.

    Attributes:
        requests: Sent.
        not_right: Not answered as they should be.
        detail: Of the first of these.
        wall_s: Time of all windows.
        load_s: CPU time of the load in it.
        instances_s: CPU time of the instances.
        measured_s: CPU time of what was measured.
        others_s: Time for which its cores were taken by nobody of the measurement.
        late_s: How much too late requests were sent, of flows with a rate.
    """

    requests: int = 0
    not_right: int = 0
    detail: str = ""
    wall_s: float = 0.0
    load_s: float = 0.0
    instances_s: float = 0.0
    measured_s: float = 0.0
    others_s: float = 0.0
    late_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One load, measured.

    Attributes:
        cpu_s: CPU time of what was measured.
        flows: The exchanges of each flow by its name.
        tokens: That were counted on answers that are held.
    """

    cpu_s: float
    flows: dict[str, list[AnswerRecord]]
    tokens: int

    def cpu_each_s(self, name: str) -> float:
        """Return the CPU time for one request of a flow, where there is no other."""
        return self.cpu_s / len(self.flows[name])

    def rate(self, name: str) -> float:
        """Return how many requests of a flow were answered in a second."""
        flow = self.flows[name]
        end_s = max(each.begin_s + each.total_s for each in flow)
        return len(flow) / (end_s - min(each.begin_s for each in flow))

    def latency_s(self, name: str, share: float) -> float:
        """Return a quantile of the times to the end of an answer."""
        return quantile([each.total_s for each in self.flows[name]], share)


class Measured:
    """A side, up.

    Args:
        side: Which.
        port: Where it listens.
        server: Its processes; of an instance that is asked directly, none.
    """

    def __init__(self, side: Side, port: int, server: Server | None) -> None:
        self.side = side
        self.port = port
        self.server = server

    def cpu_s(self) -> float:
        """Return the CPU time that it has used."""
        return stand.cpu_s(self.server) if self.server is not None else 0.0


class Stage:
    """Everything that stays up while cases come and go.

    Args:
        effort: How long is measured.
        cores: Who runs where.
        folder: For files.
        secret_file: Of the deployment.
        instances: An encode and a prefill+decode instance.
        load: The clients.
        heavy: Clients with large bodies.

    Attributes:
        sides: What is measured.
        tallies: What is known of the measuring, by case and side.
    """

    def __init__(
        self,
        *,
        effort: Effort,
        cores: Cores,
        folder: Path,
        secret_file: str,
        instances: PlayedInstances,
        load: LoadProcess,
        heavy: LoadProcess,
    ) -> None:
        self.effort = effort
        self.cores = cores
        self.folder = folder
        self.secret_file = secret_file
        self.instances = instances
        self.load = load
        self.heavy = heavy
        self.sides: list[Measured] = []
        self.tallies: dict[tuple[str, str], CaseRecord] = {}
        self.tally = CaseRecord()
        self._numbers = 1

    def flow(self, measured: Measured, name: str, *, count: int = UNBOUNDED, **more: Any) -> Flow:
        """Return a flow to a side, of questions that nobody asked before."""
        first, self._numbers = self._numbers, self._numbers + count
        return Flow(name=name, port=measured.port, first_number=first, count=count, **more)

    def run(
        self,
        measured: Measured,
        *flows: Flow,
        heavy: Sequence[Flow] = (),
    ) -> Window:
        """Run flows beside each other, those with large bodies from a process of their own."""
        with self.window(measured) as found:
            if heavy:
                self.heavy.begin(Run(flows=list(heavy)))
            found.append(self.load.carry_out(Run(flows=list(flows))))
            if heavy:
                found.append(self.heavy.hear(Done))
        self._count(found)
        return self._taken(found)

    def watch(self, measured: Measured, seconds: float) -> Window:
        """Count the tokens of answers that are held."""
        with self.window(measured) as found:
            found.append(self.load.carry_out(Watch(seconds=seconds)))
        return self._taken(found)

    def release(self) -> None:
        """Go away from answers that are held, and wait until nobody works on them any more."""
        self.load.carry_out(Release())
        self.instances.wait_until_quiet()

    @contextlib.contextmanager
    def window(self, measured: Measured) -> Iterator[list[Done]]:
        """Note what everybody uses within the block, to which it leaves what the load answers."""
        found: list[Done] = []
        instances_s, begin_s = self.instances.counts().cpu_s, time.monotonic()
        busy_s = stand.busy_s(self.cores.measured)
        self._cpu_s = measured.cpu_s()
        yield found
        self._cpu_s = measured.cpu_s() - self._cpu_s
        busy_s = stand.busy_s(self.cores.measured) - busy_s
        tally = self.tally
        tally.wall_s += time.monotonic() - begin_s
        tally.instances_s += self.instances.counts().cpu_s - instances_s
        tally.measured_s += self._cpu_s
        tally.others_s += max(0.0, busy_s - self._cpu_s)
        tally.load_s += sum(done.cpu_s for done in found)

    def _count(self, found: Sequence[Done]) -> None:
        tally = self.tally
        for done in found:
            for flow in done.flows.values():
                tally.requests += len(flow)
                tally.late_s += [each.late_s for each in flow]
                wrong = [each for each in flow if each.verdict not in ("right", "left")]
                tally.not_right += len(wrong)
                tally.detail = tally.detail or (wrong[0].detail if wrong else "")

    def _taken(self, found: Sequence[Done]) -> Window:
        flows = {name: flow for done in found for name, flow in done.flows.items()}
        return Window(cpu_s=self._cpu_s, flows=flows, tokens=sum(done.tokens for done in found))


@contextlib.contextmanager
def set_up(sides: Sequence[Side], effort: Effort, cores: Cores) -> Iterator[Stage]:
    """Start everything that all cases need; nothing of it is left afterwards."""
    with ExitStack() as stack:
        open_files.raise_limit()
        folder, secret_file = stack.enter_context(scratch_folder())
        addresses = stand.pair()
        instances = PlayedInstances(addresses, secret_file, cores, folder)
        stage = Stage(
            effort=effort,
            cores=cores,
            folder=folder,
            secret_file=secret_file,
            instances=stack.enter_context(instances),
            load=stack.enter_context(LoadProcess(cores, folder)),
            heavy=stack.enter_context(LoadProcess(cores, folder, niceness=HEAVY_NICENESS)),
        )
        for side in sides:
            if side.kind == "direct":
                stage.sides.append(Measured(side, addresses[1].port, None))
                continue
            if side.kind == "router":
                server = stand.router(side, addresses, secret_file, cores.measured, folder)
            else:
                server = stand.proxy(side, addresses, cores.measured, folder)
            stack.enter_context(server)
            stage.sides.append(Measured(side, stand.port_of(server), server))
        yield stage

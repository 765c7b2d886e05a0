"""The case of faults: requests in flight, clients that leave, instances that are killed and back.

Counts, not times: every client that stays gets the right answer or a clear error, and afterwards
nothing of it all is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack

from epd_portable.bench.router import stand
from epd_portable.bench.router.cases import Case, CaseFigure, Values
from epd_portable.bench.router.commands import AnswerRecord, Done, InstanceAddress, Run
from epd_portable.bench.router.questions import Verdict
from epd_portable.bench.router.special import ROUTER, own_router
from epd_portable.bench.router.stage import Measured, Stage
from epd_portable.bench.router.stand import PlayedInstances
from epd_portable.bench.servers import Server

SENDING_S = 4.0
"""In which all are sent."""
ANSWER_MS = 8000
"""How long each answer takes, so that all are in flight at one moment."""
TOKEN_GAP_MS = 500
ENCODE_MS = 300
PICTURE_BYTES = 30_000
KILL_S = {"prefill-decode": 5.0, "encode": 2.0}
"""When all requests are in flight; when encode jobs are."""
AWAY_S = 1.5
LEAVE_AFTER_S = 2.0
LEAVE_SHARE = 10
TIMEOUT_S = 60.0
RECOVERY_S = 3.0
"""In which a router should have seen that they are back."""
SETTLE_S = 8.0
AFTERWARDS = 100
_SAMPLE_S = 0.1

_MIX = (
    ("streamed texts", True, False, 4),
    ("texts", False, False, 2),
    ("streamed pictures", True, True, 2),
    ("pictures", False, True, 2),
)
"""Kinds of requests, and how many of ten are of each."""


class _Topology:
    """Two instances of each role, each a process that can be killed."""

    def __init__(self, stage: Stage, stack: ExitStack) -> None:
        self._stage = stage
        self._stack = stack
        self._playing: dict[InstanceAddress, PlayedInstances] = {}
        self.addresses = tuple(address for number in (0, 1) for address in stand.pair(number))
        for address in self.addresses:
            self.start(address)

    def start(self, address: InstanceAddress) -> None:
        """Start an instance, again or for the first time."""
        stage = self._stage
        played = PlayedInstances(
            [address],
            stage.secret_file,
            stage.cores,
            stage.folder,
            encode_ms=ENCODE_MS,
            halves=True,
        )
        self._playing[address] = self._stack.enter_context(played)

    def of_role(self, role: str) -> list[InstanceAddress]:
        """Return the instances of one role."""
        return [address for address in self.addresses if address.role == role]

    def kill(self, address: InstanceAddress) -> None:
        """Kill an instance."""
        self._playing[address].kill()

    def open(self) -> int:
        """Return how many answers are under way at all that live."""
        return sum(played.counts().open for played in self._playing.values())


class _Peak:
    """The largest memory of a server's processes within a block, seen ten times a second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.nbytes = 0

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self.nbytes = max(self.nbytes, stand.memory_bytes(self._server))


def faults(stage: Stage, measured: Measured) -> Values:
    """Kill both instances of either role under load, and count what becomes of the requests."""
    with ExitStack() as stack:
        topology = _Topology(stage, stack)
        cores = stage.cores.measured
        alone = stack.enter_context(own_router(stage, measured, topology.addresses, cores))
        assert alone.server is not None
        _ask(stage, alone)
        time.sleep(SETTLE_S)
        memory = stand.memory_bytes(alone.server)
        _, others = stand.connections(alone.server)
        values: Values = {}
        peak = stack.enter_context(_Peak(alone.server))
        for role in KILL_S:
            for name, value in _strike(stage, alone, topology, role).items():
                values[f"{role} {name}"] = value
        values["growth_mb"] = max(0, peak.nbytes - memory) / 1e6
        time.sleep(SETTLE_S)
        values["open"] = topology.open()
        values["clients"], values["others"] = stand.connections(alone.server)
        values["others"] = max(0, values["others"] - others)
        return values


def _strike(stage: Stage, alone: Measured, topology: _Topology, role: str) -> Values:
    """Kill both instances of a role while requests are in flight, and let them come back."""
    count = stage.effort.in_flight
    with stage.window(alone) as answered:
        stage.load.begin(_requests(stage, alone, count, leave=count // LEAVE_SHARE))
        time.sleep(KILL_S[role])
        in_flight = topology.open()
        for address in topology.of_role(role):
            topology.kill(address)
        time.sleep(AWAY_S)
        for address in topology.of_role(role):
            topology.start(address)
        answered.append(stage.load.hear(Done))
    exchanges = [each for flow in answered[0].flows.values() for each in flow]
    stage.tally.requests += len(exchanges)
    found = count_verdicts(exchanges)
    stage.tally.not_right += found["wrong"]
    stage.tally.detail = stage.tally.detail or next(
        (each.detail for each in exchanges if each.verdict == "wrong"), ""
    )
    time.sleep(RECOVERY_S)
    afterwards = _ask(stage, alone)
    return {
        "in_flight": in_flight,
        **{verdict: float(number) for verdict, number in found.items()},
        "afterwards": float(count_verdicts(afterwards)["right"]),
    }


def count_verdicts(exchanges: list[AnswerRecord]) -> dict[Verdict, int]:
    """Return how many exchanges have each verdict; all of them are in it."""
    counted = Counter(each.verdict for each in exchanges)
    verdicts: tuple[Verdict, ...] = ("right", "error", "wrong", "left")
    return {verdict: counted[verdict] for verdict in verdicts}


def _ask(stage: Stage, alone: Measured) -> list[AnswerRecord]:
    """Ask short questions of every kind."""
    flows = stage.load.carry_out(_requests(stage, alone, AFTERWARDS, leave=0, answer_ms=0)).flows
    return [each for flow in flows.values() for each in flow]


def _requests(
    stage: Stage, alone: Measured, count: int, *, leave: int, answer_ms: int = ANSWER_MS
) -> Run:
    """Return requests of every kind whose answers take so long."""
    flows = []
    for name, streamed, with_picture, tenths in _MIX:
        own = count * tenths // 10
        tokens = max(2, answer_ms // TOKEN_GAP_MS)
        flows.append(
            stage.flow(
                alone,
                name,
                count=own,
                rate=own / SENDING_S,
                chunks=tokens if streamed else 0,
                gap_ms=answer_ms // tokens if streamed else 0,
                first_ms=0 if streamed else answer_ms,
                picture_bytes=PICTURE_BYTES if with_picture else 0,
                leave=leave * tenths // 10,
                leave_after_s=LEAVE_AFTER_S,
                timeout_s=TIMEOUT_S,
            )
        )
    return Run(flows=flows)


def _figures(role: str) -> tuple[CaseFigure, ...]:
    whose = f"both {role} killed"
    return (
        CaseFigure(
            key=f"{role} in_flight",
            what=f"{whose}: answers under way then",
            clock="counted",
            better="higher",
        ),
        CaseFigure(
            key=f"{role} right", what=f"{whose}: right answers", clock="counted", better="higher"
        ),
        CaseFigure(key=f"{role} error", what=f"{whose}: clear errors", clock="counted"),
        CaseFigure(key=f"{role} wrong", what=f"{whose}: neither", clock="counted", limit=0),
        CaseFigure(key=f"{role} left", what=f"{whose}: clients that left", clock="counted"),
        CaseFigure(
            key=f"{role} afterwards",
            what=f"{whose}: of {AFTERWARDS} after they are back, right",
            clock="counted",
            better="higher",
            limit=AFTERWARDS,
        ),
    )


FAULTS = Case(
    name="faults",
    about="1,000 requests in flight, 100 leave, both instances of a role killed and back",
    figures=(
        *(figure for role in KILL_S for figure in _figures(role)),
        CaseFigure(key="growth_mb", what="memory at most, by before: MB more", clock="counted"),
        CaseFigure(key="open", what="answers left under way", clock="counted", limit=0),
        CaseFigure(key="clients", what="clients' connections left", clock="counted", limit=0),
        CaseFigure(key="others", what="other connections, beyond those before", clock="counted"),
    ),
    measure=faults,
    kinds=ROUTER,
    once=True,
    seconds=lambda effort: 2 * (SENDING_S + ANSWER_MS / 1000 + SENDING_S + 3) + 2 * SETTLE_S,
)
"""The faults."""

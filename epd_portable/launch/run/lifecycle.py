"""Starts, restarts and ends of processes: decisions from events and times, without any I/O.

While the topology starts, the first death ends it. While it serves, a death is followed by a
restart after a pause that doubles up to a limit. A process that lives and is silent for too long is
asked to end, then killed: a death too.

Instances on one device start one at a time: an engine measures the device's free memory while it
starts, and takes what another one takes or frees meanwhile for its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from epd_portable.config.schema import Launch
from epd_portable.launch.notices import Event, Notice

FORGIVEN_AFTER_S = 60.0
"""Healthy for this long, a process has its earlier deaths forgiven."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a process that died while the topology serves is started again; doubles every time."""
HUNG_PROBES = 3
"""Probes in a row that a process must miss before it counts as hung, however long each took."""


class Phase(Enum):
    """State of the topology."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """Start a process, ask it to end, or end one that does not do so."""

    what: Literal["start", "stop", "kill"]
    name: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Stop everything: ``name`` did not start, for this reason."""

    name: str
    reason: str


Action = ProcessOrder | Notice | Fail


@dataclass(kw_only=True, slots=True)
class _State:
    started_at: float | None = None
    healthy_at: float | None = None
    restart_at: float | None = None
    deaths: int = 0
    silent_probes: int = 0
    silent_since: float = 0.0
    kill_at: float | None = None  # when it was asked to end

    @property
    def word(self) -> str:
        """Return its state, for the user."""
        if self.restart_at is not None:
            return "waiting"
        if self.kill_at is not None:
            return "terminating"
        return "starting" if self.healthy_at is None else "up"


class Lifecycle:
    """Decides for all processes of one topology.

    Each event comes with its time, in seconds of any clock, and is answered with what to do.
    ``after`` has for each process the neighbours on its devices that must have started before it.
    """

    def __init__(
        self,
        names: Iterable[str],
        launch: Launch,
        after: Mapping[str, Iterable[str]],
    ) -> None:
        self.phase = Phase.STARTING
        self._launch = launch
        self._states = {name: _State() for name in names}
        self._after = {name: tuple(after.get(name, ())) for name in self._states}

    def start_all(self, now: float) -> list[Action]:
        """Start every process that waits for no neighbour."""
        for state in self._states.values():
            state.restart_at = now
        return self._start_what_is_due(now)

    def all_up(self) -> bool:
        """Return whether every process has been healthy since its start."""
        return all(state.healthy_at is not None for state in self._states.values())

    def waiting(self) -> dict[str, list[str]]:
        """Return the processes that are due, with the neighbours that each waits for."""
        return {
            name: blocking
            for name, state in self._states.items()
            if state.restart_at is not None and (blocking := self._blocking(name))
        }

    def states(self) -> dict[str, str]:
        """Return ``starting``, ``up``, ``terminating`` or ``waiting`` for each process."""
        return {name: state.word for name, state in self._states.items()}

    def healthy(self, name: str, now: float) -> list[Action]:
        """Note that a running process answered its probe."""
        state = self._states[name]
        state.silent_probes = 0
        if state.healthy_at is not None:
            return []
        state.healthy_at = now
        started = self._start_what_is_due(now)
        if self.phase is Phase.SERVING:
            return [Notice("recovered", f"{name} has recovered", {"instance": name}), *started]
        return started

    def silent(self, name: str, asked_at: float, now: float) -> list[Action]:
        """Count a failed probe that began at ``asked_at``, while the process is `up`."""
        state, limit_s = self._states[name], self._launch.hung_after_s
        if state.word != "up":
            return []
        if not state.silent_probes:
            state.silent_since = asked_at
        state.silent_probes += 1
        silent_s = now - state.silent_since
        if not limit_s or state.silent_probes < HUNG_PROBES or silent_s < limit_s:
            return []
        state.kill_at = now + self._launch.stop_grace_s
        reason = f"has not answered as it should for {silent_s:.0f} s (launch.hung_after_s)"
        return [_end_of("terminating", name, reason), ProcessOrder("stop", name)]

    def exited(self, name: str, how: str, now: float) -> list[Action]:
        """Note that a process ended; ``how`` is for the user, as ``was killed by SIGKILL``."""
        state = self._states[name]
        if self.phase is not Phase.SERVING:
            self.phase = Phase.FAILED
            return [Fail(name, how)]
        healthy_until = state.silent_since if state.silent_probes else now
        if state.healthy_at is not None and healthy_until - state.healthy_at >= FORGIVEN_AFTER_S:
            state.deaths = 0
        delay_s = min(FIRST_PAUSE_S * 2.0 ** min(state.deaths, 63), LONGEST_PAUSE_S)
        self._states[name] = _State(deaths=state.deaths + 1, restart_at=now + delay_s)
        notice = Notice(
            "exited",
            f"{name} {how}; restarting it in {delay_s:g} s",
            {"instance": name, "reason": how, "restart_in_s": delay_s},
        )
        return [notice, *self._start_what_is_due(now)]

    def tick(self, now: float) -> list[Action]:
        """Do what is due at a time."""
        actions = self._start_what_is_due(now)
        patience_s = self._launch.startup_timeout_s
        for name, state in self._states.items():
            if state.kill_at is not None and now >= state.kill_at:
                # It must not be killed twice.
                state.kill_at = math.inf
                reason = f"does not end within {self._launch.stop_grace_s:g} s"
                actions += [_end_of("killing", name, reason), ProcessOrder("kill", name)]
            elif (
                state.started_at is not None
                and state.healthy_at is None
                and now - state.started_at >= patience_s
            ):
                reason = f"is not healthy {patience_s:g} s after its start"
                if self.phase is Phase.STARTING:
                    self.phase = Phase.FAILED
                    return [Fail(name, f"{reason} (launch.startup_timeout_s)")]
                # Its exit follows and schedules the restart; it must not be killed twice.
                state.started_at = None
                actions += [_end_of("killing", name, reason), ProcessOrder("kill", name)]
        return actions

    def _start_what_is_due(self, now: float) -> list[Action]:
        started: list[Action] = []
        for name, state in self._states.items():
            due = state.restart_at is not None and now >= state.restart_at
            if due and not self._blocking(name):
                self._states[name] = _State(deaths=state.deaths, started_at=now)
                started.append(ProcessOrder("start", name))
        return started

    def _blocking(self, name: str) -> list[str]:
        """Return the neighbours whose start or end this one must wait for.

        The memory that a neighbour takes of a device changes on its way up or down.
        """
        blocking = []
        for other, state in self._states.items():
            is_earlier, is_later = other in self._after[name], name in self._after[other]
            changes = state.word in ("starting", "terminating") and (is_earlier or is_later)
            is_due = self.phase is Phase.STARTING and is_earlier and state.healthy_at is None
            if changes or is_due:
                blocking.append(other)
        return blocking


def _end_of(event: Event, name: str, reason: str) -> Notice:
    return Notice(event, f"{name} {reason}; {event} it", {"instance": name, "reason": reason})

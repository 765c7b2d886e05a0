"""When to start, restart and give up: decisions from events and times, without any I/O.

Feed it what happened (``healthy``, ``exited``, ``tick``), each with the time; it answers with what
to do. While the topology starts, the first death ends it. Once everything has been healthy it
serves, and a death is answered with a restart after a pause that doubles up to a limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from epd_portable.config.schema import Restart


class Phase(Enum):
    """Where the topology stands."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process that is not healthy in time; its exit will be reported as any other."""

    name: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Stop everything: ``name`` did not start, for this reason."""

    name: str
    reason: str


Action = Start | Kill | Notice | Fail


@dataclass(kw_only=True, slots=True)
class _State:
    started_at: float | None = None
    healthy_at: float | None = None
    restart_at: float | None = None
    deaths: int = 0


class Lifecycle:
    """Decides for all processes of one topology.

    Args:
        names: Every process.
        startup_timeout_s: Longest time from a start to the first healthy answer.
        restart: Back-off of restarts.
    """

    def __init__(self, names: Iterable[str], *, startup_timeout_s: float, restart: Restart) -> None:
        self.phase = Phase.STARTING
        self._timeout_s = startup_timeout_s
        self._restart = restart
        self._states = {name: _State() for name in names}

    def begin(self, now: float) -> list[Action]:
        """Start everything."""
        return [self._start(name, now) for name in self._states]

    def pending(self) -> list[str]:
        """Return the running processes that have not been healthy since their start."""
        return [
            name
            for name, state in self._states.items()
            if state.started_at is not None and state.healthy_at is None
        ]

    def healthy(self, name: str, now: float) -> list[Action]:
        """A pending process answered its probe."""
        self._states[name].healthy_at = now
        if self.phase is Phase.SERVING:
            return [Notice(f"{name} is back")]
        if all(state.healthy_at is not None for state in self._states.values()):
            self.phase = Phase.SERVING
        return []

    def exited(self, name: str, how: str, now: float) -> list[Action]:
        """A process ended without being asked to.

        Args:
            name: Which one.
            how: For the user, for example ``was killed by SIGKILL``.
            now: Time.
        """
        state = self._states[name]
        if self.phase is not Phase.SERVING:
            self.phase = Phase.FAILED
            return [Fail(name, how)]
        if state.healthy_at is not None and now - state.healthy_at >= self._restart.healthy_after_s:
            state.deaths = 0
        delay_s = min(
            self._restart.first_delay_s * 2.0 ** min(state.deaths, 63), self._restart.max_delay_s
        )
        state.deaths += 1
        state.started_at = state.healthy_at = None
        state.restart_at = now + delay_s
        return [Notice(f"{name} {how}; restarting it in {delay_s:g} s")]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for name, state in self._states.items():
            if state.restart_at is not None and now >= state.restart_at:
                actions.append(self._start(name, now))
            elif (
                state.started_at is not None
                and state.healthy_at is None
                and now - state.started_at >= self._timeout_s
            ):
                reason = f"is not healthy {self._timeout_s:g} s after its start"
                if self.phase is Phase.STARTING:
                    self.phase = Phase.FAILED
                    return [Fail(name, f"{reason} (launch.startup_timeout_s)")]
                # Its exit follows and schedules the restart; it must not be killed twice.
                state.started_at = None
                actions += [Notice(f"{name} {reason}; ending it"), Kill(name)]
        return actions

    def _start(self, name: str, now: float) -> Start:
        state = self._states[name]
        state.started_at, state.restart_at = now, None
        return Start(name)

"""Histories of processes, in a time of their own, and what the launcher does about them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from epd_portable.config.schema import Launch
from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run.lifecycle import Child, Lifecycle
from tests.unit.launch.own_time import in_own_time, now

LAUNCH = Launch(startup_timeout_s=100.0, stop_grace_s=15.0, hung_after_s=30.0)
NEVER = float("inf")
HUNG = "has not responded as it should for 30 s (launch.hung_after_s); terminating it"


@dataclass
class Process:
    """A process that needs 10 s until it is healthy; times are counted from its start.

    Attributes:
        ready_s: Until it is healthy.
        dies_s: When it ends by itself.
        silent: From when to when it does not respond.
        deaf: Whether it does not end by SIGTERM.
    """

    ready_s: float = 10.0
    dies_s: float = NEVER
    silent: tuple[float, float] = (NEVER, NEVER)
    deaf: bool = False
    begun: float = field(default_factory=now)
    status: int | None = None

    @property
    def age_s(self) -> float:
        return now() - self.begun

    def exit_status(self) -> int | None:
        return 1 if self.age_s >= self.dies_s else self.status

    def send_signal(self, signum: signal.Signals) -> None:
        if not (self.deaf and signum == signal.SIGTERM):
            self.status = -signum

    async def is_ready(self, *, timeout_s: float) -> bool:
        return self.age_s >= self.ready_s

    async def is_well(self, *, timeout_s: float) -> bool:
        begin, end = self.silent
        if begin <= self.age_s < end:
            await asyncio.sleep(min(timeout_s, end - self.age_s))
        return not begin <= self.age_s < end

    def note_shared_memory(self) -> None:
        pass

    def ending(self) -> str:
        return "died" if self.status is None else f"was ended by {-self.status}"

    def last_words(self) -> str:
        return ": last words"


class Topology:
    """Processes that each start by the next of their histories, and then by the last one again."""

    def __init__(
        self,
        histories: Mapping[str, list[Callable[[], Process]]],
        after: Mapping[str, tuple[str, ...]] | None = None,
        launch: Launch = LAUNCH,
    ) -> None:
        self.said: list[tuple[float, str]] = []
        self.all: dict[str, Lifecycle] = {}
        self._histories = histories
        for name in histories:
            spec = ProcessSpec(
                name=name,
                role="encode",
                argv=(),
                env={},
                url="",
                ports={},
                after=(after or {}).get(name, ()),
            )
            self.all[name] = Lifecycle(
                spec, launch, self.all, start=self._start, clean_up=self._clean_up, say=self._say
            )

    def _start(self, spec: ProcessSpec) -> Child:
        left = self._histories[spec.name]
        self.said.append((round(now(), 1), f"start {spec.name}"))
        return cast(Child, (left.pop(0) if len(left) > 1 else left[0])())

    async def _clean_up(self, child: Child) -> None:
        pass

    def _say(self, notice: Notice) -> None:
        self.said.append((round(now(), 1), notice.text))

    async def _follow(self, until: float) -> None:
        tasks = [asyncio.ensure_future(each.keep()) for each in self.all.values()]
        try:
            while now() < until:
                if all(each.state == "up" for each in self.all.values()):
                    for each in self.all.values():
                        each.serving = True
                ended, _ = await asyncio.wait(
                    tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, until: float) -> list[str]:
        """Return what is started and reported until then."""
        in_own_time(self._follow(until))
        return [text for _, text in self.said]


def pauses(said: list[str]) -> list[str]:
    return [text.rpartition(" in ")[2] for text in said if "restarting" in text]


def test_death_before_all_are_up_ends_the_start() -> None:
    slow, dies = Process, lambda: Process(ready_s=1.0, dies_s=5.0)
    with pytest.raises(LaunchError, match="front died"):
        Topology({"encode-0": [slow], "front": [dies]}).run(50.0)


def test_start_without_health_ends_with_its_last_words() -> None:
    text = r"x is not healthy 100 s after its start \(launch\.startup_timeout_s\): last words"
    with pytest.raises(LaunchError, match=text):
        Topology({"x": [lambda: Process(ready_s=NEVER)]}).run(200.0)


def test_restart_delay_doubles_up_to_its_limit() -> None:
    found = pauses(Topology({"x": [lambda: Process(dies_s=12.0)]}).run(200.0))
    assert found[:7] == ["1 s", "2 s", "4 s", "8 s", "16 s", "30 s", "30 s"]


def test_deaths_are_forgiven_after_a_long_health() -> None:
    short, long = (lambda: Process(dies_s=12.0)), (lambda: Process(dies_s=75.0))
    found = pauses(Topology({"x": [short, short, long, short, Process]}).run(200.0))
    assert found == ["1 s", "2 s", "1 s", "2 s"]


def test_restart_that_hangs_is_killed_once_and_tried_again() -> None:
    stuck = lambda: Process(ready_s=NEVER)  # noqa: E731
    said = Topology({"x": [lambda: Process(dies_s=12.0), stuck, Process]}).run(200.0)
    assert said[2:] == [
        "start x",
        "x is not healthy 100 s after its start; killing it",
        "x was ended by 9; restarting it in 2 s",
        "start x",
        "x has recovered",
    ]


@pytest.mark.parametrize("deaf", [False, True], ids=["ends", "deaf"])
def test_silent_process_is_ended_then_killed_then_started_again(deaf: bool) -> None:
    ill = lambda: Process(silent=(20.0, NEVER), deaf=deaf)  # noqa: E731
    topology = Topology({"x": [ill, Process]})
    said = topology.run(200.0)
    killed = ["x does not end within 15 s; killing it"] if deaf else []
    how = f"x was ended by {9 if deaf else 15}; restarting it in 1 s"
    assert said == ["start x", f"x {HUNG}", *killed, how, "start x", "x has recovered"]
    times = {text: time for time, text in topology.said}
    assert 50.0 <= times[f"x {HUNG}"] <= 62.0
    if deaf:
        assert times[killed[0]] - times[f"x {HUNG}"] == pytest.approx(15.0, abs=0.2)


@pytest.mark.parametrize(
    ("silent", "hung_after_s"),
    [((20.0, 48.0), 30.0), ((20.0, NEVER), 0.0)],
    ids=["a late response", "no limit"],
)
def test_process_goes_on_where_its_silence_is_no_fault(
    silent: tuple[float, float], hung_after_s: float
) -> None:
    launch = LAUNCH.model_copy(update={"hung_after_s": hung_after_s})
    topology = Topology({"x": [lambda: Process(silent=silent)]}, launch=launch)
    assert topology.run(150.0) == ["start x"]


def test_single_long_probe_is_no_silence() -> None:
    """The launcher itself may have been stopped for a while."""

    class Stopped(Process):
        async def is_well(self, *, timeout_s: float) -> bool:
            if 20.0 < self.age_s < 30.0:
                await asyncio.sleep(500.0)
                return False
            return True

    assert Topology({"x": [Stopped]}).run(600.0) == ["start x"]


def test_time_of_a_silence_is_not_counted_as_healthy() -> None:
    """A process that hangs at once after each start is started again ever later."""
    launch = LAUNCH.model_copy(update={"hung_after_s": 300.0})
    topology = Topology({"x": [lambda: Process(silent=(20.0, NEVER))]}, launch=launch)
    assert pauses(topology.run(1400.0)) == ["1 s", "2 s", "4 s"]


AFTER = {"encode-0": ("decode-0",)}
"""Two share a device, the decoder first; the front shares nothing."""


def test_neighbours_start_one_after_the_other_in_their_order() -> None:
    slow = lambda: Process(ready_s=60.0)  # noqa: E731
    topology = Topology({"encode-0": [slow], "decode-0": [slow], "front": [Process]}, AFTER)
    assert topology.run(50.0) == ["start decode-0", "start front"]
    assert topology.all["encode-0"].blocking() == ["decode-0"]
    topology = Topology({"encode-0": [slow], "decode-0": [slow], "front": [Process]}, AFTER)
    assert topology.run(150.0)[2:] == ["start encode-0"]
    assert topology.said[2][0] == pytest.approx(60.0, abs=0.7)
    assert {each.state for each in topology.all.values()} == {"up"}


def test_neighbours_that_died_together_start_again_one_at_a_time() -> None:
    first, second = (lambda: Process(dies_s=50.0)), (lambda: Process(dies_s=39.5))
    topology = Topology({"encode-0": [second, Process], "decode-0": [first, Process]}, AFTER)
    topology.run(100.0)
    starts = {text: time for time, text in topology.said if text.startswith("start")}
    assert abs(starts["start decode-0"] - starts["start encode-0"]) == pytest.approx(10.0, abs=0.7)


def test_start_waits_while_a_neighbour_is_ended() -> None:
    ill = lambda: Process(silent=(30.0, NEVER), deaf=True)  # noqa: E731
    dies = lambda: Process(dies_s=52.0)  # noqa: E731
    topology = Topology({"encode-0": [dies, Process], "decode-0": [ill, Process]}, AFTER)
    topology.run(150.0)
    times = {text: time for time, text in topology.said}
    asked = times[f"decode-0 {HUNG}"]
    assert asked < times["encode-0 died; restarting it in 1 s"] < asked + 15.0
    assert times["start encode-0"] >= asked + 15.0
    assert times["start decode-0"] >= times["start encode-0"] + 10.0

"""``epd-bench router``: every case, with all sides in turns."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd_portable.bench.router import stand
from epd_portable.bench.router.cases import CASES, Case, Values
from epd_portable.bench.router.faults import FAULTS
from epd_portable.bench.router.special import SPECIAL_CASES, NotMeasuredError
from epd_portable.bench.router.stage import CaseRecord, Effort, Stage, set_up
from epd_portable.bench.router.stand import Cores, Side
from epd_portable.errors import ConfigError, LaunchError, MeasurementError

ALL_CASES: dict[str, Case] = {case.name: case for case in (*CASES, *SPECIAL_CASES, FAULTS)}
PROXY = Side(name="proxy", kind="proxy")
DIRECT = Side(name="direct", kind="direct")
WARM_UP = 100
_START_S = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of one side.

    Attributes:
        case: Name of the case.
        side: Name of the side.
        values: What it yielded.
    """

    case: str
    side: str
    values: Values


@dataclass(kw_only=True, slots=True)
class CaseResults:
    """Everything that was measured.

    Attributes:
        cases: In the order of measuring.
        sides: All, routers first.
        turns: In the order of measuring.
        tallies: Of the measuring itself, by case and side.
        missing: Why a side has no figures of a case, by case and side: it has nothing of the sort.
        failed: The same, where something went wrong.
        revisions: Commit of each router, where it is known.
        cores: Who ran where.
    """

    cases: tuple[Case, ...]
    sides: tuple[Side, ...]
    cores: Cores
    turns: list[Turn] = field(default_factory=list)
    tallies: dict[tuple[str, str], CaseRecord] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    case: Case
    turn: int
    turns: int
    index: int
    seconds: float


class TimeLeft:
    """Tells how long is left, by how long what is done was meant to take.

    Args:
        planned_s: Time of each step, in their order.
        clock: Monotonic seconds.
    """

    def __init__(
        self, planned_s: Sequence[float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planned_s = list(planned_s)
        self._done = 0
        self._clock = clock
        self._begin_s = clock()

    def step_done(self) -> None:
        """Take one step off."""
        self._done += 1

    @property
    def left_s(self) -> float:
        """Seconds that the rest will take if it is as slow or fast as what is done."""
        done_s = sum(self._planned_s[: self._done])
        left_s = sum(self._planned_s[self._done :])
        return left_s * ((self._clock() - self._begin_s) / done_s if done_s else 1.0)

    def __str__(self) -> str:
        """Return it for a progress line."""
        left_s = self.left_s
        return f"{left_s / 60:.0f} min left" if left_s >= 90 else f"{left_s:.0f} s left"


def peers(*, proxy: bool) -> list[Side]:
    """Return what routers are compared with.

    Args:
        proxy: The stand-in of vLLM's example too.

    Raises:
        ConfigError: That needs what is not installed.
    """
    if not proxy:
        return [DIRECT]
    missing = [
        name for name in ("fastapi", "aiohttp", "uvicorn") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"the proxy needs {' and '.join(missing)}, which come with vLLM: install them, or "
            "leave it out by --no-proxy"
        )
    return [PROXY, DIRECT]


def read_sides(texts: Sequence[str]) -> list[Side]:
    """Return the routers to measure.

    Args:
        texts: ``NAME=PATH`` each; none is this package's own router.

    Raises:
        ConfigError: One is not of this form, or two have one name.
    """
    sides = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--side {text}: expected NAME=PATH, for example before=../old")
        if not os.path.isfile(os.path.join(path, "epd_portable/router/__init__.py")):
            raise ConfigError(
                f"--side {text}: there is no epd_portable/router in {path}: name the folder that "
                "holds epd_portable, for example another checkout"
            )
        sides.append(Side(name=name, kind="router", path=os.path.abspath(path)))
    names = [side.name for side in sides] + [PROXY.name, DIRECT.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--side: the name {twice[0]} is taken: give each side its own")
    return sides or [Side(name="router", kind="router", path=stand.OWN_PATH)]


def measure(
    cases: Sequence[Case],
    sides: Sequence[Side],
    effort: Effort,
    *,
    report: Callable[[str], None],
) -> CaseResults:
    """Measure every case with all sides in turns; one that fails does not end the others.

    Args:
        cases: What.
        sides: Whom; routers first.
        effort: How long.
        report: Gets progress lines, with the time that is left.

    Raises:
        LaunchError: A side cannot be started.
        MeasurementError: The measurement's own processes cannot.
    """
    cores = Cores.share(sorted(os.sched_getaffinity(0)))
    results = CaseResults(cases=tuple(cases), sides=tuple(sides), cores=cores)
    steps = [
        _Step(case=case, turn=turn, turns=turns, index=index, seconds=case.seconds(effort))
        for case in cases
        for turns in [1 if case.once else effort.rounds]
        for turn in range(turns)
        # Whoever goes first in one round goes last in the next.
        for index in _in_turn(len(sides), turn)
        if sides[index].kind in case.kinds
    ]
    left = TimeLeft([_START_S, *(step.seconds for step in steps)])
    report(f"starting {', '.join(side.name for side in sides)}; about {left}")
    with set_up(sides, effort, cores) as stage:
        for side in sides:
            if side.kind == "router":
                path = stand.imported_path(side, stage.folder)
                assert os.path.samefile(path, side.path), f"{side.name} took {path}"
                results.revisions[side.name] = stand.revision(side)
        left.step_done()
        for step in steps:
            turn = _take(stage, step, results)
            left.step_done()
            said = _said(step.case, turn.values) if turn else "not measured"
            report(
                f"{step.case.name}, {sides[step.index].name}, {step.turn + 1} of {step.turns}: "
                f"{said}; about {left}"
            )
        results.tallies.update(stage.tallies)
    return results


def _take(stage: Stage, step: _Step, results: CaseResults) -> Turn | None:
    """Take one turn; ``None`` if it yielded nothing, which the results explain."""
    measured = stage.sides[step.index]
    key = (step.case.name, measured.side.name)
    try:
        stage.tally = CaseRecord()
        stage.run(measured, stage.flow(measured, "warm-up", count=WARM_UP, connections=4))
        stage.tally = stage.tallies.setdefault(key, CaseRecord())
        values = step.case.measure(stage, measured)
    except NotMeasuredError as error:
        results.missing[key] = str(error)
        return None
    except (LaunchError, MeasurementError) as error:
        results.failed[key] = str(error)
        return None
    if measured.server is None:
        # Nobody is between the clients and the instance: there is no CPU time to count.
        clocks = {figure.key: figure.clock for figure in step.case.figures}
        values = {name: value for name, value in values.items() if clocks[name] != "CPU"}
    turn = Turn(case=step.case.name, side=measured.side.name, values=values)
    results.turns.append(turn)
    return turn


def _in_turn(count: int, turn: int) -> list[int]:
    """Return the places of all sides, forwards and backwards in turns."""
    places = list(range(count))
    return places if turn % 2 == 0 else places[::-1]


def _said(case: Case, values: Values) -> str:
    """Return the first figures of a turn."""
    shown = [
        f"{figure.what} {values[figure.key]:.3g}" for figure in case.figures if figure.key in values
    ]
    return "; ".join(shown[:2])

"""``epd-bench load``: every point, on all sides in turns, round by round."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from epd_portable.bench.load import watch
from epd_portable.bench.load.commands import Ask, ClientsDone, Command, Prepare, Send
from epd_portable.bench.load.figures import meets
from epd_portable.bench.load.plan import ROUNDS, LoadPlan, LoadPoint
from epd_portable.bench.load.processes import LineProcess
from epd_portable.bench.load.record import SideTurn, TracedTurn, records, refusal
from epd_portable.bench.load.search import Findings, GoodputSearch
from epd_portable.bench.load.sides import LoadSide
from epd_portable.bench.load.stages import request_stages
from epd_portable.bench.load.stand import Ground, StandingSide, stand_up, words_per_token
from epd_portable.bench.provenance import provenance
from epd_portable.bench.traces import handovers, read_events, since
from epd_portable.errors import MeasurementError

CLIENTS = "epd_portable.bench.load.clients"
AGAIN = 2
"""So often a refused round is measured again, with other requests, before the next one."""
ABOUT_RATES = 6
"""So many rates a search measures, more or less: many serve several sides."""
_PREPARE_S = 3.0


@dataclass(kw_only=True)
class LoadResults:
    """Everything that was measured.

    Attributes:
        turns: In the order of measuring; those of refused rounds too.
        words_per_token: With which texts were made; 0 before a side has told.
        tokens_known: Whether a side could tell.
        startup_s: Seconds from the start to readiness, by side; of the last start.
        found: Of each point whose rate was sought: what is known of each side.
        trace_dirs: Where sides wrote event traces.
    """

    turns: list[SideTurn] = field(default_factory=list)
    words_per_token: float = 0.0
    tokens_known: bool = True
    startup_s: dict[str, float] = field(default_factory=dict)
    found: dict[str, dict[str, Findings]] = field(default_factory=dict)
    trace_dirs: dict[str, Path] = field(default_factory=dict)

    def good(self, point: LoadPoint) -> list[list[SideTurn]]:
        """Return the rounds of a point that count, each with a turn of every side."""
        return [turns for turns in self._rounds(point).values() if not _refused(turns)]

    def refused(self) -> list[str]:
        """Say which rounds do not count, and why."""
        return [
            f"{turn.point}, round {turn.turn + 1}, {turn.side}: {turn.refused}"
            for turn in self.turns
            if turn.refused
        ]

    def next_turn(self, point: LoadPoint) -> int:
        """Return the number of a point's next round."""
        return max(self._rounds(point), default=-1) + 1

    def _rounds(self, point: LoadPoint) -> dict[int, list[SideTurn]]:
        found: dict[int, list[SideTurn]] = {}
        for turn in self.turns:
            if turn.point == point.key:
                found.setdefault(turn.turn, []).append(turn)
        return found


class LoadProgress:
    """Hears how far a measurement is; this one says nothing.

    Subclasses show it to people.
    """

    def say(self, line: str) -> None:
        """Take a line."""

    def expect(self, seconds: float) -> None:
        """Take how long everything that is known to come takes."""

    def done(self, seconds: float) -> None:
        """Take that something is done that was expected to take so long."""


class Measurement:
    """Asks sides in turns and keeps what comes of it.

    Args:
        plan: What to measure.
        sides: Whom.
        ground: What they stand on.
        together: All sides are up all the time; otherwise each is started for each of its turns.
        results: Those of earlier, which are not measured again.
        keep: Called after every round with all results.
        progress: Hears how far it is.
    """

    def __init__(
        self,
        plan: LoadPlan,
        sides: Sequence[LoadSide],
        ground: Ground,
        *,
        together: bool,
        results: LoadResults,
        keep: Callable[[LoadResults], None],
        progress: LoadProgress,
    ) -> None:
        self._plan = plan
        self._sides = sides
        self._ground = ground
        self._together = together
        self._results = results
        self._keep = keep
        self._progress = progress
        self._up: list[StandingSide] = []
        self._names = itertools.count(1)

    def run(self) -> None:
        """Measure what is missing.

        Raises:
            LaunchError: A side did not start.
            MeasurementError: Something is not as it must be.
        """
        plan = self._plan
        if plan.search is None and not any(self._missing().values()):
            return
        cores = frozenset(self._ground.allotment.rest)
        with ExitStack() as stack:
            self._clients = stack.enter_context(LineProcess(CLIENTS, cores, self._ground.folder))
            if self._together:
                self._up = stack.enter_context(stand_up(self._sides, self._ground))
                self._introduce(self._up)
            if plan.search is None:
                self._measure_points()
            else:
                self._search()

    def _measure_points(self) -> None:
        """Measure all points once, then again: what disturbs a while disturbs all of them."""
        missing = self._missing()
        one_s = {point: self._expected_s(point) for point in missing}
        self._progress.expect(sum(missing[point] * one_s[point] for point in missing))
        for index in range(max(missing.values())):
            due = [point for point, count in missing.items() if index < count]
            if self._together:
                for point in due:
                    self._round(point)
            else:
                self._round_of_all(due)

    def _missing(self) -> dict[LoadPoint, int]:
        """Return how many rounds of each point are still to be measured."""
        return {
            point: max(0, self._plan.rounds_of(point) - len(self._results.good(point)))
            for point in self._plan.points
        }

    def _search(self) -> None:
        search, plan = self._plan.search, self._plan
        assert search is not None
        for sought in plan.points:
            self._progress.expect(ABOUT_RATES * ROUNDS * self._expected_s(sought))
            finding = GoodputSearch.among(search, [side.name for side in self._sides])
            self._results.found[sought.key] = finding.sides
            while (rate := finding.next_rate()) is not None:
                again = finding.asked[rate] + 1
                finding.learn(rate, self._measure_rate(sought, rate, times=again))
            for side, findings in finding.sides.items():
                self._progress.say(
                    f"{side}: {sought.mix.about}: met {findings.met:g}/s, missed "
                    f"{findings.missed:g}/s, and above that met {findings.above}"
                )
        self._keep(self._results)

    def _measure_rate(self, sought: LoadPoint, rate: float, *, times: int) -> dict[str, bool]:
        """Measure a rate until there are so many times its rounds; return who met the limits."""
        plan = self._plan
        point = dataclasses.replace(sought, rate=rate)
        wanted = plan.rounds_of(point) * times
        while len(self._results.good(point)) < wanted:
            if not self._round(point):
                raise MeasurementError(self._results.refused()[-1])
        rounds = self._results.good(point)
        return {
            side.name: meets(
                [turn for turns in rounds for turn in turns if turn.side == side.name],
                plan.limits,
            )
            for side in self._sides
        }

    def _round(self, point: LoadPoint) -> bool:
        """Ask every side the same, in turns; return whether that counts, perhaps after all."""
        for again in range(AGAIN + 1):
            if again:
                self._progress.say(f"{point.key}: measured again, with other requests")
                self._progress.expect(self._expected_s(point))
            if not _refused(self._take_turns(point)):
                return True
        return False

    def _take_turns(self, point: LoadPoint) -> list[SideTurn]:
        number = self._results.next_turn(point)
        turns = []
        for side in self._order(number):
            with self._standing(side) as up:
                turns.append(self._turn(up, point, number))
            if turns[-1].refused:
                # What the others would do in this round does not count either.
                break
        self._results.turns += turns
        self._keep(self._results)
        return turns

    def _round_of_all(self, points: Sequence[LoadPoint]) -> None:
        """Take a round of several points with one start of each side."""
        numbers = {point: self._results.next_turn(point) for point in points}
        turns = []
        for side in self._order(min(numbers.values(), default=0)):
            with self._standing(side) as up:
                turns += [self._turn(up, point, number) for point, number in numbers.items()]
        self._results.turns += turns
        self._keep(self._results)

    def _order(self, number: int) -> list[LoadSide]:
        """Return the sides; whoever goes first in one round goes last in the next."""
        return list(self._sides) if number % 2 == 0 else list(reversed(self._sides))

    def _turn(self, up: StandingSide, point: LoadPoint, number: int) -> SideTurn:
        """Ask a side everything of a round."""
        asks = self._plan.asks(point, number, self._results.words_per_token)
        if not asks:
            raise MeasurementError(
                f"{point.key}: no request comes in {self._plan.seconds:g} s: raise --seconds"
            )
        self._tell(Prepare(asks=asks))
        turn = self._asked(up, point, number, asks)
        failed = sum(bool(each.problem) for each in turn.requests)
        self._progress.say(
            f"{point.key}, round {number + 1}, {up.side.name}: {len(asks)} requests, "
            f"{failed} failed, p99 sent {turn.late_p99_s * 1000:.1f} ms late"
            + (f"; refused: {turn.refused}" if turn.refused else "")
        )
        self._progress.done(self._expected_s(point) / len(self._sides))
        return turn

    def _asked(
        self, up: StandingSide, point: LoadPoint, number: int, asks: Sequence[Ask]
    ) -> SideTurn:
        plan = self._plan
        up.tidy()
        counted = watch.counted(up.parts)
        cpu_s = watch.cpu_s(up.parts)
        name = f"turn{next(self._names)}"
        done = self._tell(
            Send(
                name=name,
                urls=up.urls,
                model=up.model,
                concurrency=point.concurrency,
                timeout_s=plan.timeout_s,
            )
        )
        used = watch.used(watch.cpu_s(up.parts), cpu_s)
        watch.check_cores(up.parts)
        found = records(asks, done)
        return SideTurn(
            point=point.key,
            turn=number,
            side=up.side.name,
            requests=found,
            wall_s=done.wall_s,
            cpu_s=used,
            memory=watch.memory(up.parts),
            counted=watch.counted(up.parts).since(counted),
            client_cpu_s=done.cpu_s,
            distinct_pictures=len(
                {(each.seed, each.size) for ask in asks for each in ask.pictures}
            ),
            traced=_traced(up, asks, done, name),
            refused=refusal(
                found,
                client_cpu_s=done.cpu_s,
                wall_s=done.wall_s,
                max_late_s=plan.max_late_s,
                max_client_share=plan.max_client_share,
            ),
        )

    @contextmanager
    def _standing(self, side: LoadSide) -> Iterator[StandingSide]:
        if self._together:
            yield next(up for up in self._up if up.side == side)
            return
        with stand_up([side], self._ground) as up:
            self._introduce(up)
            yield up[0]

    def _introduce(self, up: Sequence[StandingSide]) -> None:
        """Learn of sides that have come up what only they know, and warm them up."""
        results, plan = self._results, self._plan
        for each in up:
            results.startup_s[each.side.name] = each.startup_s
            if each.trace_dir is not None:
                results.trace_dirs[each.side.name] = each.trace_dir
        told, known = words_per_token(up[0])
        if results.words_per_token and results.words_per_token != told:
            raise MeasurementError(
                f"a token is {told} words here and was {results.words_per_token} in the rounds "
                "that are kept: it is another model; name another --json"
            )
        results.words_per_token, results.tokens_known = told, known
        if not plan.warm_up:
            return
        for number, point in enumerate(plan.points):
            self._progress.say(f"warm-up: {point.key}")
            asks = self._warm_up_asks(point, number)
            self._tell(Prepare(asks=asks))
            for each in up:
                done = self._tell(
                    Send(
                        name="warm-up",
                        urls=each.urls,
                        model=each.model,
                        concurrency=1,
                        timeout_s=plan.timeout_s,
                    )
                )
                problems = [answer.problem for answer in done.answers if answer.problem]
                if problems:
                    raise MeasurementError(f"{each.side.name}, at its warm-up: {problems[0]}")

    def _warm_up_asks(self, point: LoadPoint, number: int) -> tuple[Ask, ...]:
        """Return requests of each kind that a point has, for each address of a side."""
        plan = self._plan
        whole = plan.asks(_with_rate(point), -1 - number, self._results.words_per_token)
        most = plan.warm_up * max(len(side.urls) or side.count or 1 for side in self._sides)
        kinds = dict.fromkeys(ask.kind for ask in whole)
        return tuple(
            ask for kind in kinds for ask in [each for each in whole if each.kind == kind][:most]
        )

    def _expected_s(self, point: LoadPoint) -> float:
        return len(self._sides) * (self._plan.expected_s(point) + _PREPARE_S)

    def _tell(self, command: Command) -> ClientsDone:
        self._clients.tell(msgspec.json.encode(command))
        return self._clients.hear(ClientsDone)


def _traced(
    up: StandingSide, asks: Sequence[Ask], done: ClientsDone, name: str
) -> TracedTurn | None:
    """Return what a turn's event traces say; ``None`` if the side writes none."""
    if up.trace_dir is None:
        return None
    events = since(read_events(up.trace_dir), done.begin_s)
    pictures = {(each.seed, each.size) for ask in asks for each in ask.pictures}
    return TracedTurn(
        stages=request_stages(events, asks, done.answers, turn_name=name, begin_s=done.begin_s),
        handovers=tuple(handovers(events)),
        provenance=provenance(events, asked=len(pictures)),
    )


def _refused(turns: Sequence[SideTurn]) -> bool:
    return any(turn.refused for turn in turns)


def _with_rate(point: LoadPoint) -> LoadPoint:
    """Return a point with a rate, also where that is sought."""
    known = point.rate or point.concurrency or point.replay
    return point if known else dataclasses.replace(point, rate=1.0)

"""Measures every point on all sides in turns, round by round."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from epd_portable.bench import console
from epd_portable.bench.load import usage
from epd_portable.bench.load.clients import Answers, LoadAnswer, Order, prepared
from epd_portable.bench.load.plan import LoadPoint, LoadRequest
from epd_portable.bench.load.servers import RunningSide, start_side
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.sides import LoadSide
from epd_portable.bench.load.turns import Turn, make_turn
from epd_portable.errors import MeasurementError

ATTEMPTS = 3
"""A point has at most so many times its rounds, refused ones included."""
WARM_UP = 2
"""Requests of each kind at each address before all."""
_PROBE_WORDS = 500
_OTHER_S = 8.0
"""About how long a turn takes beyond its window."""


Rounds = dict[str, dict[str, list[Turn]]]
"""Turns by point and side, one of each side for every round."""


@dataclass(kw_only=True)
class LoadResults:
    """Everything that was measured.

    Attributes:
        turns: In the order of measuring; those of refused rounds too.
        words_per_token: By which lengths of texts were chosen.
    """

    turns: list[Turn] = field(default_factory=list)
    words_per_token: float = 0.0

    def good_rounds(self) -> Rounds:
        """Return the turns of rounds that count: those in which no side was refused."""
        refused = {(turn.point, turn.round) for turn in self.turns if turn.refused}
        found: Rounds = {}
        for turn in self.turns:
            if (turn.point, turn.round) not in refused:
                found.setdefault(turn.point, {}).setdefault(turn.side, []).append(turn)
        return found

    def count(self, point: LoadPoint) -> int:
        """Return how many rounds of a point count."""
        return min(map(len, self.good_rounds().get(point.key, {}).values()), default=0)

    def refused(self) -> list[str]:
        """Return why rounds do not count."""
        return [
            f"{turn.point}, round {turn.round + 1}, {turn.side}: {turn.refused}"
            for turn in self.turns
            if turn.refused
        ]


class Measurement:
    """Asks sides in turns; `keep` is called after every round with all results so far."""

    def __init__(self, setting: LoadSetting, keep: Callable[[LoadResults], None]) -> None:
        self._setting = setting
        self._plan = setting.plan
        self._keep = keep
        self._up: dict[str, RunningSide] = {}
        self.results = LoadResults()

    def run(self) -> LoadResults:
        """Measure all points once, then again: what disturbs a while disturbs all of them.

        Raises:
            LaunchError: A side did not start.
            MeasurementError: A side does not answer, or its processes are not where they should be.
        """
        plan, sides = self._plan, self._setting.sides
        attempts: Counter[LoadPoint] = Counter()
        with ExitStack() as stack:
            if self._setting.together:
                for side in sides:
                    self._up[side.name] = stack.enter_context(start_side(side, self._setting))
                for running in self._up.values():
                    self._warm_up(running)
            while due := [
                point
                for point in plan.points
                if self.results.count(point) < plan.rounds
                and attempts[point] < ATTEMPTS * plan.rounds
            ]:
                left = sum(plan.rounds - self.results.count(point) for point in due)
                minutes = left * len(sides) * (plan.seconds + _OTHER_S) / 60
                console.progress(f"about {minutes:.0f} min left")
                # Sides that are started for a turn take it for all points at once.
                for points in [[point] for point in due] if self._setting.together else [due]:
                    self._measure_round({point: attempts[point] for point in points})
                    attempts.update(points)
                    self._keep(self.results)
        return self.results

    def _measure_round(self, numbers: dict[LoadPoint, int]) -> None:
        # The first of one round is the last of the next.
        for side in self._setting.sides[:: -1 if min(numbers.values()) % 2 else 1]:
            with self._running(side) as running:
                turns = [self._measure_turn(running, *each) for each in numbers.items()]
            self.results.turns += turns
            if all(turn.refused for turn in turns):
                # What the others would do in this round does not count either.
                break

    def _measure_turn(self, running: RunningSide, point: LoadPoint, number: int) -> Turn:
        requests = self._plan.requests(point, number, self.results.words_per_token)
        if not requests:
            raise MeasurementError(
                f"{point.key}: no request comes in {self._plan.seconds:g} s: raise --seconds"
            )
        running.clear_store()
        parts = running.parts
        with self._prepared(running, requests, point.clients or point.prompts) as send:
            counted, cpu_s = usage.read_counters(parts), usage.read_cpu_s(parts)
            done = send()
            cpu_s = usage.cpu_s_since(usage.read_cpu_s(parts), cpu_s)
        usage.check_cores(parts)
        turn = make_turn(
            requests,
            done,
            self._plan,
            point=point.key,
            round=number,
            side=running.name,
            cpu_s=cpu_s,
            memory_bytes=usage.read_memory_bytes(parts),
            counted=usage.counted_since(usage.read_counters(parts), counted),
        )
        console.progress(
            f"{point.key}, round {number + 1}, {turn.side}: {len(requests)} requests, "
            f"{turn.failed} failed, p99 sent {turn.late_s['p99'] * 1000:.1f} ms late"
            + (f"; refused: {turn.refused}" if turn.refused else "")
        )
        return turn

    @contextlib.contextmanager
    def _running(self, side: LoadSide) -> Iterator[RunningSide]:
        if self._setting.together:
            yield self._up[side.name]
            return
        with start_side(side, self._setting) as running:
            self._warm_up(running)
            yield running

    def _warm_up(self, running: RunningSide) -> None:
        """Send requests that do not count; learn from the first ones how long a token is."""
        if not self.results.words_per_token:
            probes = [
                LoadRequest(at_s=0.0, texts=(f"probe {words}",), words=words, output_tokens=2)
                for words in (1, 1 + _PROBE_WORDS)
            ]
            short, long = self._send_one_by_one(running, probes)
            words = _PROBE_WORDS / max(1, long.prompt_tokens - short.prompt_tokens)
            self.results.words_per_token = round(words, 4)
        for number, point in enumerate(self._plan.points):
            console.progress(f"{running.name}: warm-up: {point.key}")
            # Of a window that has a request of each kind, at whatever rate.
            plan = dataclasses.replace(self._plan, seconds=200 / point.rate)
            made_up = point.model_copy(update={"file": ""})
            whole = plan.requests(made_up, -1 - number, self.results.words_per_token)
            count = WARM_UP * len(running.urls)
            kinds = ([one for one in whole if one.kind == kind] for kind in ("text", "pictures"))
            self._send_one_by_one(running, [one for kind in kinds for one in kind[:count]])

    def _send_one_by_one(
        self, running: RunningSide, requests: Sequence[LoadRequest]
    ) -> Sequence[LoadAnswer]:
        with self._prepared(running, requests, 1) as send:
            answers = send().answers
        problem = next((answer.problem for answer in answers if answer.problem), "")
        if problem:
            raise MeasurementError(f"{running.name}, at its warm-up: {problem}")
        return answers

    def _prepared(
        self, running: RunningSide, requests: Sequence[LoadRequest], clients: int
    ) -> contextlib.AbstractContextManager[Callable[[], Answers]]:
        order = Order(
            requests=tuple(requests), urls=running.urls, model=running.model, clients=clients
        )
        cores = frozenset(self._setting.allotment.rest)
        return prepared(order, cores=cores, folder=self._setting.folder)

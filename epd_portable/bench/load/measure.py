"""Measures every point on all sides in turns, round by round."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from epd_portable.bench import console
from epd_portable.bench.load import usage
from epd_portable.bench.load.clients import LoadAnswer, LoadClients
from epd_portable.bench.load.plan import LoadPoint, LoadRequest
from epd_portable.bench.load.servers import RunningSide, start_side
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.turns import Turn, make_turn
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.run.process import on_cores

ATTEMPTS = 3
"""A point has at most so many times its rounds, refused ones included."""
WARM_UP = 2
"""Requests of each kind at each address before all."""
_PROBE_WORDS = 500

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
        self.results = LoadResults()

    def run(self) -> LoadResults:
        """Measure all points once, then again: what disturbs a while disturbs all of them.

        Every side is started for its turn of a round, so that none takes memory or cores from
        another, and measured at all points; after the rounds at those that had one refused.

        Raises:
            LaunchError: A side did not start.
            MeasurementError: A side does not answer, or its processes are not where they should be.
        """
        for number in range(ATTEMPTS * self._plan.rounds):
            due = self._due(number)
            if not due:
                break
            # The first of one round is the last of the next.
            for side in self._setting.sides[:: -1 if number % 2 else 1]:
                console.progress(f"round {number + 1}: starting {side.name}")
                with start_side(side, self._setting) as running:
                    self._warm_up(running, due, number)
                    self.results.turns += [
                        self._measure_turn(running, point, number, requests)
                        for point, requests in due.items()
                    ]
            self._keep(self.results)
        return self.results

    def _due(self, number: int) -> dict[LoadPoint, Sequence[LoadRequest]]:
        """Return the requests of a round, of points that lack one and whose files have the lines.

        Raises:
            MeasurementError: A point has none.
        """
        found: dict[LoadPoint, Sequence[LoadRequest]] = {}
        for point in self._plan.points:
            if self.results.count(point) < self._plan.rounds:
                with contextlib.suppress(ConfigError):
                    found[point] = self._plan.requests(point, number)
        for point, requests in found.items():
            if not requests:
                raise MeasurementError(
                    f"{point.key}: no request comes in {self._plan.seconds:g} s: raise --seconds"
                )
        return found

    def _measure_turn(
        self, running: RunningSide, point: LoadPoint, number: int, requests: Sequence[LoadRequest]
    ) -> Turn:
        parts = running.parts
        clients = self._clients(running, requests, point.clients or point.prompts)
        counted, cpu_s = usage.read_counters(parts), usage.read_cpu_s(parts)
        with on_cores(self._setting.allotment.rest):
            done = clients.send()
        cpu_s = usage.cpu_s_since(usage.read_cpu_s(parts), cpu_s)
        turn = make_turn(
            requests,
            done,
            self._plan,
            point=point.key,
            round=number,
            side=running.name,
            cpu_s=cpu_s,
            memory_bytes=usage.read_memory_bytes(parts),
            counted=usage.read_counters(parts) - counted,
        )
        console.progress(
            f"{point.key}, round {number + 1}, {turn.side}: {len(requests)} requests, "
            f"{turn.failed} failed, p99 sent {turn.late_s['p99'] * 1000:.1f} ms late"
            + (f"; refused: {turn.refused}" if turn.refused else "")
        )
        return turn

    def _warm_up(self, running: RunningSide, points: Iterable[LoadPoint], number: int) -> None:
        """Send requests that do not count; learn from the first ones how long a token is."""
        if not self.results.words_per_token:
            probes = [
                LoadRequest(at_s=0.0, text=f"probe {words}", text_tokens=words, output_tokens=2)
                for words in (1, 1 + _PROBE_WORDS)
            ]
            short, long = self._send_one_by_one(running, probes)
            words = _PROBE_WORDS / max(1, long.prompt_tokens - short.prompt_tokens)
            self.results.words_per_token = round(words, 4)
        count = WARM_UP * len(running.urls)
        requests: list[LoadRequest] = []
        for point in points:
            # Of a window that has a request of each kind, at whatever rate.
            plan = dataclasses.replace(self._plan, seconds=200 / point.rate)
            made_up = point.model_copy(update={"file": ""})
            whole = plan.requests(made_up, -1 - number)
            for kind in ("text", "pictures"):
                requests += [each for each in whole if each.kind == kind][:count]
        console.progress(f"{running.name}: warm-up")
        self._send_one_by_one(running, requests)

    def _send_one_by_one(
        self, running: RunningSide, requests: Sequence[LoadRequest]
    ) -> Sequence[LoadAnswer]:
        answers = self._clients(running, requests, 1).send().answers
        problem = next((answer.problem for answer in answers if answer.problem), "")
        if problem:
            raise MeasurementError(f"{running.name}, at its warm-up: {problem}")
        return answers

    def _clients(
        self, running: RunningSide, requests: Sequence[LoadRequest], clients: int
    ) -> LoadClients:
        return LoadClients(
            requests,
            running.urls,
            running.model,
            words_per_token=self.results.words_per_token or 1.0,
            clients=clients,
        )

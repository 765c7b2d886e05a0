"""``epd-bench step``: what a prefill+decode instance's engine pays for this package in every step.

A real `ItemShell`, called as vLLM's scheduler calls it: it queries every request that decodes,
in every step; requests that wait for their items sleep and are not queried. Nothing is computed,
so what is measured is the package's own work. In turns with it, the same loop with a query that
does nothing: what the engine pays for a query at all.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from numpy import quantile

from epd_benchmarks import report
from epd_benchmarks.stand_in import DTYPE, WIDTH, StandInRequest, new_secret
from epd_portable.config.instance import InstanceConfig
from epd_portable.demo.servers import free_port
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import ExpectedTransfer, PrefillParams

ITEM_TOKENS = 4
_TIMEOUT_S = 3600.0
_WARM_UP = 20
_TENSOR = TensorSpec(shape=(ITEM_TOKENS, WIDTH), dtype=DTYPE)


@dataclass(kw_only=True, slots=True)
class StepCase:
    """The state of an engine, and what its steps take.

    Attributes:
        decoding: Requests that generate, past all their items.
        items: Items in the prompt of each of them.
        waiting: Requests that wait for an item which an encoder is to deliver.
        step_s: Of each step the seconds of the package's work.
        asking_s: Of each step the seconds of as many questions that do nothing.
    """

    decoding: int
    items: int
    waiting: int
    step_s: list[float] = field(default_factory=list)
    asking_s: list[float] = field(default_factory=list)


def measure(steps: int) -> list[StepCase]:
    """Measure so many steps of every case, after a few that are not measured."""
    combinations = itertools.product((1, 32), (0, 100, 1000))
    cases = [StepCase(decoding=256, items=i, waiting=w) for i, w in combinations]
    for case in cases:
        report.progress(
            f"{case.decoding} requests decode, {case.items} items each; {case.waiting} wait: "
            f"{steps} steps"
        )
        with new_secret() as secret_file, _engine(case, secret_file) as engine:
            for number in range(-_WARM_UP, steps):
                step_s, asking_s = engine.step()
                if number >= 0:
                    case.step_s.append(step_s)
                    case.asking_s.append(asking_s)
    return cases


def make_report(cases: Sequence[StepCase]) -> report.Document:
    """Return the page of a measurement."""
    return report.make_report(
        "The package's work in a step of a prefill+decode engine",
        notes=(
            "A receiver with a real pool and control channel, no engine and no model; the loop "
            "that queries is Python's, as vLLM's is.",
            "Ratio: that work by as many calls of a function that only returns true.",
        ),
        tables={"Times in µs": [*map(_row, cases)]},
        samples=[dataclasses.asdict(case) for case in cases],
    )


def _row(case: StepCase) -> dict[str, str]:
    step_s, asking_s = quantile(case.step_s, 0.5), quantile(case.asking_s, 0.5)
    return {
        "decoding × items": f"{case.decoding} × {case.items}",
        "waiting": str(case.waiting),
        "ratio": f"{step_s / asking_s:.2f}",
        "p50": f"{step_s * 1e6:.1f}",
        "p90": f"{quantile(case.step_s, 0.9) * 1e6:.1f}",
        "only asking, p50": f"{asking_s * 1e6:.1f}",
    }


@dataclass
class _Engine:
    receiver: ItemShell
    prefill: PrefillRequests
    running: list[StandInRequest] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)

    def add(self, name: str, items: int, *, by_transfer: bool) -> StandInRequest:
        names = [f"{name}-{index}" for index in range(items)]
        request = StandInRequest(name, names, _TENSOR)
        prompt = request.prompt()
        expected = (ExpectedTransfer(transfer_id=each, item_uuid=each) for each in names)
        params = PrefillParams(transfers=tuple(expected)) if by_transfer else None
        self.prefill.arrived(name, prompt, params)
        return request

    def compute(self, request: StandInRequest) -> None:
        """Encode the items of a request here and compute past them, as in a step."""
        prefill, cache = self.prefill, self.receiver.cache
        for index in range(len(request.mm_features)):
            assert prefill.may_schedule(request.request_id, index * ITEM_TOKENS)
            cache.allocate(request, index)
            cache.free_encoder_input(request, index)
        request.num_computed_tokens = len(request.mm_features) * ITEM_TOKENS
        prefill.may_schedule(request.request_id, request.num_computed_tokens)
        self.running.append(request)

    def step(self) -> tuple[float, float]:
        """Do what a step makes the package do, and as many idle queries."""
        receiver, prefill = self.receiver, self.prefill
        incomplete = receiver.cache.incomplete

        def may_schedule(request: StandInRequest, num_computed_tokens: int) -> bool:
            # As `PDScheduler.ensure_cache_available`.
            return request.request_id not in incomplete or prefill.may_schedule(
                request.request_id, num_computed_tokens
            )

        begin_s = time.perf_counter()
        with receiver.lock:
            receiver.before_step()
            prefill.find_stalled(computed=True, starts=True)
            for request in self.running:
                may_schedule(request, request.num_computed_tokens)
            for request_id in self.asleep.intersection(prefill.take_woken(is_busy=True)):
                self.asleep.discard(request_id)
                prefill.may_schedule(request_id, 0, running=False)
            prefill.take_forgotten(self.asleep)
            self.asleep.update(prefill.take_sleepers())
            receiver.orders.take_orders(receiver.cache.get_freed_mm_hashes(), computes=True)
        with receiver.lock:
            receiver.step_done()
            prefill.take_unavailable()
        step_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        for request in self.running:
            _yes(request, request.num_computed_tokens)
        return step_s, time.perf_counter() - begin_s


def _yes(request: StandInRequest, num_computed_tokens: int) -> bool:
    return True


@contextmanager
def _engine(case: StepCase, secret_file: str) -> Iterator[_Engine]:
    config = InstanceConfig(
        instance="step",
        platform="cpu",
        path="shm",
        wait_timeout_s=_TIMEOUT_S,
        control_address=f"tcp://127.0.0.1:{free_port()}",
        pool=f"epd-bench-{os.getpid()}-step",
        pool_bytes=64 * _TENSOR.nbytes,
        can_encode=True,
        secret_file=secret_file,
    )
    receiver = ItemShell(config, fingerprint="step", cache_size=64 * ITEM_TOKENS)
    receiver.listen()
    try:
        prefill = PrefillRequests(config, receiver, min_start_tokens=256)
        engine = _Engine(receiver, prefill)
        with receiver.lock:
            for number in range(case.decoding):
                name = f"decoding-{number}"
                engine.compute(engine.add(name, case.items, by_transfer=False))
            for number in range(case.waiting):
                request = engine.add(f"waiting-{number}", 1, by_transfer=True)
                prefill.may_schedule(request.request_id, 0, running=False)
            engine.asleep.update(prefill.take_sleepers())
        yield engine
    finally:
        receiver.close()

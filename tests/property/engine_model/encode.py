"""An encode instance over vLLM's real scheduler, and all that can happen to it, by a seed.

``python -m tests.property.engine_model.encode --seeds 0:5000`` tries many seeds, and prints the
last events of those that fail.

What is real: vLLM's ``Scheduler`` as `make_scheduler` makes it (an encode instance refuses
``AsyncScheduler``), the connector's half in it, and the encode side of the protocol
(`ProducerSession`). What is modelled: the worker's memory, which remembers of what weights an
output is; consumers, of which some are slow, stand still for a while or are dead; the clock; and
faults of copies, and items for which there is no memory.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector.producer import ProducerSession
from epd_portable.demo import MODEL_DIR
from epd_portable.launch.plan.engine import CONNECTOR, ROLE_ARGS, SCHEDULER_CLS
from epd_portable.vllm_plugin.reports import Kind, to_names
from epd_portable.wire.descriptors import SlotDescriptor
from epd_portable.wire.messages import (
    Abort,
    Announce,
    AnyMessage,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)
from epd_portable.wire.params import EncodeParams, EncodeTransfer, to_params
from tests.keyring import secret, secret_file
from tests.unit.builders import Clock, peer

TIMEOUT_S, LEASE_S = 6.0, 2.0
ENOUGH_S = 1.0
"""Whoever asks for no more than its share has waited for nobody else for so long at most."""


class Violation(AssertionError):
    """Something that must never happen."""


@dataclass(frozen=True)
class Shape:
    """How large an instance is, and what is asked of it.

    Attributes:
        cache: Embeddings that its encoder cache holds.
        embeddings: That a step computes.
        tokens: Of prompts that a step passes.
        seats: Requests that a step runs.
        sizes: Embeddings of each item, by name.
        host: Embeddings that fit into host memory.
        device: What is queued is computed later.
        consumers: How each behaves, by address.
        fair: Nobody asks for an item larger than a share, and nothing but shares limits a step.
        requests: That come in all.
    """

    cache: int
    embeddings: int
    tokens: int
    seats: int
    sizes: dict[str, int]
    host: int
    device: bool
    consumers: dict[str, str]
    fair: bool
    requests: int

    @classmethod
    def drawn(cls, rng: Random) -> Shape:
        """Draw one."""
        fair = rng.random() < 0.4
        behaviours = [
            "healthy",
            *rng.choices(("healthy", "slow", "pauses", "dead", "refuses"), k=3),
        ]
        number = rng.randint(2 if fair else 1, 4)
        largest = rng.randint(2, 8)
        cache = largest * rng.randint(number, 4 * number) if fair else rng.randint(largest, 32)
        return cls(
            cache=cache,
            embeddings=10_000 if fair else rng.randint(largest, 32),
            tokens=10_000 if fair else rng.randint(largest + 2, 48),
            seats=256 if fair else rng.randint(1, 8),
            sizes={name: rng.randint(1, largest) for name in "abcdefghijklmnop"},
            host=rng.choice((0, 0, 10, 40, 200)),
            device=rng.random() < 0.4,
            consumers={f"tcp://pd-{n}": behaviours[n] for n in range(number)},
            fair=fair,
            requests=rng.randint(10, 40),
        )


@functools.cache
def _base() -> tuple[Any, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.structured_output import StructuredOutputManager

    instance = InstanceConfig(instance="encode-0", platform="cpu", secret_file=secret_file())
    config = EngineArgs(
        model=str(MODEL_DIR),
        max_model_len=4096,
        dtype="float32",
        enforce_eager=True,
        limit_mm_per_prompt={"video": 0},
        scheduler_cls=SCHEDULER_CLS,
        ec_transfer_config={
            **CONNECTOR,
            "ec_role": "ec_producer",
            "ec_connector_extra_config": instance.model_dump(),
        },
        **ROLE_ARGS["encode"],
    ).create_engine_config()
    # As the engine core does for a model without KV cache.
    config.scheduler_config.enable_chunked_prefill = False
    config.cache_config.num_gpu_blocks = 1
    return config, StructuredOutputManager(config)


def _config(shape: Shape) -> Any:
    config = copy.copy(_base()[0])
    for name in ("scheduler_config", "ec_transfer_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    config.scheduler_config.max_num_seqs = shape.seats
    config.scheduler_config.max_num_batched_tokens = shape.tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    width = int(config.model_config.get_inputs_embeds_size())
    config.ec_transfer_config.ec_connector_extra_config = {
        **config.ec_transfer_config.ec_connector_extra_config,
        "platform": "npu" if shape.device else "cpu",
        "host_cache_bytes": shape.host * width * 4,
        "wait_timeout_s": TIMEOUT_S,
        "lease_s": LEASE_S,
    }
    return config


@contextmanager
def _seams(shape: Shape, clock: Clock) -> Iterator[None]:
    """Let the scheduler have the model's clock, and sizes that vLLM would ask the model for."""
    from vllm.v1.core.sched import scheduler as vllm_scheduler

    from epd_portable.vllm_plugin import agreement, encoder_scheduler, exposition

    budget = SimpleNamespace(
        encoder_compute_budget=shape.embeddings, encoder_cache_size=shape.cache
    )
    with (
        mock.patch.object(vllm_scheduler, "MultiModalBudget", lambda *args: budget),
        mock.patch.object(exposition, "publish", lambda: None),
        mock.patch.object(agreement, "fingerprint", lambda config: "same"),
        mock.patch.object(encoder_scheduler, "time", SimpleNamespace(monotonic=clock)),
    ):
        yield


@dataclass
class Worker:
    """What an encode worker holds: outputs by name, each as the number of its weights."""

    clock: Clock
    rng: Random
    faults: bool
    weights: int = 0
    cache: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int | None] = field(default_factory=dict)
    """In host memory; ``None`` for one that could not be made."""
    wanted: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    outputs: dict[str, int] = field(default_factory=dict)
    """Kept for transfers."""
    users: Counter[str] = field(default_factory=Counter)
    unmade: list[str] = field(default_factory=list)
    """Copies that turn out to be lost after a while."""
    told_lost: set[str] = field(default_factory=set)
    told_missing: set[str] = field(default_factory=set)
    """To be told with the next step, as are copies that are lost."""
    told: set[str] = field(default_factory=set)
    """Items of which the scheduler knows that their copies, or they, are not there."""
    not_encoded: Counter[str] = field(default_factory=Counter)
    """How often there was no memory for an item."""
    ended: set[str] = field(default_factory=set)
    computed: int = 0

    def __post_init__(self) -> None:
        self.session = ProducerSession(peer("encode-0"), wait_timeout_s=TIMEOUT_S)

    def execute(self, planned: Any, encoded: list[str]) -> None:
        """Do what a step says, as `EncodeWorker` and vLLM's runner do."""
        metadata = planned.ec_connector_metadata
        self.missing.difference_update(metadata.copies.dropped)
        self.told.difference_update(metadata.copies.dropped)
        for name in metadata.copies.restored:
            if name not in self.copies:
                raise Violation(f"{name} is restored, and no copy of it was kept")
            output = self.copies[name]
            if name in self.told:
                raise Violation(f"{name} is restored, and its copy was told to be lost")
            if output is None or (self.faults and self.rng.random() < 0.1):
                self.missing.add(name)
                self.told_missing.add(name)
            elif output != self.weights:
                raise Violation(f"{name} is restored from a copy of other weights")
            else:
                self.missing.discard(name)
                self.cache[name] = output
        for name in metadata.copies.dropped:
            self.copies.pop(name, None)
            self.wanted.discard(name)
        self.wanted.update(metadata.copies.kept)
        for order in metadata.orders:
            name = order.mm_hash
            there = name in self.cache
            if name in self.missing and name in self.told:
                raise Violation(f"{order.transfer_id}: {name} was told not to be there")
            if not (there or name in self.missing or name in encoded):
                raise Violation(f"{order.transfer_id}: {name} is to be sent, and is not there")
            self.users[name] += 1
            if there:
                self._keep(name)
            ready = there or name in self.missing or name in self.outputs
            self.session.submit(order, ready=ready, now=self.clock())
        for name in planned.free_encoder_mm_hashes:
            self.cache.pop(name, None)
        short = self.faults and self.rng.random() < 0.1
        for name in encoded:
            if short and self.rng.random() < 0.7:
                self.missing.add(name)
                self.told_missing.add(name)
                self.session.output_ready(name)  # Which fails when the consumer waits.
                self.not_encoded[name] += 1
                continue
            self.cache[name] = self.weights
            self.missing.discard(name)
            if self.users[name]:
                self._keep(name)
                self.session.output_ready(name)
            if name in self.wanted:
                self.wanted.discard(name)
                self.copies[name] = self.weights
                if self.faults and self.rng.random() < 0.2:
                    self.copies[name] = None
                    self.unmade.append(name)
        self.computed = max(self.computed, metadata.step)

    def forget(self) -> None:
        """Everything: the weights have changed."""
        self.cache.clear()
        self.weights += 1

    def poll(self) -> list[tuple[str, AnyMessage]]:
        """Let transfers go on; return what is said to consumers."""
        if self.unmade and self.rng.random() < 0.1:
            self.told_lost.add(self.unmade.pop(0))
        actions = self.session.poll(self.clock())
        for write in actions.writes:
            if write.mm_hash in self.outputs and self.rng.random() > 0.02 * self.faults:
                self.session.write_done(write.transfer_id, self.clock())
            else:
                self.session.write_failed(write.transfer_id, "a fault", self.clock())
        more = self.session.take_actions()
        for finished in actions.finished + more.finished:
            self.ended.add(finished.transfer_id)
            self.users[finished.mm_hash] -= 1
            if not self.users[finished.mm_hash]:
                del self.users[finished.mm_hash]
                self.outputs.pop(finished.mm_hash, None)
        return actions.messages + more.messages

    def _keep(self, name: str) -> None:
        if self.cache[name] != self.weights:
            raise Violation(f"{name} is sent as other weights made it")
        self.outputs.setdefault(name, self.cache[name])


class Consumer:
    """A PD instance as an encode instance sees it."""

    def __init__(self, address: str, behaviour: str, rng: Random, clock: Clock) -> None:
        self.address, self._behaviour, self._rng, self._clock = address, behaviour, rng, clock
        self._answers: list[tuple[float, AnyMessage]] = []
        self._generation = 0
        self._until_s = 0.0

    @property
    def is_healthy(self) -> bool:
        return self._behaviour == "healthy"

    def hear(self, message: AnyMessage) -> None:
        rng, now = self._rng, self._clock()
        if self._behaviour == "dead" or not isinstance(message, Announce | Written):
            return
        delay_s = {"slow": rng.uniform(0.5, 3.0), "pauses": 0.05}.get(self._behaviour, 0.02)
        if self._behaviour == "pauses" and rng.random() < 0.1:
            self._until_s = now + rng.uniform(1.0, 2 * TIMEOUT_S)
        at_s = max(now + delay_s, self._until_s)
        self._answers.append((at_s, self._answer(message)))
        if rng.random() < 0.05:
            self._answers.append((at_s + 0.1, self._answers[-1][1]))  # It comes twice.

    def said(self) -> list[AnyMessage]:
        now = self._clock()
        due = [message for at_s, message in self._answers if at_s <= now]
        self._answers = [each for each in self._answers if each[0] > now]
        return due

    def _answer(self, message: Announce | Written) -> AnyMessage:
        names = {"transfer_id": message.transfer_id, "attempt": message.attempt}
        if isinstance(message, Written):
            return Injected(**names)
        if self._behaviour == "refuses":
            refusals = (
                NotNeeded(**names),
                Abort(**names, reason="not wanted"),
                Nack(**names, code=NackCode.UNEXPECTED, detail="another item"),
            )
            return self._rng.choice(refusals)
        if not self.is_healthy and self._rng.random() < 0.3:
            return Later(**names)
        self._generation += 1
        slot = SlotDescriptor(
            pool="pool", offset=0, nbytes=message.tensor.nbytes, generation=self._generation
        )
        return Grant(**names, slot=slot, path="shm", address="", lease_s=LEASE_S)


@dataclass
class Asked:
    """A request from its arrival to its end."""

    request: Any
    names: list[str]
    consumers: tuple[str, ...]
    arrived_s: float
    steps: int = 0
    """In which it was scheduled."""
    waits_since_s: float | None = None
    """Since when nothing but other consumers can hold it up."""


class World:
    """A run of one seed."""

    def __init__(self, seed: int) -> None:
        from vllm.v1.kv_cache_interface import KVCacheConfig

        from epd_portable.vllm_plugin.scheduler import make_scheduler

        self.rng = Random(seed)
        self.shape = shape = Shape.drawn(self.rng)
        self.clock = Clock()
        self.trace: deque[str] = deque(maxlen=60)
        self.trace.append(repr(shape))
        with _seams(shape, self.clock):
            self.scheduler = make_scheduler(
                vllm_config=_config(shape),
                kv_cache_config=KVCacheConfig(
                    num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]
                ),
                structured_output_manager=_base()[1],
                block_size=16,
                log_stats=False,
            )
        self.cache = self.scheduler.encoder_cache_manager
        assert self.cache.cache_size == shape.cache
        self.worker = Worker(self.clock, self.rng, faults=self.rng.random() < 0.5)
        self.consumers = {
            address: Consumer(address, behaviour, self.rng, self.clock)
            for address, behaviour in shape.consumers.items()
        }
        self.room = self.rng.choice((0, 0, shape.cache + self.rng.randint(0, 64)))
        """Embeddings that the worker has memory for, until it has said so."""
        self.asked: dict[str, Asked] = {}
        self.kept: dict[str, tuple[str, str]] = {}
        """Transfers that the scheduler has ordered and not heard the end of."""
        self.seen: Counter[str] = Counter()
        self.number = 0
        self.work = 0

    def run(self) -> Counter[str]:
        """Let everything happen; return how often what did."""
        with _seams(self.shape, self.clock):
            self._run()
        return self.seen

    # -- what happens ------------------------------------------------------------------------------

    def _run(self) -> None:
        rng = self.rng
        if self.shape.fair:
            for address in self.shape.consumers:
                self._arrive((address,))
        last_s = 0.0
        while self.number < self.shape.requests or self.asked:
            if self.number < self.shape.requests:
                for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
                    self._arrive(self._drawn_consumers())
                if rng.random() < 0.02 and not self.shape.fair:
                    self._reset()
                last_s = self.clock.now
            if self.asked and rng.random() < 0.03:
                self._cancel(rng.choice(sorted(self.asked)))
            self._turn()
            # Every item that a dead consumer does not take may keep all others for its deadline.
            if self.clock.now - last_s > (self.work + 5) * (TIMEOUT_S + 1.0):
                raise Violation(f"waits for ever: {sorted(self.asked)}, under way {self.kept}")
        while len(self.worker.session):
            self._turn()
        self._turn()
        self._turn(idle=True)  # The next request would bring the news.
        self.seen["items without memory"] += len(self.worker.not_encoded)
        self.seen["items without memory twice"] += sum(
            count > 1 for count in self.worker.not_encoded.values()
        )
        if self.cache.num_freeable_slots != self.cache.cache_size or self.scheduler.has_requests():
            raise Violation("something is kept although nobody wants anything any more")

    def _drawn_consumers(self) -> tuple[str, ...]:
        addresses = sorted(self.shape.consumers)
        if self.shape.fair or self.rng.random() < 0.9:
            return (self.rng.choice(addresses),)
        return tuple(self.rng.sample(addresses, self.rng.randint(0, min(2, len(addresses)))))

    def _arrive(self, consumers: tuple[str, ...]) -> None:
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        rng, shape = self.rng, self.shape
        request_id = f"r{self.number}"
        self.number += 1
        count = 1 if shape.fair else rng.choice((1, 1, 1, 2, 3, 5))
        names = [rng.choice(sorted(shape.sizes)) for _ in range(count)]
        features, offset = [], rng.randint(1, 2)
        for name in names:
            place = PlaceholderRange(offset=offset, length=shape.sizes[name])
            features.append(
                MultiModalFeatureSpec(
                    data=None, modality="image", identifier=name, mm_position=place
                )
            )
            offset += shape.sizes[name] + rng.randint(1, 2)
        transfers = []
        for name in dict.fromkeys(names):
            for consumer in consumers:
                transfer_id = f"{name} of {request_id} to {consumer}"
                proof = secret().sign_transfer(transfer_id, name, consumer)
                transfers.append(
                    EncodeTransfer(
                        transfer_id=transfer_id, item_uuid=name, consumer=consumer, proof=proof
                    )
                )
        params = to_params(EncodeParams(transfers=tuple(transfers)))
        request = Request(
            request_id=request_id,
            prompt_token_ids=[1] * offset,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"ec_transfer_params": params}),
            pooling_params=None,
            mm_features=features,
        )
        self.work += len(names)
        self.asked[request_id] = Asked(request, names, consumers, self.clock.now)
        self.trace.append(f"{self.clock.now:.2f} {request_id} asks for {names} to {consumers}")
        self.scheduler.add_request(request)

    def _cancel(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._ended(request_id, "cancelled")

    def _reset(self) -> None:
        self.seen["resets"] += 1
        self.trace.append(f"{self.clock.now:.2f} reset")
        self.scheduler.reset_encoder_cache()
        self.worker.forget()

    # -- turns -------------------------------------------------------------------------------------

    def _turn(self, *, idle: bool = False) -> None:
        if self.scheduler.has_requests() or idle:
            planned = self.scheduler.schedule()
            self._execute(planned)
            self._take_in(planned)
        self.clock.now += self.rng.choice((0.005, 0.01, 0.05))
        if not self.asked:
            self.clock.now += self.rng.choice((0.0, 0.5))
        for address, message in self.worker.poll():
            self.consumers[address].hear(message)
        for consumer in self.consumers.values():
            for message in consumer.said():
                self.worker.session.receive(consumer.address, message, self.clock.now)
        self._check_room()

    def _execute(self, planned: Any) -> None:
        encoded = [
            self.asked[request_id].names[index]
            for request_id, indices in planned.scheduled_encoder_inputs.items()
            for index in indices
        ]
        metadata = planned.ec_connector_metadata
        for order in metadata.orders:
            self.kept[order.transfer_id] = (order.consumer, order.mm_hash)
        for request_id in planned.num_scheduled_tokens:
            self.asked[request_id].steps += 1
        self.seen["items encoded"] += len(encoded)
        self.seen["items restored"] += len(metadata.copies.restored)
        self.seen["transfers"] += len(metadata.orders)
        if planned.num_scheduled_tokens or metadata.copies.dropped:
            self.trace.append(
                f"{self.clock.now:.2f} step {dict(planned.num_scheduled_tokens)} encodes {encoded} "
                f"sends {[each.transfer_id for each in metadata.orders]} {metadata.copies} frees "
                f"{planned.free_encoder_mm_hashes}"
            )
        if self.shape.fair:
            self._check_shares()
        self.worker.execute(planned, encoded)

    def _take_in(self, planned: Any) -> None:
        from vllm.v1.outputs import ECConnectorOutput, make_empty_encoder_model_runner_output

        output = make_empty_encoder_model_runner_output(planned)
        if not planned.num_scheduled_tokens:
            output = type(output)(req_ids=[], req_id_to_index={})
        worker = self.worker
        report: dict[Kind, set[str]] = {
            "copy lost": worker.told_lost,
            "missing": worker.told_missing,
        }
        if self.room and self.rng.random() < 0.2:
            width = int(self.scheduler.vllm_config.model_config.get_inputs_embeds_size())
            report["room"], self.room = {str(self.room * width * 4)}, 0
            self.seen["caches grown"] += 1
        self.seen["copies lost"] += len(worker.told_lost)
        self.seen["items missing"] += len(worker.told_missing)
        worker.told |= worker.told_lost | worker.told_missing
        for transfer_id, (_, name) in list(self.kept.items()):
            if name in worker.told_missing:
                del self.kept[transfer_id]  # What is not there keeps no room.
        worker.told_lost, worker.told_missing = set(), set()
        if self.shape.device and worker.computed and self.rng.random() < 0.8:
            report["computed"] = {str(worker.computed)}
        ended, worker.ended = worker.ended, set()
        for transfer_id in ended:
            self.kept.pop(transfer_id, None)
        output.ec_connector_output = ECConnectorOutput(
            finished_sending=ended or None, finished_recving=to_names(report) or None
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None and each.request_id in self.asked:
                    self._ended(each.request_id, str(each.finish_reason))

    def _ended(self, request_id: str, how: str) -> None:
        asked = self.asked.pop(request_id)
        self.seen[f"requests that ended: {how}"] += 1
        self.seen["requests with several items"] += len(asked.names) > 1
        self.seen["requests of several steps"] += asked.steps > 1
        self.trace.append(f"{self.clock.now:.2f} {request_id} ended: {how}")

    # -- what must hold ----------------------------------------------------------------------------

    def _check_room(self) -> None:
        cache = self.cache
        used = sum(each.num_embeds for each in cache.items.values())
        idle = sum(each.num_embeds for each in cache.items.values() if not each.holders)
        if not cache.num_free_slots == cache.cache_size - used >= 0:
            raise Violation(f"{cache.num_free_slots} of {cache.cache_size} free, {used} used")
        if cache.num_freeable_slots != cache.num_free_slots + idle:
            raise Violation("what could be freed is not what is free and what is idle")
        if self.cache.items.keys() - self.worker.missing - self.worker.cache.keys():
            raise Violation("the scheduler believes that something is in the encoder cache")

    def _check_shares(self) -> None:
        """Whoever asks for no more than its share waits for nobody but itself."""
        shape, now = self.shape, self.clock.now
        share = shape.cache // len(shape.consumers)
        kept = {
            consumer: sum(
                shape.sizes[name]
                for name in {name for to, name in self.kept.values() if to == consumer}
            )
            for consumer in shape.consumers
        }
        looked_at: set[str] = set()
        for request_id, asked in self.asked.items():
            (consumer,) = asked.consumers
            if asked.request.num_computed_tokens or consumer in looked_at:
                continue
            looked_at.add(consumer)
            if kept[consumer] + shape.sizes[asked.names[0]] > share:
                asked.waits_since_s = None
                continue
            asked.waits_since_s = asked.waits_since_s or now
            if now - asked.waits_since_s > ENOUGH_S:
                raise Violation(f"{request_id} waits for what {consumer} does not keep: {kept}")


def tried(seed: int) -> tuple[Counter[str], str]:
    """Run a seed; return how often what happened, and what went wrong."""
    world = World(seed)
    try:
        return world.run(), ""
    except Exception:
        lines = traceback.format_exc().splitlines()[-12:]
        return world.seen, "\n".join((f"seed {seed}", *world.trace, *lines))
    finally:
        world.scheduler.shutdown()


def main() -> int:
    """Try seeds, and print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last, the last excluded")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after these")
    parser.add_argument("--most", type=int, default=3, help="failures to print")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    first, last = map(int, given.seeds.split(":"))
    end_s = time.monotonic() + given.seconds
    seen: Counter[str] = Counter()
    failed = 0
    for seed in range(first, last):
        if time.monotonic() > end_s:
            break
        some, problem = tried(seed)
        seen += some
        seen["seeds"] += 1
        if problem:
            failed += 1
            if failed <= given.most:
                print(problem)
    print(f"{failed} failed;", ", ".join(f"{what} {count}" for what, count in sorted(seen.items())))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""An encode instance over vLLM's real scheduler, and all that can happen to it, by a seed.

``python -m tests.property.engine_model encode --seeds 0:5000 --trace 60`` tries many seeds, and
prints the last events of those that fail.

What is real: vLLM's ``Scheduler`` as `make_scheduler` makes it (an encode instance refuses
``AsyncScheduler``), and both halves of the connector, the worker's with its sender and its copies
in host memory (`tests.kit.encode_worker`). What is modelled: the device, which computes later, and
whose outputs show by which weights they were computed; consumers, of which some are slow, stand
still for a while, are dead, or keep their space for one item after the other; the clock; faults of
copies, and items for which there is no memory.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd_portable.config.instance import InstanceConfig
from epd_portable.demo import MODEL_DIR
from epd_portable.launch.plan.engine import CONNECTOR, ROLE_ARGS, SCHEDULER_CLS
from epd_portable.vllm_plugin.reports import from_names, to_names
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
from tests.kit.encode_worker import EncodeWorkerHalf, drawn_turns
from tests.kit.memory import Violation
from tests.unit.builders import Clock

TIMEOUT_S, LEASE_S = 6.0, 2.0
ENOUGH_S = 1.0
"""Longest wait for others, in seconds, of a consumer that requests no more than its share."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an instance, and its load.

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
        churns: Few items leave a small cache and come back all the time.
        choosy: Consumers have space for one item, and keep it for the item that they need first.
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
    churns: bool
    choosy: bool
    requests: int

    @classmethod
    def drawn(cls, rng: Random) -> Shape:
        """Draw one."""
        fair = rng.random() < 0.4
        behaviours = [
            "healthy",
            *rng.choices(("healthy", "slow", "pauses", "dead", "refuses"), k=3),
        ]
        churns = not fair and rng.random() < 0.3
        choosy = not fair and not churns and rng.random() < 0.4
        if choosy:
            behaviours = ["choosy"] * 4
        number = rng.randint(2 if fair else 1, 4)
        largest = rng.randint(2, 4 if churns else 8)
        cache = largest * rng.randint(number, 4 * number) if fair else rng.randint(largest, 32)
        if churns:
            cache = 2 * largest + rng.randint(0, 2)
        return cls(
            cache=cache,
            embeddings=10_000 if fair or churns else rng.randint(largest, 32),
            tokens=10_000 if fair or churns else rng.randint(largest + 2, 48),
            seats=256 if fair or churns else rng.randint(1, 8),
            sizes={
                name: rng.randint(1, largest)
                for name in ("abcde" if churns else "abcdefghijklmnop")
            },
            host=200 if churns else rng.choice((0, 0, 10, 40, 200)),
            device=churns or rng.random() < 0.4,
            consumers={f"tcp://pd-{n}": behaviours[n] for n in range(number)},
            fair=fair,
            churns=churns,
            choosy=choosy,
            requests=rng.randint(60, 100) if churns else rng.randint(10, 40),
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
class Fault:
    """Failure of an operation that may fail; the seed decides how often."""

    rng: Random
    share: float

    def __call__(self) -> bool:
        return self.rng.random() < self.share


class Consumer:
    """A PD instance as an encode instance sees it."""

    def __init__(self, address: str, behaviour: str, rng: Random, clock: Clock) -> None:
        self.address, self._behaviour, self._rng, self._clock = address, behaviour, rng, clock
        self._answers: list[tuple[float, AnyMessage]] = []
        self._generation = 0
        self._until_s = 0.0
        self._needed: dict[str, float] = {}
        """Transfers of a choosy one, and the place of each among them."""
        self._announced: dict[str, Announce] = {}
        self._granted = ""
        self._first = ("", 0.0)
        """Transfer that it needs first, if it does not come, and since when."""
        self.aborted: list[str] = []

    @property
    def is_healthy(self) -> bool:
        return self._behaviour == "healthy"

    def need(self, transfer_id: str) -> None:
        """Add a transfer at a random place, if it is a choosy one."""
        if self._behaviour == "choosy":
            self._needed[transfer_id] = self._rng.random()

    def waits_s(self) -> float:
        """Return how long the item that it needs first has not come though it has space."""
        now, first = self._clock(), min(self._needed, key=self._needed.__getitem__, default="")
        if self._granted or self._first[0] != first or not first:
            self._first = (first, now)
        return now - self._first[1]

    def hear(self, message: AnyMessage) -> None:
        rng, now = self._rng, self._clock()
        if self._behaviour == "choosy":
            self._answers += [(now + 0.02, each) for each in self._chosen(message)]
            return
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

    def _chosen(self, message: AnyMessage) -> Iterator[AnyMessage]:
        transfer_id = message.transfer_id
        if isinstance(message, Written):
            yield self._answer(message)
            self._needed.pop(transfer_id, None)
        elif transfer_id not in self._needed:
            yield NotNeeded(transfer_id=transfer_id, attempt=message.attempt)
            return
        elif isinstance(message, Announce):
            self._announced[transfer_id] = message
        elif isinstance(message, Abort):
            self.aborted.append(transfer_id)
        if not isinstance(message, Announce):
            self._announced.pop(transfer_id, None)
            if self._granted == transfer_id:
                self._granted = ""
        first = self._granted or min(self._needed, key=self._needed.__getitem__, default="")
        if first in self._announced and (not self._granted or first == transfer_id):
            self._granted = first
            yield self._answer(self._announced[first])
        elif isinstance(message, Announce):
            yield Later(transfer_id=transfer_id, attempt=message.attempt)

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
        if self._behaviour in ("slow", "pauses") and self._rng.random() < 0.3:
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
    unsent: set[str] = field(default_factory=set)
    """Transfers that were not ordered."""
    steps: int = 0
    """In which it was scheduled."""
    waits_since_s: float | None = None
    """Since when nothing but other consumers can hold it up."""


class World:
    """A run of one seed."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
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
        self.faults = not shape.choosy and self.rng.random() < 0.5
        with _seams(shape, self.clock):
            self.worker = EncodeWorkerHalf(
                _config(shape), self.clock, self._deliver, is_late=shape.device
            )
        if self.faults:
            self.worker.no_copy = Fault(self.rng, 0.2)
            self.worker.no_memory = Fault(self.rng, 0.1)
            self.worker.writers.fails = Fault(self.rng, 0.02)
        self.worker.writers.lasts = lambda: drawn_turns(self.rng)
        self.width = int(self.scheduler.vllm_config.model_config.get_inputs_embeds_size())
        self.consumers = {
            address: Consumer(address, behaviour, self.rng, self.clock)
            for address, behaviour in shape.consumers.items()
        }
        self.room = (
            0 if shape.churns else self.rng.choice((0, 0, shape.cache + self.rng.randint(0, 64)))
        )
        """Embeddings that the worker has memory for, until it has said so."""
        self.asked: dict[str, Asked] = {}
        self.kept: dict[str, tuple[str, str]] = {}
        """Transfers that the scheduler has ordered and not heard the end of."""
        self.pauses = not (shape.fair or shape.choosy) and self.rng.random() < 0.2
        self.again: list[tuple[float, str, str]] = []
        """Transfers that come once more: when, consumer and name."""
        self.open: set[str] = set()
        """Transfers that workers have not reported the end of."""
        self.missing: set[str] = set()
        """Items that the scheduler takes for entries, or takes them so until it is told."""
        self.told: set[str] = set()
        """Items of which the scheduler knows that their copies, or they, are not there."""
        self.not_encoded: Counter[str] = Counter()
        """Number of times without memory, by item."""
        self.report: Any = None
        self.is_paused = False
        self.seen: Counter[str] = Counter()
        self.number = 0
        self.work = 0

    def run(self) -> None:
        """Let everything happen."""
        with _seams(self.shape, self.clock), self.worker.seams():
            self._run()

    def close(self) -> None:
        self.scheduler.shutdown()

    # -- what happens ------------------------------------------------------------------------------

    def _run(self) -> None:
        rng = self.rng
        if self.shape.fair:
            for address in self.shape.consumers:
                self._arrive((address,))
        last_s = 0.0
        while self.number < self.shape.requests or self.asked or self.again:
            if self.number < self.shape.requests:
                for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
                    self._arrive(self._drawn_consumers())
                if rng.random() < 0.02 and not (self.shape.fair or self.shape.choosy):
                    self._reset()
                if self.pauses and rng.random() < 0.1:
                    self._pause()
                last_s = self.clock.now
            elif self.is_paused:
                self._resume()
                last_s = self.clock.now
            if self.asked and rng.random() < 0.03 and not self.shape.choosy:
                self._cancel(rng.choice(sorted(self.asked)))
            self._turn()
            # Every item that a dead consumer does not take may keep all others for its deadline.
            if self.clock.now - last_s > (self.work + 5) * (TIMEOUT_S + 1.0):
                raise Violation(f"waits for ever: {sorted(self.asked)}, under way {self.kept}")
        while self.worker.is_sending or self.open or self.again or self.asked:
            self._turn(idle=True)  # The next request would bring the news.
        self._turn(idle=True)
        self.seen["items without memory"] += len(self.not_encoded)
        self.seen["items without memory twice"] += sum(
            count > 1 for count in self.not_encoded.values()
        )
        if self.cache.num_freeable_slots != self.cache.cache_size or self.scheduler.has_requests():
            raise Violation("something is kept although nobody wants anything any more")

    def _drawn_consumers(self) -> tuple[str, ...]:
        addresses = sorted(self.shape.consumers)
        if self.shape.fair or self.rng.random() < (0.2 if self.shape.churns else 0.9):
            return (self.rng.choice(addresses),)
        if self.shape.churns:
            return ()
        return tuple(self.rng.sample(addresses, self.rng.randint(0, min(2, len(addresses)))))

    def _arrive(self, consumers: tuple[str, ...], again: dict[str, str] | None = None) -> None:
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        rng, shape = self.rng, self.shape
        request_id = f"r{self.number}"
        self.number += 1
        count = 1 if shape.fair or shape.churns or shape.choosy else rng.choice((1, 1, 1, 2, 3, 5))
        names = [*again] if again else [rng.choice(sorted(shape.sizes)) for _ in range(count)]
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
                transfer_id = (again or {}).get(name) or f"{name} of {request_id} to {consumer}"
                proof = secret().sign_transfer(transfer_id, name, consumer)
                if not again:
                    self.consumers[consumer].need(transfer_id)
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
        self.asked[request_id].unsent.update(each.transfer_id for each in transfers)
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
        self.worker.reset()
        self.missing.clear()
        # Consumers hear that these do not come, and have some of them asked for again.
        again = [each for each in sorted(self.open) if self.rng.random() < 0.5]
        self.kept.clear()
        self.open.clear()
        for transfer_id in again:
            name, _, rest = transfer_id.partition(" of ")
            self._arrive((rest.partition(" to ")[2],), again={name: transfer_id})

    def _pause(self) -> None:
        """Pause as vLLM's engine core does, or go on."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        if self.is_paused:
            self._resume()
            return
        self.is_paused = True
        mode = self.rng.choice(("abort", "wait", "keep"))
        self.seen[f"pauses: {mode}"] += 1
        self.trace.append(f"{self.clock.now:.2f} pause {mode}")
        if mode == "abort":
            for each in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
                self._ended(each.request_id, "aborted")
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)

    def _resume(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.is_paused = False
        self.trace.append(f"{self.clock.now:.2f} resume")
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    # -- turns -------------------------------------------------------------------------------------

    def _turn(self, *, idle: bool = False) -> None:
        if self.scheduler.has_requests() or idle:
            planned = self.scheduler.schedule()
            self._execute(planned)
            self._take_in(planned)
        self.clock.now += self.rng.choice((0.005, 0.01, 0.05))
        if not self.asked:
            self.clock.now += self.rng.choice((0.0, 0.5))
        slow = self.shape.churns
        self.worker.device.compute(self.rng.choice((0, 0, 0, 1) if slow else (0, 1, 3, 100)))
        if self.rng.random() < 0.3:
            self.worker.copy()
        self.worker.turn()
        for consumer in self.consumers.values():
            for message in consumer.said():
                self.worker.receive(consumer.address, message)
        self._encode_again()
        self._check_room()
        self.worker.check()

    def _encode_again(self) -> None:
        """Have items of choosy consumers encoded again whose encoder has given them up."""
        now = self.clock.now
        due, self.again = (
            [e for e in self.again if e[0] <= now],
            [e for e in self.again if e[0] > now],
        )
        for _, address, transfer_id in due:
            self._arrive((address,), again={transfer_id.partition(" of ")[0]: transfer_id})
        for address, consumer in self.consumers.items():
            if consumer.waits_s() > TIMEOUT_S:
                raise Violation(f"{address} does not get what it needs first")
            for transfer_id in consumer.aborted:
                self.seen["transfers preempted"] += 1
                self.again.append((now + self.rng.uniform(0.1, 0.3), address, transfer_id))
            consumer.aborted.clear()

    def _deliver(self, address: str, message: AnyMessage) -> None:
        self.consumers[address].hear(message)

    def _execute(self, planned: Any) -> None:
        encoded = [
            self.asked[request_id].names[index]
            for request_id, indices in planned.scheduled_encoder_inputs.items()
            for index in indices
        ]
        metadata = planned.ec_connector_metadata
        for order in metadata.orders:
            self.kept[order.transfer_id] = (order.consumer, order.mm_hash)
            self.open.add(order.transfer_id)
            for asked in self.asked.values():
                asked.unsent.discard(order.transfer_id)
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
        self._check_orders(metadata, encoded)
        self.missing.difference_update(metadata.copies.restored)
        self.missing.update(self.worker.begin(planned))
        short = self.faults and self.rng.random() < 0.1
        for name in encoded:
            if short and self.rng.random() < 0.7:
                self.worker.run_out_of_memory(name)
                self.missing.add(name)
                self.not_encoded[name] += 1
            else:
                self.worker.encode(name, self.shape.sizes[name], self.width)
                self.missing.discard(name)
        self.report = self.worker.end()

    def _check_orders(self, metadata: Any, encoded: list[str]) -> None:
        """Workers have what they are to send and to restore, as far as the scheduler can know."""
        self.missing.difference_update(metadata.copies.dropped)
        self.told.difference_update(metadata.copies.dropped)
        for name in metadata.copies.restored:
            if name in self.told:
                raise Violation(f"{name} is restored, and its copy was told to be lost")
        there = {*self.worker.cache, *metadata.copies.restored, *encoded}
        for order in metadata.orders:
            name = order.mm_hash
            if name in self.missing and name in self.told:
                raise Violation(f"{order.transfer_id}: {name} was told not to be there")
            if name not in there | self.missing:
                raise Violation(f"{order.transfer_id}: {name} is to be sent, and is not there")

    def _take_in(self, planned: Any) -> None:
        from vllm.v1.outputs import ECConnectorOutput, make_empty_encoder_model_runner_output

        output = make_empty_encoder_model_runner_output(planned)
        if not planned.num_scheduled_tokens:
            output = type(output)(req_ids=[], req_id_to_index={})
        made, self.report = self.report, None
        ended = set((made and made.finished_sending) or ())
        names = set((made and made.finished_recving) or ())
        report = from_names(names)
        if self.room and self.rng.random() < 0.2:
            names |= to_names({"space": {str(self.room * self.width * 4)}})
            self.room = 0
            self.seen["caches grown"] += 1
        self.seen["copies lost"] += len(report["copy lost"])
        self.seen["items missing"] += len(report["missing"])
        self.told |= report["copy lost"] | report["missing"]
        for transfer_id, (_, name) in list(self.kept.items()):
            if name in report["missing"]:
                del self.kept[transfer_id]  # What is not there keeps no room.
        self.open -= ended
        for transfer_id in ended:
            self.kept.pop(transfer_id, None)
        output.ec_connector_output = ECConnectorOutput(
            finished_sending=ended or None, finished_recving=names or None
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None and each.request_id in self.asked:
                    self._ended(each.request_id, str(each.finish_reason))

    def _ended(self, request_id: str, how: str) -> None:
        asked = self.asked.pop(request_id)
        if asked.unsent and how == "stop":
            raise Violation(f"{request_id} ended, and {sorted(asked.unsent)} were not sent")
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
        if self.cache.items.keys() - self.missing - self.worker.cache.keys():
            raise Violation("the scheduler believes that something is in the encoder cache")

    def _check_shares(self) -> None:
        """Check that a consumer that requests no more than its share waits for itself only."""
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

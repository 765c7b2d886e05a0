"""Events and streams: each one that is left out must show as wrong bytes under the delays.

The delays are those of the simulated runtime: what a stream does, or an operator, takes effect so
much later, in the order of its stream. Every fault is seeded here, by leaving out one wait of the
real code.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ascend_sim import dispatch
from ascend_sim.memory import delay

from epd_portable.config.instance import InstanceConfig
from epd_portable.items.placer import Placement, Placer, WorkerOrders
from epd_portable.platforms import registry
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.npu import NpuPlatform
from epd_portable.transfer import registry as paths
from epd_portable.transfer.copies import DeviceCopies, QueuedCopy
from epd_portable.transfer.paths.base import SlotWrite
from epd_portable.transfer.pool import SharedMemory
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from tests.contract.pairs import Pair, Route
from tests.contract.path_consumer import Consumer, digest
from tests.keyring import keys
from tests.npu_sim.transfer.forgetful import Forgetful, Passed

DELAY_US = 800_000
WIDTH = 128
SPEC = TensorSpec(shape=(64, WIDTH), dtype="float32")
LEASE_S = 30.0
ENCODE_DEVICE, PREFILL_DEVICE = 0, 1


@pytest.fixture
def slow_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.npu.synchronize()
    monkeypatch.setattr(dispatch, "OP_US", DELAY_US)


def slow_copies(copies: DeviceCopies) -> None:
    """Let the copy stream begin its next copy late."""
    torch.npu.synchronize()
    with copies.platform.stream(copies.index):
        delay(torch.npu.current_stream(copies.device), DELAY_US)


class Instance:
    """The worker of a PD instance, with an item in its slab or in its pool's file."""

    def __init__(self, path: str, platform: NpuPlatform) -> None:
        platform.set_device(PREFILL_DEVICE)
        self.copies = DeviceCopies(platform, PREFILL_DEVICE)
        config = InstanceConfig(
            instance="prefill_decode-0",
            platform="npu",
            path=path,
            pool=f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}",
            pool_bytes=4 * SPEC.nbytes,
        )
        self._file = SharedMemory.create(config.pool, config.pool_bytes)
        self._worker = WorkerEndpoint(config, self.copies)
        self.placer = Placer(self.copies, self._worker)
        self._in_device_memory = path != "shm"
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def arrive(self, number: int) -> Placement:
        """Have an item whose values are its number, complete, in the slot of that number."""
        memory = self._worker.slab if self._in_device_memory else self._worker.host
        slot = SlotDescriptor(
            pool="pool", offset=number * SPEC.nbytes, nbytes=SPEC.nbytes, generation=number + 1
        )
        flat = memory.tensor(slot.offset, slot.nbytes).view(torch.float32)
        flat.copy_(torch.full(flat.shape, float(number)))
        torch.npu.synchronize()
        return Placement(
            mm_hash=f"item-{number}",
            slot=slot,
            in_device_memory=self._in_device_memory,
            tensor=SPEC,
        )

    def place(self, item: Placement, *, early: bool = False) -> torch.Tensor:
        """Place an item in a step that computes, or in one before it that does not."""
        if early:
            self.placer.carry_out(WorkerOrders(placements=[item]), self.encoder_cache)
            self.placer.carry_out(WorkerOrders(computes=True), self.encoder_cache)
        else:
            orders = WorkerOrders(placements=[item], computes=True)
            self.placer.carry_out(orders, self.encoder_cache)
        return self.encoder_cache[item.mm_hash]

    def warm(self) -> None:
        """Leave a block with other values in the copy stream's memory, for items to come."""
        with self.copies.platform.stream(PREFILL_DEVICE):
            torch.full(SPEC.shape, -1.0).to(self.copies.device)
        torch.npu.synchronize()

    def close(self) -> None:
        torch.npu.synchronize()
        self._worker.close()
        self._file.unlink()


@pytest.fixture(params=["ipc", "shm"], ids=["slab", "pool"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sound(path: str) -> Iterator[Instance]:
    platform = registry.get("npu")
    assert isinstance(platform, NpuPlatform)
    made = Instance(path, platform)
    yield made
    made.close()


@pytest.fixture
def forgetful(path: str) -> Iterator[Instance]:
    made = Instance(path, Forgetful())
    yield made
    made.close()


def computed_from_a_late_item(instance: Instance, *, early: bool) -> torch.Tensor:
    """Return the content that the engine's stream reads of an item that it was just given."""
    instance.warm()
    item = instance.arrive(2)
    slow_copies(instance.copies)
    return (instance.place(item, early=early) + 0).cpu()


@pytest.mark.parametrize("early", [False, True])
def test_work_queued_after_placing_reads_the_item(sound: Instance, early: bool) -> None:
    assert computed_from_a_late_item(sound, early=early).eq(2).all()


# From the pool torch_npu copies while the caller waits: it does not know the memory as page-locked.
@pytest.mark.parametrize("path", ["ipc"], ids=["slab"], indirect=True)
@pytest.mark.parametrize("early", [False, True])
def test_a_placer_that_does_not_wait_for_its_copies_is_seen(
    forgetful: Instance, early: bool
) -> None:
    assert not computed_from_a_late_item(forgetful, early=early).eq(2).all()


@pytest.mark.parametrize("path", ["ipc"], ids=["slab"], indirect=True)
def test_step_without_tokens_begins_the_copy_without_waiting(sound: Instance) -> None:
    first, second = sound.arrive(2), sound.arrive(3)
    slow_copies(sound.copies)
    begin_s = time.monotonic()
    for item in (first, second):
        sound.placer.carry_out(WorkerOrders(placements=[item]), sound.encoder_cache)
    computed = sound.copies.platform.record_event()
    computed.synchronize(LEASE_S)
    assert time.monotonic() - begin_s < DELAY_US / 1e6, "the engine's own stream waited"
    with sound.copies.platform.stream(PREFILL_DEVICE):
        sound.copies.platform.record_event().synchronize(LEASE_S)
    for number, item in ((2, first), (3, second)):
        assert sound.encoder_cache[item.mm_hash].eq(number).all(), "it was there without a step"


def test_item_forgotten_before_its_step_computed_is_harmless(sound: Instance) -> None:
    first, second = sound.arrive(2), sound.arrive(3)
    slow_copies(sound.copies)
    sound.placer.carry_out(WorkerOrders(placements=[first]), sound.encoder_cache)
    del sound.encoder_cache[first.mm_hash]
    assert (sound.place(second) + 0).cpu().eq(3).all()


def read_late(instance: Instance) -> torch.Tensor:
    """Return the content that a late reader on the engine's stream gets of a forgotten item.

    The next item is placed before the reader's turn comes.
    """
    first, second = instance.arrive(2), instance.arrive(3)
    placed = instance.place(first)
    torch.npu.synchronize()
    read = torch.empty(SPEC.shape, pin_memory=True)
    stream = torch.npu.current_stream(instance.copies.device)
    delay(stream, DELAY_US)
    read.copy_(placed, non_blocking=True)
    del placed, instance.encoder_cache[first.mm_hash]
    instance.place(second)
    torch.npu.synchronize()
    return read


def test_item_memory_is_not_reused_before_its_readers_end(
    sound: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_late(sound).eq(2).all()
    monkeypatch.setattr(NpuPlatform, "adopt", lambda *_: None)
    assert not read_late(sound).eq(2).all(), "without adoption it is"


ROUTES = [Route(name, Pair("npu", "npu")) for name in ("ipc", "shm", "collective", "tcp")]


@pytest.fixture(scope="module", params=ROUTES, ids=str)
def route(request: pytest.FixtureRequest) -> Route:
    found: Route = request.param
    return found


@pytest.fixture(scope="module")
def consumer(route: Route) -> Iterator[Consumer]:
    made = Consumer(route)
    yield made
    made.close()


class Encoder:
    """Queues a computation that is late, and hands its result to the path at once."""

    def __init__(self, route: Route, consumer: Consumer, copies: DeviceCopies) -> None:
        self._consumer = consumer
        self.copies = copies
        self._writer = paths.load_writer(route.path, copies, keys())
        self._output = torch.zeros(SPEC.shape, device=copies.device)
        torch.npu.synchronize()
        self._write(copies.platform.record_event())

    def arrives_whole(self, *, event_too_early: bool = False, value: float = 2.0) -> bool:
        """Compute and write one item; tell whether its bytes arrived."""
        platform = self.copies.platform
        early = platform.record_event()
        self._output.fill_(value)
        slot = self._write(early if event_too_early else platform.record_event())
        expected = digest(torch.full(SPEC.shape, value))
        return self._consumer.digest(slot.offset, slot.nbytes) == expected

    def _write(self, computed: DeviceEvent) -> SlotDescriptor:
        slot = self._consumer.grant(0, SPEC.nbytes)
        self._writer.write(
            SlotWrite(
                src=self._output,
                slot=slot,
                computed=computed,
                address=self._consumer.address,
                deadline_s=self.copies.clock() + LEASE_S,
            )
        )
        return slot

    def close(self) -> None:
        torch.npu.synchronize()
        self._writer.close()


MakeEncoder = Callable[[type[DeviceCopies]], Encoder]


@pytest.fixture
def make_encoder(route: Route, consumer: Consumer) -> Iterator[MakeEncoder]:
    made: list[Encoder] = []

    def make(copies: type[DeviceCopies]) -> Encoder:
        platform = registry.get("npu")
        platform.set_device(ENCODE_DEVICE)
        made.append(Encoder(route, consumer, copies(platform, ENCODE_DEVICE)))
        return made[-1]

    yield make
    for encoder in made:
        encoder.close()


class Hasty(DeviceCopies):
    """Copies that do not wait for the computation of what they copy."""

    def queue(self, target: torch.Tensor, src: torch.Tensor, **options: Any) -> QueuedCopy:
        return super().queue(target, src, **{**options, "after": Passed()})


def test_output_that_is_still_being_computed_arrives_whole(
    route: Route, make_encoder: MakeEncoder, slow_operators: None
) -> None:
    encoder = make_encoder(DeviceCopies)
    assert encoder.arrives_whole()
    assert not encoder.arrives_whole(event_too_early=True, value=3.0)
    # `collective` sends the output itself, behind the event.
    assert make_encoder(Hasty).arrives_whole() == (route.path == "collective")


def test_a_write_returns_when_its_late_copy_is_complete(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(DeviceCopies)
    slow_copies(encoder.copies)
    assert encoder.arrives_whole()


# torch_npu itself waits for the copies of `shm`, and the group for those of `collective`.
@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.path in ("ipc", "tcp")], ids=str, indirect=True
)
def test_early_return_of_a_write_is_detected(
    make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(DeviceCopies)
    monkeypatch.setattr(QueuedCopy, "finish", lambda _: None)
    slow_copies(encoder.copies)
    assert not encoder.arrives_whole()

"""What every transfer path must do: one suite over the whole table of paths."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from epd_portable.connector import registry
from epd_portable.connector.pool import SHM_FOLDER, SharedMemory
from epd_portable.connector.transport import LeaseFence, Transport
from epd_portable.errors import LeaseExpiredError, TransportError
from epd_portable.wire.descriptors import SlotDescriptor

GUARD = 64
WIDTH = 128
MIB = 1 << 20
POOL_BYTES = 48 * MIB
CONSUMER = Path(__file__).with_name("transport_consumer.py")
FENCED = sorted(registry.fenced_paths())
generations = itertools.count(1)


class Consumer:
    """The consumer's end of a path in this process."""

    def __init__(self, path: str, nbytes: int = POOL_BYTES) -> None:
        self.name = f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.memory = SharedMemory.create(self.name, nbytes)
        self.fence = LeaseFence()
        make = registry.load_receiver(path)
        self.receiver = make(self.memory, "tcp://127.0.0.1:*", self.fence) if make else None
        self.address = self.receiver.address if self.receiver else self.memory.identity

    def grant(self, offset: int, nbytes: int) -> SlotDescriptor:
        slot = SlotDescriptor(
            pool=self.name, offset=offset, nbytes=nbytes, generation=next(generations)
        )
        self.fence.allow(slot)
        return slot

    def read(self, slot: SlotDescriptor, like: torch.Tensor) -> torch.Tensor:
        flat = self.memory.tensor(slot.offset, slot.nbytes)
        return flat.view(like.dtype).view(like.shape).clone()

    def close(self) -> None:
        if self.receiver:
            self.receiver.close()
        self.memory.unlink()


@pytest.fixture(params=[entry.name for entry in registry.PATHS])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_consumer(path: str) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(nbytes: int = POOL_BYTES) -> Consumer:
        made.append(Consumer(path, nbytes))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


@pytest.fixture
def consumer(make_consumer: Callable[..., Consumer]) -> Consumer:
    return make_consumer()


@pytest.fixture
def transport(path: str) -> Iterator[Transport]:
    made = registry.load_transport(path, time.monotonic)
    yield made
    made.close()


def tensor(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)


def nbytes(src: torch.Tensor) -> int:
    return src.numel() * src.element_size()


def write(
    transport: Transport,
    consumer: Consumer,
    src: torch.Tensor,
    slot: SlotDescriptor,
    seconds: float = 30.0,
) -> None:
    deadline_s = time.monotonic() + seconds
    transport.write(src, slot, address=consumer.address, deadline_s=deadline_s)


# 40 MiB of float32; the same tokens in half the bytes end inside a chunk of either path.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "num_tokens", [1, 1024, 8 * MIB // (WIDTH * 4) + 1, 40 * MIB // (WIDTH * 4)]
)
def test_bytes_arrive_and_the_slot_s_neighbours_are_untouched(
    transport: Transport, consumer: Consumer, num_tokens: int, dtype: torch.dtype
) -> None:
    src = tensor(num_tokens, dtype)
    whole = consumer.memory.tensor(0, nbytes(src) + 2 * GUARD).fill_(0xA5)
    slot = consumer.grant(GUARD, nbytes(src))
    write(transport, consumer, src, slot)
    assert torch.equal(consumer.read(slot, src).view(torch.uint8), src.view(torch.uint8))
    assert whole[:GUARD].eq(0xA5).all()
    assert whole[-GUARD:].eq(0xA5).all()


def test_the_source_is_not_changed_and_may_be_written_again(
    transport: Transport, consumer: Consumer
) -> None:
    src = tensor(100)
    before = src.clone()
    for offset in (0, nbytes(src)):
        slot = consumer.grant(offset, nbytes(src))
        write(transport, consumer, src, slot)
        assert torch.equal(consumer.read(slot, src), before)
    assert torch.equal(src, before)


def test_an_expired_lease_is_refused_and_touches_nothing(
    transport: Transport, consumer: Consumer
) -> None:
    src = tensor(4)
    slot = consumer.grant(0, nbytes(src))
    with pytest.raises(LeaseExpiredError):
        write(transport, consumer, src, slot, seconds=0.0)
    assert consumer.memory.tensor(0, nbytes(src)).eq(0).all()


def test_a_lease_that_ends_during_the_write_ends_the_write(path: str, consumer: Consumer) -> None:
    ticks = itertools.count()
    transport = registry.load_transport(path, lambda: float(next(ticks)))
    src = tensor(40 * MIB // (WIDTH * 4))
    slot = consumer.grant(0, nbytes(src))
    with pytest.raises(TransportError):
        transport.write(src, slot, address=consumer.address, deadline_s=2.0)
    transport.close()


@pytest.mark.parametrize(
    ("src", "why"),
    [
        (tensor(3), "bytes"),
        (tensor(5), "bytes"),
        (torch.zeros(WIDTH, 4).t(), "not contiguous"),
        (tensor(8)[::2], "not contiguous"),
        (torch.empty(4, WIDTH, device="meta"), "host memory"),
    ],
    ids=["smaller", "larger", "transposed", "strided", "device"],
)
def test_a_tensor_that_is_not_what_was_granted_is_refused(
    transport: Transport, consumer: Consumer, src: torch.Tensor, why: str
) -> None:
    slot = consumer.grant(0, 4 * WIDTH * 4)
    with pytest.raises(ValueError, match=why):
        write(transport, consumer, src, slot)


def test_several_threads_may_write_at_once(transport: Transport, consumer: Consumer) -> None:
    sources = [tensor(3000 + number, seed=number) for number in range(6)]
    slots = [consumer.grant(number * 2 * MIB, nbytes(src)) for number, src in enumerate(sources)]
    failures: list[Exception] = []

    def work(src: torch.Tensor, slot: SlotDescriptor) -> None:
        try:
            write(transport, consumer, src, slot)
        except Exception as error:  # handed to the test's own thread
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(sources, slots, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for src, slot in zip(sources, slots, strict=True):
        assert torch.equal(consumer.read(slot, src), src)


def test_one_transport_serves_two_consumers(
    transport: Transport, make_consumer: Callable[..., Consumer]
) -> None:
    consumers = [make_consumer(MIB), make_consumer(MIB)]
    sources = [tensor(10, seed=1), tensor(10, seed=2)]
    slots = [each.grant(0, nbytes(sources[0])) for each in consumers]
    for each, src, slot in zip(consumers, sources, slots, strict=True):
        write(transport, each, src, slot)
    for each, src, slot in zip(consumers, sources, slots, strict=True):
        assert torch.equal(each.read(slot, src), src)


def test_a_consumer_that_is_gone_is_an_error_within_the_deadline(
    transport: Transport, make_consumer: Callable[..., Consumer]
) -> None:
    consumer = make_consumer(MIB)
    src = tensor(10)
    write(transport, consumer, src, consumer.grant(0, nbytes(src)))
    slot = consumer.grant(0, nbytes(src))
    consumer.close()
    begin_s = time.monotonic()
    with pytest.raises(TransportError):
        write(transport, consumer, src, slot, seconds=0.5)
    assert time.monotonic() - begin_s < 5.0


def test_a_restarted_consumer_is_not_written_by_a_grant_of_its_former_life(
    path: str, transport: Transport, make_consumer: Callable[..., Consumer]
) -> None:
    former = make_consumer(MIB)
    src = tensor(10)
    write(transport, former, src, former.grant(0, nbytes(src)))
    slot = former.grant(0, nbytes(src))
    anew = SharedMemory.create(former.name, MIB)
    if former.receiver:
        former.receiver.close()
    make = registry.load_receiver(path)
    receiver = make(anew, former.address, LeaseFence()) if make else None
    with pytest.raises(TransportError):
        write(transport, former, src, slot, seconds=2.0)
    assert anew.tensor(0, MIB).eq(0).all()
    if receiver:
        receiver.close()


@pytest.mark.parametrize("path", FENCED)
@pytest.mark.parametrize("change", ["forbidden", "moved"])
def test_a_fenced_path_refuses_what_is_not_leased(
    path: str, transport: Transport, consumer: Consumer, change: str
) -> None:
    src = tensor(10)
    slot = consumer.grant(0, nbytes(src))
    if change == "forbidden":
        consumer.fence.forbid(slot)
    else:
        slot = msgspec.structs.replace(slot, offset=64)
    with pytest.raises(LeaseExpiredError, match="not leased"):
        write(transport, consumer, src, slot)
    assert consumer.memory.tensor(0, 2 * nbytes(src)).eq(0).all()
    slot = consumer.grant(0, nbytes(src))
    write(transport, consumer, src, slot)
    assert torch.equal(consumer.read(slot, src), src)


def test_an_address_that_is_none_is_an_error(transport: Transport, consumer: Consumer) -> None:
    src = tensor(10)
    slot = consumer.grant(0, nbytes(src))
    for address in ("", "nonsense", "tcp://*:x", "\ud800"):
        with pytest.raises(TransportError):
            transport.write(src, slot, address=address, deadline_s=time.monotonic() + 1)


# -- a consumer in another process ---------------------------------------------------------------


class OtherProcess:
    def __init__(self, path: str) -> None:
        self.name = f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.process = subprocess.Popen(
            [sys.executable, str(CONSUMER), path, self.name, str(POOL_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=CONSUMER.parents[2],
        )
        self.address = self._answer()

    def tell(self, *words: object) -> str:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._answer()

    def grant(self, offset: int, size: int) -> SlotDescriptor:
        slot = SlotDescriptor(
            pool=self.name, offset=offset, nbytes=size, generation=next(generations)
        )
        self.tell("allow", msgspec.msgpack.encode(slot).hex())
        return slot

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()
        (SHM_FOLDER / self.name).unlink(missing_ok=True)


@pytest.fixture
def other(path: str) -> Iterator[OtherProcess]:
    process = OtherProcess(path)
    yield process
    process.close()


def test_another_process_sees_the_bytes_and_its_death_is_never_a_hang(
    path: str, transport: Transport, other: OtherProcess
) -> None:
    for num_tokens in (1, 20 * MIB // (WIDTH * 4) + 3):
        src = tensor(num_tokens, torch.bfloat16)
        slot = other.grant(GUARD, nbytes(src))
        transport.write(src, slot, address=other.address, deadline_s=time.monotonic() + 30)
        expected = hashlib.sha256(src.view(torch.uint8).numpy().tobytes()).hexdigest()
        assert other.tell("read", GUARD, nbytes(src)) == expected
    other.process.kill()
    other.process.wait()
    begin_s = time.monotonic()
    if path in FENCED:
        with pytest.raises(TransportError):
            transport.write(src, slot, address=other.address, deadline_s=begin_s + 0.5)
    else:  # its pool is still there: nobody reads what is written
        transport.write(src, slot, address=other.address, deadline_s=begin_s + 5)
    assert time.monotonic() - begin_s < 5.0

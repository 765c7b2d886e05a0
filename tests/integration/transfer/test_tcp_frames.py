"""Frames of a holder of the secret to a receiver of `tcp`: it lives on and writes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch
import zmq

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.transfer.paths.tcp import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_REPLY_BYTES,
    TcpReceiver,
    TcpWriter,
)
from epd_portable.transfer.pool import SharedMemory
from epd_portable.wire.descriptors import SlotDescriptor
from tests.keyring import keys
from tests.receiving import dealer, slot_write, tcp_receiver

NBYTES = 4096
FILL = 0xA5
SLOT = SlotDescriptor(pool="pool", offset=0, nbytes=64, generation=1)
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Consumer:
    """A receiver with its pool and its fence."""

    memory: SharedMemory
    fence: LeaseFence
    receiver: TcpReceiver

    def write(self, slot: SlotDescriptor, address: str = "", limit_s: float = DEADLINE_S) -> None:
        """Write ones into a slot by the real other end, or send them elsewhere."""
        copies = DeviceCopies(registry.get("cpu"))
        writer = TcpWriter(copies, keys())
        try:
            src = torch.ones(slot.nbytes, dtype=torch.uint8)
            writer.write(slot_write(copies, src, slot, address or self.receiver.address, limit_s))
        finally:
            writer.close()

    def assert_serves(self) -> None:
        slot = msgspec.structs.replace(SLOT, offset=128, generation=9)
        self.fence.allow(slot)
        self.write(slot)
        assert self.memory.tensor(128, 64).eq(1).all()

    @property
    def untouched(self) -> bool:
        return bool(self.memory.tensor(0, NBYTES).eq(FILL).all())


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    fence = LeaseFence()
    with tcp_receiver(NBYTES, fence=fence) as (receiver, memory):
        memory.tensor(0, NBYTES).fill_(FILL)
        yield Consumer(memory, fence, receiver)


def chunk(slot: SlotDescriptor, start: int, nbytes: int) -> bytes:
    return msgspec.msgpack.encode((slot, start, nbytes))


NO_CHUNKS: dict[str, tuple[list[bytes], str]] = {
    "nothing": ([b""], "not a chunk"),
    "garbage": ([b"garbage"], "not a chunk"),
    "two of nothing": ([b"", b""], "not a chunk"),
    "half a header": ([chunk(SLOT, 0, 64)[:-1], b"x" * 64], "not a chunk"),
    "longest header": ([bytes(MAX_HEADER_BYTES)], "Expected `array`"),
    "longer header": ([bytes(MAX_HEADER_BYTES + 1)], "header of 4097 bytes, at most 4096"),
    "no bytes": ([chunk(SLOT, 0, 64)], "announced length"),
    "too few bytes": ([chunk(SLOT, 0, 64), b"x" * 63], "announced length"),
    "two pieces": ([chunk(SLOT, 0, 64), b"x" * 64, b"y"], "announced length"),
    "empty": ([chunk(SLOT, 0, 0), b""], "outside its slot"),
    "behind": ([chunk(SLOT, 1, 64), b"x" * 64], "outside its slot"),
    "before": ([chunk(SLOT, -1, 4), b"x" * 4], "outside its slot"),
    "another grant": (
        [chunk(msgspec.structs.replace(SLOT, generation=2), 0, 4), b"x" * 4],
        "not leased",
    ),
}


@pytest.mark.parametrize("sent", NO_CHUNKS)
def test_chunk_outside_a_granted_slot_is_refused(consumer: Consumer, sent: str) -> None:
    frames, problem = NO_CHUNKS[sent]
    consumer.fence.allow(SLOT)
    with dealer(consumer.receiver.address) as peer:
        peer.send_multipart(frames)
        assert peer.poll(int(DEADLINE_S * 1000)), "no answer"
        assert problem in msgspec.msgpack.decode(peer.recv())[2]
    assert consumer.untouched
    consumer.assert_serves()


def test_an_answer_beyond_the_limit_does_not_reach_a_producer(consumer: Consumer) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as liar:
        liar.linger = 0
        liar.maxmsgsize = CHUNK_BYTES
        liar.curve_secretkey, liar.curve_publickey = keys().server_secret, keys().server_public
        liar.curve_server = True
        port = liar.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            identity, *_ = liar.recv_multipart()
            long = (SLOT.generation, 0, "x" * 2 * MAX_REPLY_BYTES)
            liar.send_multipart([identity, msgspec.msgpack.encode(long)])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportTimeoutError):
            consumer.write(SLOT, f"tcp://127.0.0.1:{port}", limit_s=1.0)
        thread.join(DEADLINE_S)

"""Receiving ends of paths, as an instance opens them, and their memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zmq

from epd_portable.transfer.curve import secure_client
from epd_portable.transfer.paths.base import LeaseFence, ReceiveMemory, ReceivingEnd, SlotWrite
from epd_portable.transfer.paths.tcp import TcpReceiver
from epd_portable.transfer.pool import SharedMemory
from epd_portable.wire.descriptors import SlotDescriptor
from tests.keyring import keys

if TYPE_CHECKING:
    import torch

    from epd_portable.platforms.base import DeviceEvent
    from epd_portable.transfer.copies import DeviceCopies


def receiving_end(memory: ReceiveMemory, **changes: Any) -> ReceivingEnd:
    """Return a CPU instance's arguments for the receiver of a path in its scheduler's process."""
    given: dict[str, Any] = {
        "platform": "cpu",
        "host": "127.0.0.1",
        "data_address": "tcp://127.0.0.1:*",
        "fence": LeaseFence(),
        "keys": keys(),
    }
    return ReceivingEnd(memory=lambda: memory, **{**given, **changes})


def slot_write(
    copies: DeviceCopies,
    src: torch.Tensor,
    slot: SlotDescriptor,
    address: str,
    seconds: float = 20.0,
    computed: DeviceEvent | None = None,
) -> SlotWrite:
    """An output for a slot; computed when all that the device has to do now is done, by default."""
    return SlotWrite(
        src=src,
        slot=slot,
        computed=computed or copies.platform.record_event(),
        address=address,
        deadline_s=copies.clock() + seconds,
    )


@contextmanager
def dealer(address: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A holder of the secret that sends what a test says; ``options`` are of its socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        secure_client(made, keys())
        for name, value in {"linger": 0, **options}.items():
            setattr(made, name, value)
        made.connect(address)
        yield made


@contextmanager
def tcp_receiver(nbytes: int = 4096, **changes: Any) -> Iterator[tuple[TcpReceiver, SharedMemory]]:
    """A receiver of `tcp` with the memory of its slots; ``changes`` are of its end."""
    with shared_memory(nbytes) as memory:
        receiver = TcpReceiver(receiving_end(memory, **changes))
        try:
            yield receiver, memory
        finally:
            receiver.close()


def pool_name() -> str:
    """A name of a pool that no other test has."""
    return f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@contextmanager
def shared_memory(nbytes: int = 4096) -> Iterator[SharedMemory]:
    """A pool's memory, which goes with the block."""
    made = SharedMemory.create(pool_name(), nbytes)
    try:
        yield made
    finally:
        made.unlink()

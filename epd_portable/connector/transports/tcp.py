"""``tcp``: the producer sends chunks over ZMQ, the consumer copies them into its pool.

A chunk is one message ``[header, bytes]`` and is answered, so at most `WINDOW` chunks of a write
are under way. The consumer looks at the slot's generation before it copies a chunk: a write that
comes too late is refused and touches nothing.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from epd_portable.connector.pool import SharedMemory
from epd_portable.connector.transport import (
    Clock,
    LeaseFence,
    Receiver,
    Transport,
    check_source,
)
from epd_portable.errors import LeaseExpiredError, TransportError, TransportTimeoutError
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
WINDOW = 4
_POLL_MS = 100


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    slot: SlotDescriptor
    start: int
    nbytes: int


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    start: int
    problem: str = ""


_encode = msgspec.msgpack.encode
_decode_chunk = msgspec.msgpack.Decoder(_Chunk).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class TcpTransport(Transport):
    """Sends encoder outputs; each calling thread has a connection of its own to each consumer."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._sockets: list[zmq.Socket[bytes]] = []

    def write(
        self, src: torch.Tensor, slot: SlotDescriptor, *, address: str, deadline_s: float
    ) -> None:
        """See `Transport.write`."""
        import torch

        check_source(src, slot)
        if self._clock() >= deadline_s:
            raise LeaseExpiredError(f"lease of slot {slot.generation} ended before the write")
        data: memoryview = src.view(-1).view(torch.uint8).numpy().data
        socket = self._socket(address)
        pending = 0
        for start in range(0, slot.nbytes, CHUNK_BYTES):
            if pending == WINDOW:
                self._take_answer(socket, slot, address, deadline_s)
                pending -= 1
            chunk = data[start : start + CHUNK_BYTES]
            socket.send(_encode(_Chunk(slot, start, len(chunk))), zmq.SNDMORE)
            socket.send(chunk, copy=False)
            pending += 1
        for _ in range(pending):
            self._take_answer(socket, slot, address, deadline_s)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for socket in self._sockets:
                socket.close(linger=0)
            self._sockets.clear()
        self._context.term()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        sockets: dict[str, zmq.Socket[bytes]] = self._local.__dict__.setdefault("sockets", {})
        if address not in sockets:
            socket = self._context.socket(zmq.DEALER)
            try:
                socket.connect(address)
            except (zmq.ZMQError, ValueError) as error:
                socket.close(linger=0)
                raise TransportError(f"data address {address!r}: {error}") from error
            sockets[address] = socket
            with self._lock:
                self._sockets.append(socket)
        return sockets[address]

    def _drop(self, address: str) -> None:
        socket = self._local.sockets.pop(address)
        with self._lock:
            self._sockets.remove(socket)
        socket.close(linger=0)

    def _take_answer(
        self, socket: zmq.Socket[bytes], slot: SlotDescriptor, address: str, deadline_s: float
    ) -> None:
        """Wait for the answer to one chunk; on failure drop the connection with its rest."""
        remaining_ms = int((deadline_s - self._clock()) * 1000)
        if remaining_ms <= 0 or not socket.poll(remaining_ms):
            self._drop(address)
            raise TransportTimeoutError(
                f"no answer from {address} for slot {slot.generation} before its lease ended; "
                "the instance is gone or overloaded, or transfer.lease_s is too short"
            )
        answer = _decode_answer(socket.recv())
        if answer.problem:
            self._drop(address)
            raise LeaseExpiredError(f"{address} refused slot {slot.generation}: {answer.problem}")


class TcpReceiver(Receiver):
    """Copies arriving chunks into the pool, in a thread of the consumer's scheduler process.

    Args:
        memory: The pool's memory.
        bind: ZMQ address to listen on, for example ``tcp://127.0.0.1:9301``.
        fence: Tells whether a slot is granted and may be written now.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(self, memory: SharedMemory, bind: str, fence: LeaseFence) -> None:
        self._memory = memory
        self._fence = fence
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise TransportError(f"cannot receive on {bind}: {error}") from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epd-tcp-receiver", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """See `Receiver.address`."""
        return self._address

    def close(self) -> None:
        """See `Receiver.close`."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                identity, header, *rest = self._socket.recv_multipart(copy=False)
                answer = self._receive(header.bytes, [frame.buffer for frame in rest])
                self._socket.send_multipart([identity.bytes, _encode(answer)])
        self._socket.close(linger=0)
        self._context.term()

    def _receive(self, header: bytes, frames: list[memoryview]) -> _Answer:
        import torch

        try:
            chunk = _decode_chunk(header)
        except msgspec.MsgspecError as error:
            return _Answer(0, 0, f"not a chunk: {error}")
        slot, end = chunk.slot, chunk.start + chunk.nbytes
        if len(frames) != 1 or len(frames[0]) != chunk.nbytes:
            return _Answer(slot.generation, chunk.start, "chunk is not of its announced length")
        if chunk.start < 0 or chunk.nbytes <= 0 or end > slot.nbytes:
            return _Answer(slot.generation, chunk.start, "chunk is outside its slot")
        with self._fence.writing(slot) as leased:
            if not leased:
                return _Answer(slot.generation, chunk.start, "the slot is not leased any more")
            target = self._memory.tensor(slot.offset + chunk.start, chunk.nbytes)
            target.copy_(torch.frombuffer(frames[0], dtype=torch.uint8))
        return _Answer(slot.generation, chunk.start)

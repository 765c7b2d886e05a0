"""``tcp``: the producer sends chunks over ZMQ, the consumer copies them into its pool.

A chunk is one message ``[header, bytes]`` with a reply, so at most `WINDOW` chunks of a write
are under way. The consumer checks the slot's generation before it copies a chunk: a late write is
refused. Everything is encrypted, see `epd_portable.transfer.curve`.
"""

from __future__ import annotations

import threading

import msgspec
import zmq

from epd_portable.errors import (
    LeaseExpiredError,
    ProtocolError,
    TransportTimeoutError,
)
from epd_portable.log import trace
from epd_portable.transfer.connections import Connections
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.curve import CurveKeys, Listener, connect_client
from epd_portable.transfer.paths.base import (
    LeaseFence,
    PathReceiver,
    PathWriter,
    ReceivingEnd,
    SlotWrite,
)
from epd_portable.wire.codec import reader
from epd_portable.wire.descriptors import SlotDescriptor

CHUNK_BYTES = 1 << 20
"""ZMQ receives a frame of this size before it checks the sender's key, so this bounds the memory
that each connection without the key takes until its handshake has failed."""
WINDOW = 8
"""Chunks under way on one connection, which the receiver holds in memory."""
MAX_HEADER_BYTES = 4096
MAX_REPLY_BYTES = 4096
CONNECTIONS = 4
"""To each consumer: as many as an encode worker has writers."""
_POLL_MS = 100
_LONGEST_RECONNECT_MS = 10_000


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    slot: SlotDescriptor
    start: int
    nbytes: int


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    start: int
    problem: str = ""


_encode = msgspec.msgpack.encode
_read_chunk = reader(_Chunk, "a chunk")
_read_answer = reader(_Answer, "a reply")


class TcpWriter(PathWriter):
    """Sends encoder outputs; each write has a connection of its own while it lasts."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._free = Connections(self._connect_all, _close_all)

    def write(self, item: SlotWrite) -> None:
        """See `PathWriter.write`; from a device through page-locked host memory."""
        self._check(item)
        host = self.copies.to_host(item.src, after=item.computed, deadline_s=item.deadline_s)
        socket = self._take_connection(item.address)
        try:
            self._send(socket, host.numpy().data, item)
        except BaseException:
            # Replies to its last chunks would be taken for those of the next write.
            socket.close(linger=0)
            raise
        with self._lock:
            free = self._free.get(item.address)
            if free is not None:
                free.append(socket)
                return
        socket.close(linger=0)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            self._free.close()
        self._context.term()

    def _send(self, socket: zmq.Socket[bytes], data: memoryview, item: SlotWrite) -> None:
        pending = 0
        for start in range(0, item.slot.nbytes, CHUNK_BYTES):
            if pending == WINDOW:
                self._take_answer(socket, item)
                pending -= 1
            chunk = data[start : start + CHUNK_BYTES]
            socket.send(_encode(_Chunk(item.slot, start, len(chunk))), zmq.SNDMORE)
            socket.send(chunk, copy=False)
            pending += 1
        for _ in range(pending):
            self._take_answer(socket, item)

    def _take_connection(self, address: str) -> zmq.Socket[bytes]:
        with self._lock:
            free = self._free.use(address)
            return free.pop() if free else self._connect(address)

    def _connect_all(self, address: str) -> list[zmq.Socket[bytes]]:
        # ZMQ connects in the background.
        made = [self._connect(address) for _ in range(CONNECTIONS)]
        trace("path.opened", path="tcp", address=address)
        return made

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        connect_client(socket, address, self._keys, what="data address")
        return socket

    def _take_answer(self, socket: zmq.Socket[bytes], item: SlotWrite) -> None:
        """Wait for the reply to one chunk."""
        address, slot = item.address, item.slot
        remaining_ms = int((item.deadline_s - self.copies.clock()) * 1000)
        if remaining_ms <= 0 or not socket.poll(remaining_ms):
            raise TransportTimeoutError(
                f"no reply from {address} for slot {slot.generation} before its lease ended; "
                "the instance is gone or overloaded, or transfer.lease_s is too short"
            )
        answer: _Answer = _read_answer(socket.recv())
        if answer.problem:
            raise LeaseExpiredError(f"{address} refused slot {slot.generation}: {answer.problem}")


def _close_all(sockets: list[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close(linger=0)


class TcpReceiver(PathReceiver):
    """Copies arriving chunks into the pool, in a thread of the consumer's scheduler process."""

    def __init__(self, end: ReceivingEnd) -> None:
        assert isinstance(end.fence, LeaseFence) and end.keys is not None, "not in a worker"
        self._memory = end.memory()
        self._fence = end.fence
        self._listener = Listener(
            end.data_address,
            end.keys,
            name="receiver of tcp",
            max_bytes=CHUNK_BYTES,
            waiting=WINDOW,  # A message is two frames.
        )
        self.address = self._listener.address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epd-tcp-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `PathReceiver.close`."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        socket = self._listener.socket
        while not self._stop.is_set():
            self._listener.log_refusals()
            if socket.poll(_POLL_MS):
                identity, header, *rest = socket.recv_multipart(copy=False)
                answer = self._receive(header.buffer, [frame.buffer for frame in rest])
                socket.send_multipart([identity.bytes, _encode(answer)])
        self._listener.close()

    def _receive(self, header: memoryview, frames: list[memoryview]) -> _Answer:
        try:
            if len(header) > MAX_HEADER_BYTES:
                raise ProtocolError(
                    f"not a chunk: header of {len(header)} bytes, at most {MAX_HEADER_BYTES}"
                )
            chunk: _Chunk = _read_chunk(header)
        except ProtocolError as error:
            return _Answer(0, 0, str(error))
        return _Answer(chunk.slot.generation, chunk.start, self._copy(chunk, frames))

    def _copy(self, chunk: _Chunk, frames: list[memoryview]) -> str:
        """Copy a chunk into its slot; return why that cannot be, or an empty string."""
        import torch

        slot = chunk.slot
        if len(frames) != 1 or len(frames[0]) != chunk.nbytes:
            return "chunk is not of its announced length"
        if chunk.start < 0 or chunk.nbytes <= 0 or chunk.start + chunk.nbytes > slot.nbytes:
            return "chunk is outside its slot"
        try:
            target = self._memory.tensor(slot.offset + chunk.start, chunk.nbytes)
        except ValueError as error:
            return str(error)
        with self._fence.writing(slot) as leased:
            if not leased:
                return "the slot is not leased any more"
            target.copy_(torch.frombuffer(frames[0], dtype=torch.uint8))
        return ""

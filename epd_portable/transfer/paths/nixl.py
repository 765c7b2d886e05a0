"""``nixl``: the producer writes into the consumer's registered memory, by RDMA where there is any.

NIXL moves the bytes by UCX, over InfiniBand or RoCE, else TCP. Slots are in the consumer's pool in
host memory, outputs pass through a registered buffer of the producer. Nothing is encrypted: the
path is offered within a host or in a trusted network.

NIXL's own progress thread takes a sixth of a core from an idle instance. It is off: a producer
makes progress while it writes, a consumer while any slot is leased.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from epd_portable.errors import (
    ConfigError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.log import trace
from epd_portable.transfer.connections import Connections
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths.base import (
    LeaseFence,
    PathReceiver,
    PathWriter,
    ReceivingEnd,
    SlotWrite,
    check_slot,
)
from epd_portable.wire.codec import address_reader, as_address
from epd_portable.wire.descriptors import MAX_ADDRESS

if TYPE_CHECKING:
    from epd_portable.transfer.curve import CurveKeys

BUFFERS = 4
"""Registered buffers that are kept, as many as an encode worker has writers."""
_PROGRESS_S = 0.0002
_LOOK_S = 0.1
_HOST_MEMORY = "DRAM"
_SMALLEST_BUFFER_BYTES = 1 << 20


class _AgentAddress(msgspec.Struct, frozen=True, array_like=True):
    metadata: bytes
    base: int
    nbytes: int


_parse: Callable[[str], _AgentAddress] = address_reader(_AgentAddress, "nixl")


class NixlAgent:
    """A NIXL agent with UCX, one call at a time: without its own threads it wants that."""

    def __init__(self, purpose: str) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"transfer.path nixl: {error}; install epd-portable[kv], or write auto"
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        settings = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl: Any = nixl_agent(f"epd-{purpose}-{uuid.uuid4().hex}", settings)
        except Exception as error:  # Its errors have no common base.
            raise TransportError(f"nixl cannot use UCX on this machine: {error!r}") from error
        self.lock = threading.Lock()

    def register(self, memory: torch.Tensor) -> Any:
        """Let transfers use a piece of memory."""
        with self.lock:
            return self.nixl.register_memory(memory)

    def deregister(self, registered: Any) -> None:
        """Undo `register`, by its result."""
        with self.lock:
            self.nixl.deregister_memory(registered)


@dataclass(frozen=True, eq=False, slots=True)
class RegisteredBuffer:
    """Host memory, and what NIXL returned for it."""

    memory: torch.Tensor
    registered: Any


class RegisteredBuffers:
    """Buffers for reuse, each of a power of two; for several threads.

    Args:
        keep: Unused buffers that stay registered; the smallest goes first.
    """

    def __init__(self, agent: NixlAgent, *, keep: int = BUFFERS) -> None:
        self._agent = agent
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[RegisteredBuffer] = []
        """Smallest first."""

    def fill(self, data: torch.Tensor) -> RegisteredBuffer:
        """Return a buffer that begins with ``data``, which is ``(nbytes,)`` uint8 on the host."""
        buffer = self._take(data.numel())
        buffer.memory[: data.numel()].copy_(data)
        return buffer

    def give_back(self, buffer: RegisteredBuffer) -> None:
        """Keep a buffer that NIXL does not read any more for the next output."""
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda each: each.memory.numel())
            surplus = self._free.pop(0) if len(self._free) > self._keep else None
        if surplus is not None:
            self.discard(surplus)

    def discard(self, buffer: RegisteredBuffer) -> None:
        """Deregister a buffer."""
        self._agent.deregister(buffer.registered)

    def close(self) -> None:
        """Deregister all unused buffers."""
        with self._lock:
            while self._free:
                self.discard(self._free.pop())

    def _take(self, nbytes: int) -> RegisteredBuffer:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.memory.numel() >= nbytes:
                    return self._free.pop(index)
        size = max(_SMALLEST_BUFFER_BYTES, 1 << (nbytes - 1).bit_length())
        memory = torch.empty(size, dtype=torch.uint8)
        return RegisteredBuffer(memory, self._agent.register(memory))


class NixlWriter(PathWriter):
    """Writes encoder outputs into pools of consumers; each write has a buffer of its own."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._agent = NixlAgent("encode")
        self._lock = threading.Lock()
        self._peers = Connections(self._connect, self._disconnect)
        self._buffers = RegisteredBuffers(self._agent)

    def write(self, item: SlotWrite) -> None:
        """See `PathWriter.write`; the address holds what NIXL must know of the consumer."""
        self._check(item)
        check_slot(item.slot, _parse(item.address).nbytes)
        host = self.copies.to_host(item.src, after=item.computed, deadline_s=item.deadline_s)
        buffer = self._buffers.fill(host)
        try:
            self.copies.check_lease(item.deadline_s)
            self._send(buffer.memory, item)
        except BaseException:
            # The network card may still read the buffer.
            self._forget(item.address)
            self._buffers.discard(buffer)
            raise
        self._buffers.give_back(buffer)

    def close(self) -> None:
        """Disconnect from all consumers, and free the buffers."""
        with self._lock:
            self._peers.close()
        self._buffers.close()

    def _send(self, source: torch.Tensor, item: SlotWrite) -> None:
        try:
            with self._lock:
                name = self._peers.use(item.address)
            handle = self._begin(source, item, name)
            try:
                while True:
                    done = self._is_done(handle)
                    if self.copies.clock() >= item.deadline_s:
                        raise TransportTimeoutError(
                            f"slot {item.slot.generation} was not written before its lease ended; "
                            "the instance is gone or overloaded, or transfer.lease_s is too short"
                        )
                    if done:
                        break
                    time.sleep(_PROGRESS_S)
            finally:
                with self._agent.lock:
                    self._agent.nixl.release_xfer_handle(handle)
        except TransportError:
            raise
        except Exception as error:  # NIXL's have no common base.
            raise PeerLostError(f"nixl cannot reach the consumer: {error!r}") from error

    def _begin(self, source: torch.Tensor, item: SlotWrite, name: str) -> Any:
        nixl, slot = self._agent.nixl, item.slot
        here = [(source.data_ptr(), slot.nbytes, 0)]
        there = [(_parse(item.address).base + slot.offset, slot.nbytes, 0)]
        with self._agent.lock:
            handle = nixl.initialize_xfer(
                "WRITE",
                nixl.get_xfer_descs(here, _HOST_MEMORY),
                nixl.get_xfer_descs(there, _HOST_MEMORY),
                name,
            )
            nixl.transfer(handle)
        return handle

    def _is_done(self, handle: Any) -> bool:
        with self._agent.lock:
            state = self._agent.nixl.check_xfer_state(handle)
        if state == "ERR":
            raise PeerLostError("nixl's transfer failed: the consumer is gone")
        return bool(state == "DONE")

    def _connect(self, address: str) -> str:
        with self._agent.lock:
            name = self._agent.nixl.add_remote_agent(_parse(address).metadata)
        trace("path.opened", path="nixl", address=address[:64])
        return name.decode() if isinstance(name, bytes) else str(name)

    def _disconnect(self, name: str) -> None:
        with self._agent.lock:
            self._agent.nixl.remove_remote_agent(name)

    def _forget(self, address: str) -> None:
        with self._lock:
            name = self._peers.drop(address)
        if name is not None:
            self._disconnect(name)


class NixlReceiver(PathReceiver):
    """Registers the pool for producers, and makes progress while any slot is leased.

    UCX listens on ``UCX_NET_DEVICES``, without keys.
    """

    def __init__(self, end: ReceivingEnd) -> None:
        assert isinstance(end.fence, LeaseFence), "not in a worker"
        self._fence = end.fence
        memory = end.memory()
        self._agent = NixlAgent("consumer")
        self._memory = memory.tensor(0, memory.nbytes)
        self._registered = self._agent.register(self._memory)
        self.address = as_address(
            _AgentAddress(
                self._agent.nixl.get_agent_metadata(), self._memory.data_ptr(), memory.nbytes
            )
        )
        if len(self.address) > MAX_ADDRESS:
            self._agent.deregister(self._registered)
            raise TransportError(
                f"nixl's address has {len(self.address)} bytes, at most {MAX_ADDRESS}: name the "
                "network cards to use in UCX_NET_DEVICES"
            )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epd-nixl-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `PathReceiver.close`."""
        self._stop.set()
        self._thread.join()
        self._agent.deregister(self._registered)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._fence.wait_leased(_LOOK_S):
                with self._agent.lock:
                    self._agent.nixl.get_new_notifs()
                time.sleep(_PROGRESS_S)

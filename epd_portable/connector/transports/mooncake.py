"""``mooncake``: Mooncake's transfer engine writes into the consumer's registered memory.

The engine takes RDMA where the machine has a network card for it, else TCP. There is no metadata
server: a producer asks the consumer's engine itself. Slots are in the consumer's pool in host
memory, outputs pass through a registered buffer of the producer. Nothing is encrypted or
authenticated: the path is for a trusted network, or for within a host.

A transfer cannot be cancelled, but an engine can be dropped with all that it sends. So a producer
has an engine for each consumer, and drops it when a write is late or has failed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from epd_portable.connector.connections import Connections
from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.curve import is_off_host
from epd_portable.connector.sockets import (
    has_hung_up,
    hasten_accepts,
    keep_on_host,
    local_host_towards,
    open_ports,
    reset_on_close,
)
from epd_portable.connector.transport import (
    PathReceiver,
    ReceivingEnd,
    SlotWrite,
    Transport,
    check_slot,
)
from epd_portable.connector.transports.buffers import RegisteredBuffers, late_write
from epd_portable.errors import (
    ConfigError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    UnsupportedError,
)
from epd_portable.log import trace
from epd_portable.platforms.traits import TRAITS
from epd_portable.wire.codec import address_reader, as_address

if TYPE_CHECKING:
    import torch

    from epd_portable.connector.curve import CurveKeys

logger = logging.getLogger(__name__)

BUFFERS = 2
"""Registered buffers that are kept for each consumer."""
_POLL_S = 0.0002
_LOOK_S = 0.01
_DROP_S = 4.0
"""Longest wait of a failed write for the end of the engine, which others leave within a poll."""
_METADATA = "P2PHANDSHAKE"
_ANYWHERE = "*"
_RDMA, _TCP = "rdma", "tcp"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_DONE, _UNDER_WAY = 1, 0
_SETTINGS = {
    # It logs every transfer otherwise.
    "MC_LOG_LEVEL": "ERROR",
    # The lease bounds a write, not the library.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "86400",
}


_Port = Annotated[int, Meta(ge=1, le=65535)]


class _EngineAddress(msgspec.Struct, frozen=True, array_like=True):
    protocol: str
    host: Annotated[str, Meta(pattern=r"^\d{1,3}(\.\d{1,3}){3}$")]
    port: _Port
    data_ports: tuple[_Port, ...]
    base: Annotated[int, Meta(ge=0, le=1 << 56)]
    nbytes: Annotated[int, Meta(ge=0, le=1 << 56)]

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


_parse: Callable[[str], _EngineAddress] = address_reader(_EngineAddress, "mooncake")


def protocol_of(platform: str) -> str:
    """Return Mooncake's name of a platform's protocol on this machine."""
    wanted = TRAITS[platform].mooncake_protocol
    if wanted != _RDMA:
        return wanted
    found = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    return _RDMA if found and "MC_FORCE_TCP" not in os.environ else _TCP


class _Engine:
    """A transfer engine of Mooncake.

    It listens on all interfaces, and any peer that connects may read and write registered memory.

    Args:
        host: Address at which the other end reaches this one.
        reached: Other hosts connect to it; otherwise they cannot.

    Raises:
        ConfigError: Mooncake or a system library that it needs is not installed.
        TransportError: It does not start.
    """

    def __init__(self, host: str, protocol: str, *, reached: bool) -> None:
        # It reads them when it is loaded.
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                f"transfer.path mooncake: {error}; install epd-portable[mooncake] and libibverbs1, "
                "or write auto"
            ) from error
        before = open_ports()
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, _METADATA, protocol, "") != 0:
            raise TransportError(
                f"mooncake does not start on {host} with protocol {protocol}: look for its reason "
                "in the log of this instance"
            )
        self.port = int(self._engine.get_rpc_port())
        opened = open_ports() - before
        self.data_ports = tuple(sorted(opened - {self.port}))
        if not reached:
            try:
                keep_on_host(opened)
            except OSError as error:
                self.drop()
                raise TransportError(
                    f"mooncake would listen to other hosts: {error}; write another transfer.path"
                ) from error

    def register(self, memory: torch.Tensor) -> torch.Tensor:
        """Let transfers use a piece of memory, and return it; may raise `TransportError`."""
        address, nbytes = memory.data_ptr(), memory.numel()
        if self._engine.batch_register_memory([address], [nbytes], _ANYWHERE) != 0:
            raise TransportError(
                f"mooncake cannot register {nbytes} bytes of memory: raise `ulimit -l`"
            )
        return memory

    def deregister(self, memory: torch.Tensor) -> None:
        self._engine.batch_unregister_memory([memory.data_ptr()])

    def open(self, consumer: str) -> bool:
        """Connect to a consumer's engine; blocks, perhaps for long."""
        # An empty batch: the one call that connects without the GIL.
        engine = self._engine  # May be dropped meanwhile, and then ends with this call.
        batch = engine.batch_transfer_async_write(consumer, [], [], [])
        return _is_batch(batch) and engine.get_batch_transfer_status([batch]) == 0

    def begin_write(self, consumer: str, source: int, target: int, nbytes: int) -> int | None:
        """Begin a write, and return its batch for `status`; ``None`` if it was refused."""
        batch = self._engine.transfer_submit_write(consumer, source, target, nbytes)
        return int(batch) if _is_batch(batch) else None

    def status(self, batch: int) -> int:
        """Return `_DONE` or another number at the end of a write, `_UNDER_WAY` before."""
        return int(self._engine.transfer_check_status(batch))

    def drop(self) -> None:
        """Stop; nothing is sent or received any more."""
        # Its destructor waits, with the GIL, for its thread that accepts connections.
        hasten_accepts(self.port)
        self._engine = None


def _is_batch(number: int) -> bool:
    return 0 < number < (1 << 64) - 1


class _Link:
    """A producer's engine and buffers for one consumer.

    Attributes:
        users: Writes under way.
        over: No write begins any more; the last one drops the engine.
        broken: A write has failed, so the others fail, too.
    """

    def __init__(self, address: str, peer: _EngineAddress) -> None:
        self.address = address
        self.peer = peer
        self.users = 0
        self.over = False
        self.broken = False
        self.dropped = threading.Event()
        # By TCP the other end does not connect to this one.
        reached = peer.protocol != _TCP
        self.engine = _Engine(local_host_towards(peer.host), peer.protocol, reached=reached)
        self.buffers = RegisteredBuffers(self.engine.register, self.engine.deregister, keep=BUFFERS)
        self._asked = threading.Event()
        self._answered = False
        threading.Thread(
            target=self._open, args=(self.engine,), name="epd-mooncake-open", daemon=True
        ).start()

    def _open(self, engine: _Engine) -> None:
        try:
            self._answered = engine.open(self.peer.name)
        finally:
            self._asked.set()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait for the consumer's answer; `PeerLostError` if it cannot be reached."""
        if not self._asked.wait(timeout_s):
            return False
        if not self._answered:
            raise PeerLostError(f"mooncake cannot reach the consumer at {self.peer.name}")
        return True

    def check(self) -> None:
        """Raise `PeerLostError` if another write has failed."""
        if self.broken:
            raise PeerLostError(
                f"another write to the consumer at {self.peer.name} failed meanwhile"
            )

    def has_ended(self) -> bool:
        """Return whether the consumer has certainly ended; by RDMA that is never known."""
        return not self.users and has_hung_up(self.peer.host, self.peer.data_ports)

    def retire(self) -> None:
        """End with the last write; the caller has the transport's lock."""
        self.over = True
        if not self.users:
            self.drop()

    def drop(self) -> None:
        """Drop the unused engine, with all that it sends."""
        # Bytes in the kernel's buffers would still arrive.
        reset_on_close(self.peer.host, self.peer.data_ports)
        self.engine.drop()
        self.dropped.set()


class MooncakeTransport(Transport):
    """Writes encoder outputs into pools of consumers, by an engine for each."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._protocol = protocol_of(copies.platform.name)
        self._lock = threading.Lock()
        self._links = Connections(self._make_link, _Link.retire)

    def write(self, item: SlotWrite) -> None:
        """See `Transport.write`; the address says where the consumer's engine and memory are."""
        self._check(item)
        peer = _parse(item.address)
        if peer.protocol != self._protocol:
            raise UnsupportedError(
                f"mooncake moves bytes by {self._protocol} here and by {peer.protocol} at the "
                "consumer: another path is taken"
            )
        check_slot(item.slot, peer.nbytes)
        host = self._copies.to_host(item.src, after=item.computed, deadline_s=item.deadline_s)
        link = self._enter(item.address)
        try:
            self._open(link, item)
            buffer = link.buffers.fill(host)
            self._copies.check_lease(item.deadline_s)
            self._send(link, buffer.memory, item)
            link.buffers.give_back(buffer)
        except BaseException:
            # The engine may still read the buffer.
            self._leave(link, sound=False)
            raise
        self._leave(link, sound=True)

    def close(self) -> None:
        """Drop all engines."""
        with self._lock:
            self._links.close()

    def _make_link(self, address: str) -> _Link:
        peer = _parse(address)
        try:
            link = _Link(address, peer)
        except OSError as error:
            raise PeerLostError(f"no way leads to the consumer at {peer.name}: {error}") from error
        trace("path.opened", path="mooncake", address=peer.name)
        return link

    def _enter(self, address: str) -> _Link:
        with self._lock:
            if self._links.get(address) is None:
                # A restarted consumer has another address.
                self._links.close_where(_Link.has_ended)
            link = self._links.use(address)
            link.users += 1
            return link

    def _leave(self, link: _Link, *, sound: bool) -> None:
        """End a write; one that failed waits for the end of the engine."""
        with self._lock:
            link.users -= 1
            if not sound:
                link.over = link.broken = True
                if self._links.get(link.address) is link:
                    self._links.drop(link.address)
            last = link.over and not link.users
        if last:
            link.drop()
        elif not sound and not link.dropped.wait(_DROP_S):
            logger.error("mooncake's engine for %s does not end", link.peer.name)

    def _open(self, link: _Link, item: SlotWrite) -> None:
        while not link.wait_open(_LOOK_S):
            if self._copies.clock() >= item.deadline_s:
                raise TransportTimeoutError(
                    f"slot {item.slot.generation}: the consumer's engine at {link.peer.name} did "
                    "not answer before the lease ended; the instance is gone or overloaded"
                )
            link.check()

    def _send(self, link: _Link, source: torch.Tensor, item: SlotWrite) -> None:
        engine, name, slot = link.engine, link.peer.name, item.slot
        target = link.peer.base + slot.offset
        batch = engine.begin_write(name, source.data_ptr(), target, slot.nbytes)
        if batch is None:
            raise PeerLostError(f"mooncake cannot write to the consumer at {name}")
        while (status := engine.status(batch)) == _UNDER_WAY:
            if self._copies.clock() >= item.deadline_s:
                raise late_write(slot, "mooncake")
            link.check()
            time.sleep(_POLL_S)
        if status != _DONE:
            raise PeerLostError(f"mooncake's transfer failed: {name} is gone")


class MooncakeReceiver(PathReceiver):
    """Registers the pool for producers; the engine's own threads do the rest.

    The engine uses neither fence nor keys.
    """

    def __init__(self, end: ReceivingEnd) -> None:
        protocol = protocol_of(end.platform)
        memory = end.memory()
        self._memory = memory.tensor(0, memory.nbytes)
        self._engine = _Engine(end.host, protocol, reached=is_off_host(end.host))
        try:
            self._engine.register(self._memory)
        except BaseException:
            self._engine.drop()
            raise
        self.address = as_address(
            _EngineAddress(
                protocol,
                end.host,
                self._engine.port,
                self._engine.data_ports,
                self._memory.data_ptr(),
                memory.nbytes,
            )
        )

    def close(self) -> None:
        """See `PathReceiver.close`."""
        self._engine.drop()

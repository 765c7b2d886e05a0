"""``collective``: a group of two for each pair of instances, made and torn down at run time.

Both ends take part: the consumer's worker has a thread for each producer. They agree over a TCP
connection, one frame after the other::

    encode worker                    PD worker (rank 0)
      │ Join(name) ──────────────────▶ │
      │ ◀─────────────── Answer(port)  │   both make the group
      │ Put(slot) ───────────────────▶ │   once the item is computed
      │ ◀────────────────────── Answer │   or a problem
      │ group.send ═══════════════════▶ group.recv, then one copy into the slot
      │ ◀────────────────────── Answer │
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
import uuid
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec
import torch

from epd_portable.errors import (
    CapacityError,
    EPDError,
    LeaseExpiredError,
    PeerLostError,
    ProtocolError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.log import trace
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.paths.base import (
    PathReceiver,
    PathWriter,
    ReceivingEnd,
    RevokedFence,
    SlotWrite,
)
from epd_portable.wire.codec import reader
from epd_portable.wire.descriptors import SlotDescriptor

if TYPE_CHECKING:
    from epd_portable.transfer.curve import CurveKeys

logger = logging.getLogger(__name__)

CONSUMER_RANK, PRODUCER_RANK = 0, 1
MAX_FRAME_BYTES = 4096
FRAME_PAUSE_S = 2
"""Longest time between two bytes of a frame."""
JOIN_TIMEOUT_S = 10.0
MAX_WRITE_S = 3600.0
"""Longest wait for an item, regardless of its lease."""
_POLL_S = 0.1
_STOP_GRACE_S = 5.0


class Join(msgspec.Struct, frozen=True, tag="join 3"):
    """The producer requests a group of this name; the reply has the port of the meeting point.

    The tag changes with what groups exchange: gloo ends a process that receives more than it
    expects, and while a topology is updated two versions of this package run side by side.
    """

    name: str


class Put(msgspec.Struct, frozen=True, tag="put"):
    """The producer will send an item within ``timeout_s``; with a reply before and after it."""

    slot: SlotDescriptor
    timeout_s: float


class Answer(msgspec.Struct, frozen=True):
    """The reply to both; with a problem the item is not written."""

    problem: str = ""
    port: int = 0


_encode = msgspec.msgpack.encode
_read_request = reader(Join | Put, "a request to join or to take an item")
_read_answer = reader(Answer, "a reply")


def frames_over(connected: socket.socket) -> Connection:
    """Return a connection for frames; a frame that stalls raises ``OSError``."""
    connected.setblocking(True)
    # By Nagle's algorithm the second of two small frames would wait for a delayed ack.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", FRAME_PAUSE_S, 0))
    return Connection(connected.detach())


class CollectiveWriter(PathWriter):
    """Has one group with each consumer; writes to the same consumer take turns."""

    def __init__(self, copies: DeviceCopies, keys: CurveKeys) -> None:
        super().__init__(copies, keys)
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}

    def write(self, item: SlotWrite) -> None:
        """See `PathWriter.write`; the address is that of the consumer's `CollectiveReceiver`."""
        self._check(item)
        over: list[_Link] = []
        with self._lock:
            link = self._links.get(item.address)
            if link is None or link.closed:
                # A consumer that restarts has another address: links to the former one are over.
                gone = [known for known, each in self._links.items() if each.is_over()]
                over = [self._links.pop(known) for known in gone]
                link = self._links[item.address] = _Link(self.copies, item.address)
        for each in over:
            each.close()
        # Before the turn of this item begins: meanwhile the consumer's device would spin in the
        # library's kernel, and other items would wait.
        item.computed.synchronize(item.deadline_s - self.copies.clock())
        link.write(item)

    def close(self) -> None:
        """Leave all groups."""
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()


class _Link:
    """The producer's end of one pair; any failure closes it, and the next write makes another."""

    def __init__(self, copies: DeviceCopies, address: str) -> None:
        self._copies = copies
        self._address = address
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._group: CollectiveGroup | None = None
        self.closed = False

    def write(self, item: SlotWrite) -> None:
        if not self._lock.acquire(timeout=self._left(item.deadline_s)):
            raise TransportTimeoutError(
                f"{self._address} was busy with other items until the lease of slot "
                f"{item.slot.generation} ended; raise transfer.lease_s"
            )
        try:
            if self.closed:
                raise PeerLostError(f"the group with {self._address} failed in another write")
            self._write(item)
        except BaseException:
            self.close()
            raise
        finally:
            self._lock.release()

    def is_over(self) -> bool:
        """Return whether the pair has failed or the consumer has gone; false during a write."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # Between requests nothing comes from a consumer but the end of the connection.
            return self.closed or (self._connection is not None and self._connection.poll(0))
        except OSError:
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        self.closed = True
        if self._group is not None:
            self._group.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()

    def _write(self, item: SlotWrite) -> None:
        copies, deadline_s = self._copies, item.deadline_s
        group = self._group or self._join(deadline_s)
        self._request(Put(item.slot, self._left(deadline_s)), deadline_s)
        with copies.platform.stream(copies.index):
            try:
                group.send(item.src, self._left(deadline_s))
            except TransportTimeoutError as error:
                raise TransportTimeoutError(
                    f"{self._address} did not take the item within the lease: {error}; "
                    "raise transfer.lease_s"
                ) from error
        self._read_answer(deadline_s)

    def _join(self, deadline_s: float) -> CollectiveGroup:
        host, _, port = self._address.rpartition(":")
        try:
            connected = socket.create_connection((host, int(port)), self._left(deadline_s))
        except TimeoutError as error:
            raise TransportTimeoutError(f"{self._address} did not reply in time") from error
        except (OSError, ValueError, OverflowError) as error:
            raise PeerLostError(f"no receiver at {self._address!r}: {error}") from error
        self._connection = frames_over(connected)
        name = uuid.uuid4().hex
        answer = self._request(Join(name), deadline_s)
        where = Rendezvous(host=host, port=answer.port, name=name, rank=PRODUCER_RANK)
        self._group = self._copies.platform.new_group(
            where, index=self._copies.index, timeout_s=self._left(deadline_s)
        )
        trace("path.opened", path="collective", address=self._address)
        return self._group

    def _request(self, request: Join | Put, deadline_s: float) -> Answer:
        assert self._connection is not None
        try:
            self._connection.send_bytes(_encode(request))
        except OSError as error:
            raise PeerLostError(f"{self._address} is gone: {error}") from error
        return self._read_answer(deadline_s)

    def _read_answer(self, deadline_s: float) -> Answer:
        assert self._connection is not None
        try:
            if not self._connection.poll(self._left(deadline_s)):
                raise TransportTimeoutError(f"no reply from {self._address} within the lease")
            answer: Answer = _read_answer(self._connection.recv_bytes(MAX_FRAME_BYTES))
        except (OSError, EOFError) as error:
            raise PeerLostError(f"{self._address} is gone: {error}") from error
        except ProtocolError as error:
            raise ProtocolError(f"{self._address}: {error}") from error
        if answer.problem:
            raise LeaseExpiredError(f"{self._address} refused: {answer.problem}")
        return answer

    def _left(self, deadline_s: float) -> float:
        left_s = deadline_s - self._copies.clock()
        if left_s <= 0:
            raise TransportTimeoutError(f"{self._address} did not take the item within the lease")
        return left_s


class CollectiveReceiver(PathReceiver):
    """The consumer's end of all pairs: one thread that listens, and one for each producer."""

    def __init__(self, end: ReceivingEnd) -> None:
        assert end.copies is not None and isinstance(end.fence, RevokedFence), "in a worker"
        self._memory = end.memory
        self._copies = end.copies
        self._fence = end.fence
        try:
            self._server = socket.create_server((end.host, 0))
        except OSError as error:
            raise TransportError(f"cannot receive on {end.host}: {error}") from error
        self._server.settimeout(_POLL_S)
        self._meeting_point = RendezvousHost(end.host)
        self.address = f"{end.host}:{self._server.getsockname()[1]}"
        self._stop = threading.Event()
        self._pairs: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._listen, name="epd-collective", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `PathReceiver.close`; waits `_STOP_GRACE_S` at most for a producer in mid-item."""
        self._stop.set()
        self._thread.join()
        self._meeting_point.close()  # Ends the wait for a producer that stopped while it joined.
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for pair in self._pairs:
            pair.join(max(0.0, deadline_s - time.monotonic()))
        self._server.close()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                accepted, _ = self._server.accept()
                self._begin_pair(frames_over(accepted))
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:  # No file or no thread is left.
                logger.warning("a producer cannot connect to %s: %s", self.address, error)
                self._stop.wait(_POLL_S)

    def _begin_pair(self, connection: Connection) -> None:
        pair = threading.Thread(
            target=self._serve, args=(connection,), name="epd-collective-pair", daemon=True
        )
        try:
            pair.start()
        except RuntimeError:
            connection.close()
            raise
        self._pairs = [each for each in self._pairs if each.is_alive()] + [pair]

    def _serve(self, connection: Connection) -> None:
        """Serve one producer until it goes; any error ends the pair, and the producer rejoins."""
        group: CollectiveGroup | None = None
        staging = _Staging(self._copies)
        join_by_s = time.monotonic() + JOIN_TIMEOUT_S
        try:
            self._copies.platform.set_device(self._copies.index)
            while not self._stop.is_set():
                if not connection.poll(_POLL_S):
                    if group is None and time.monotonic() > join_by_s:
                        raise TransportTimeoutError("who connected did not join")
                    continue
                request: Join | Put = _read_request(connection.recv_bytes(MAX_FRAME_BYTES))
                if isinstance(request, Join) != (group is None):
                    raise ProtocolError("a producer joins once, and then puts items")
                if isinstance(request, Join):
                    group = self._join(connection, request)
                else:
                    assert group is not None
                    self._take(connection, group, staging, request)
        except EOFError:
            pass  # The producer has left.
        except (OSError, EPDError, ValueError) as error:
            logger.warning("receiving by a group ended: %s", error)
        finally:
            if group is not None:
                group.close()
            connection.close()

    def _join(self, connection: Connection, request: Join) -> CollectiveGroup:
        host, port = self._meeting_point.host, self._meeting_point.port
        connection.send_bytes(_encode(Answer(port=port)))
        where = Rendezvous(host=host, port=port, name=request.name, rank=CONSUMER_RANK)
        copies = self._copies
        return copies.platform.new_group(where, index=copies.index, timeout_s=JOIN_TIMEOUT_S)

    def _take(
        self, connection: Connection, group: CollectiveGroup, staging: _Staging, put: Put
    ) -> None:
        def answer(problem: str = "") -> None:
            connection.send_bytes(_encode(Answer(problem=problem)))

        copies = self._copies
        timeout_s = min(put.timeout_s, MAX_WRITE_S)
        deadline_s = copies.clock() + timeout_s
        with copies.platform.stream(copies.index):
            try:
                target = self._target(put)
                # Not into the slot itself: it may be revoked before the last byte has come.
                arrived = staging.reserve(put.slot.nbytes)
            except (CapacityError, LeaseExpiredError, ValueError) as error:
                answer(str(error))
                return
            answer()
            group.recv(arrived, timeout_s)
            complete = copies.platform.record_event()
        with self._fence.writing(put.slot) as leased:
            if leased:
                copies.write(target, arrived, after=complete, deadline_s=deadline_s)
        answer("" if leased else "the slot was taken back")

    def _target(self, put: Put) -> torch.Tensor:
        """Return the slot's memory; may raise `ValueError` or `LeaseExpiredError`."""
        if not put.timeout_s > 0:
            raise ValueError(f"{put.timeout_s} s to write an item: must be positive")
        target = self._memory().tensor(put.slot.offset, put.slot.nbytes)
        with self._fence.writing(put.slot) as leased:
            if not leased:
                raise LeaseExpiredError("the slot is not leased any more")
        return target


class _Staging:
    """Memory in which one producer's items arrive, one at a time; grows to the largest."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._memory: torch.Tensor | None = None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Return ``(nbytes,)`` uint8 on the device; may raise `CapacityError`."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None
            self._memory = self._copies.allocate(
                nbytes,
                what=f"an arriving item of {nbytes} bytes",
                remedy="lower gpu_memory_utilization, or set transfer.path to another path",
            )
        return self._memory[:nbytes]

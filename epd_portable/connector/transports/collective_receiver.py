"""The consumer's end of ``collective``, in the worker of the instance's first rank."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.transport import (
    PathReceiver,
    ReceiveMemory,
    ReceivingEnd,
    RevokedFence,
)
from epd_portable.connector.transports.collective import (
    CONSUMER_RANK,
    MAX_FRAME_BYTES,
    PRODUCER_RANK,
    Answer,
    Join,
    Put,
    encode,
    frames_over,
    read_request,
)
from epd_portable.errors import (
    CapacityError,
    EPDError,
    LeaseExpiredError,
    ProtocolError,
    TransportError,
)
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous
from epd_portable.platforms.collectives_torch import RendezvousHost

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
MAX_WRITE_S = 3600.0
"""Longest wait for an item, whatever its lease."""
_POLL_S = 0.1
_STOP_GRACE_S = 5.0


class CollectiveReceiver(PathReceiver):
    """The consumer's end of all pairs: one thread that listens, and one for each producer.

    Args:
        memory: See `ReceivingEnd.memory`.
        copies: Of the worker's device.
        host: Address to listen on.
        fence: Refuses writes to revoked slots.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(
        self,
        memory: Callable[[], ReceiveMemory],
        copies: DeviceCopies,
        *,
        host: str,
        fence: RevokedFence,
    ) -> None:
        self._memory = memory
        self._copies = copies
        self._fence = fence
        try:
            self._server = socket.create_server((host, 0))
        except OSError as error:
            raise TransportError(f"cannot receive on {host}: {error}") from error
        self._server.settimeout(_POLL_S)
        self._meeting_point = RendezvousHost(host)
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._stop = threading.Event()
        self._pairs: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._listen, name="epd-collective", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, end: ReceivingEnd) -> Self:
        """See `PathReceiver.open`."""
        assert end.copies is not None and isinstance(end.fence, RevokedFence), "in a worker"
        return cls(end.memory, end.copies, host=end.host, fence=end.fence)

    @property
    def address(self) -> str:
        """See `PathReceiver.address`."""
        return self._address

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
            except TimeoutError:
                continue
            except OSError as error:
                logger.warning("a producer cannot connect to %s: %s", self._address, error)
                self._stop.wait(_POLL_S)
                continue
            self._pairs = [pair for pair in self._pairs if pair.is_alive()]
            pair = threading.Thread(
                target=self._serve,
                args=(frames_over(accepted),),
                name="epd-collective-pair",
                daemon=True,
            )
            self._pairs.append(pair)
            pair.start()

    def _serve(self, connection: Connection) -> None:
        """Serve one producer until it goes; any error ends the pair, and the producer rejoins."""
        group: CollectiveGroup | None = None
        staging = _Staging(self._copies)
        try:
            self._copies.platform.set_device(self._copies.index)
            while not self._stop.is_set():
                if not connection.poll(_POLL_S):
                    continue
                request: Join | Put = read_request(connection.recv_bytes(MAX_FRAME_BYTES))
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
        connection.send_bytes(encode(Answer(port=port)))
        where = Rendezvous(host=host, port=port, name=request.name, rank=CONSUMER_RANK, size=2)
        copies = self._copies
        return copies.platform.new_group(where, index=copies.index, timeout_s=JOIN_TIMEOUT_S)

    def _take(
        self, connection: Connection, group: CollectiveGroup, staging: _Staging, put: Put
    ) -> None:
        slot, copies = put.slot, self._copies
        timeout_s = min(put.timeout_s, MAX_WRITE_S)
        deadline_s = copies.clock() + timeout_s
        with copies.platform.stream(copies.index):
            try:
                target = self._target(put)
                # Not into the slot itself: it may be revoked before the last byte has come.
                arrived = staging.reserve(slot.nbytes)
            except (CapacityError, LeaseExpiredError, ValueError) as error:
                connection.send_bytes(encode(Answer(problem=str(error))))
                return
            connection.send_bytes(encode(Answer()))
            group.recv(arrived, PRODUCER_RANK, timeout_s)
            complete = copies.platform.record_event()
        with self._fence.writing(slot) as leased:
            if leased:
                copies.write(target, arrived, after=complete, deadline_s=deadline_s)
        problem = "" if leased else "the slot was taken back"
        connection.send_bytes(encode(Answer(problem=problem)))

    def _target(self, put: Put) -> torch.Tensor:
        """Return the slot's memory.

        Raises:
            ValueError: The slot is not in this memory, or there is no time to write it.
            LeaseExpiredError: It was taken back.
        """
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
        """Return ``(nbytes,)`` uint8 on the worker's device, in place of the former one.

        Raises:
            CapacityError: The device has no room for it.
        """
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None
            self._memory = self._copies.allocate(
                nbytes,
                what=f"an arriving item of {nbytes} bytes",
                remedy="lower gpu_memory_utilization, or set transfer.path to another path",
            )
        return self._memory[:nbytes]

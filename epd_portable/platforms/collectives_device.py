"""How a group moves device tensors: by a backend of its own, kept on deadlines.

NCCL and HCCL block without a limit of ours while they make a communicator, and while they take one
down whose kernel still waits for a dead peer. Both happen in threads that a caller waits for no
longer than its deadline; when the library gives up by itself, the thread ends.

A tensor goes from one rank to the other as a broadcast of two, not as torch's send and receive:
those make a second communicator, on HCCL with a buffer that the backend's options do not bound.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import BroadcastOptions, Store  # type: ignore[attr-defined]

from epd_portable.errors import PlatformError, TransportError, TransportTimeoutError
from epd_portable.platforms.collectives import Deadline, finish_within

logger = logging.getLogger(__name__)

_WORK_POLL_S = 20e-6
_RELEASE_WAIT_S = 2.0
WORD_LENGTH = 2
"""Numbers in a control word."""


class DataBackend(Protocol):
    """A torch.distributed backend whose work completes on a device, such as NCCL or HCCL."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Queue a broadcast from ``options.rootRank``; returns torch's ``Work``."""

    def abort(self) -> None:
        """Stop kernels that wait for a peer, where the library can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSide:
    """What a platform supplies to groups of one of its devices.

    Attributes:
        make_backend: Makes a backend from a store, a rank and the size 2; talks to no peer yet.
        use_device: Makes the device the calling thread's current one.
        end_work: Lets go of completed work; raises ``RuntimeError`` if it failed.
        on_failure: Called when work on the device failed, or was late.
        turns: Taken to make a communicator; ``None`` where a process can make several at once.
    """

    make_backend: Callable[[Store, int, int], DataBackend]
    use_device: Callable[[], None]
    end_work: Callable[[Any], None]
    on_failure: Callable[[], None]
    turns: Turns | None = None


class DeviceLink:
    """Moves tensors between this rank and one other.

    Args:
        store: Of this pair alone.
        rank: 0 or 1.

    Raises:
        RuntimeError: The library makes no backend.
    """

    def __init__(self, side: DeviceSide, store: Store, rank: int) -> None:
        self._side = side
        self._rank = rank
        self._backend: DataBackend | None = side.make_backend(store, rank, 2)

    def connect(self, device: torch.device, deadline: Deadline) -> None:
        """Make the communicator, and use it once in both directions; raises as `move`."""

        def meet() -> None:
            self._side.use_device()
            box = torch.zeros(1, device=device)
            for root in (0, 1):
                self._broadcast(box, root, deadline)

        finish_within(deadline, meet, "epd-connect")

    def move(self, tensor: torch.Tensor, deadline: Deadline, *, out: bool) -> None:
        """Give a tensor to the other rank, or fill it from there; returns when the device is done.

        Raises:
            RuntimeError: The work failed, or is not complete at the deadline.
            TransportError: The link was closed meanwhile.
        """
        self._side.use_device()
        self._broadcast(tensor, self._rank if out else 1 - self._rank, deadline)

    def close(self) -> None:
        """Let go of the backend; returns after 2 s at most, whatever the library does."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        # The list holds the last reference, so that the thread drops it and not the caller.
        held = [backend]
        del backend
        thread = threading.Thread(target=_release, args=(held,), name="epd-release", daemon=True)
        thread.start()
        thread.join(_RELEASE_WAIT_S)
        if thread.is_alive():
            logger.warning(
                "the collective library does not let go of a communicator; its device memory comes "
                "back when its own timeout has passed"
            )

    def _broadcast(self, tensor: torch.Tensor, root: int, deadline: Deadline) -> None:
        """Queue a broadcast and block until the device has done it; torch's own wait does not."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        work = self._open().broadcast([tensor], options)
        try:
            while not work.is_completed():
                self._open()
                if deadline.passed():
                    raise RuntimeError("device work was not complete at the deadline")
                time.sleep(_WORK_POLL_S)
            self._side.end_work(work)
        except RuntimeError:
            self._side.on_failure()
            raise

    def _open(self) -> DataBackend:
        if self._backend is None:
            raise TransportError("the group was closed while a call was under way")
        return self._backend


def _release(held: list[DataBackend]) -> None:
    try:
        held[0].abort()
    except RuntimeError as error:
        logger.warning("the collective library failed to abort: %s", error)
    held.clear()


class Turns:
    """Turns at making communicators, for libraries that can make only one at a time in a process.

    A communicator is made by two processes together, so both must have their turn at once. Each
    pair asks the process with the lower identity first: with one order for all, processes that wait
    for each other's turns cannot lock up, however many groups they make at the same moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = secrets.randbits(62)

    @contextmanager
    def with_peer(
        self, put: Callable[[Sequence[int]], None], get: Callable[[], list[int]], deadline: Deadline
    ) -> Iterator[None]:
        """Have the turn of this process and that of the peer, which makes the same call.

        A turn ends with its block, even if a thread of the library is stuck beyond the deadline:
        otherwise this process could never make a group again.

        Args:
            put: Starts to give `WORD_LENGTH` numbers to the peer; does not wait for it.
            get: Returns the peer's next numbers; fails when it is gone, and at the deadline.
            deadline: Of the whole block.

        Raises:
            TransportTimeoutError: Other groups of this process took until the deadline.
            PlatformError: The peer is in this process, so both turns can never be obtained.
        """
        own = [self._token, os.getpid()]
        put(own)
        peer = get()
        if peer == own:
            raise PlatformError(
                "two ranks of one group in one process, where this platform's library can make "
                "only one communicator at a time; put each rank in a process of its own"
            )
        if peer < own:
            get()
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise TransportTimeoutError(
                "other groups of this process were being made, one at a time, for all of "
                f"{deadline.timeout_s:g} s; allow more time or make fewer groups at once"
            )
        try:
            put(own)
            if own < peer:
                get()
            yield
        finally:
            self._lock.release()

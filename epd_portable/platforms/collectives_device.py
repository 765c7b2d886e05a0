"""Groups that move device tensors: by a backend of their own, kept on deadlines.

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
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    Store,
    TCPStore,
)

from epd_portable.errors import PlatformError, TransportError, TransportTimeoutError
from epd_portable.platforms.base import Platform
from epd_portable.platforms.collectives import (
    CollectiveGroup,
    Deadline,
    Rendezvous,
    finish_within,
)
from epd_portable.platforms.collectives_torch import TorchCollectiveGroup

logger = logging.getLogger(__name__)

_WORK_POLL_S = 20e-6
_RELEASE_WAIT_S = 2.0


class CollectivePlatform(Platform):
    """A platform whose devices exchange tensors by a collective library of their own."""

    turns: Turns | None = None
    """For a collective library that can make only one communicator at a time in a process."""

    @abstractmethod
    def data_backend(self, store: Store, rank: int, size: int) -> Any:
        """Make a backend of torch.distributed that moves device tensors; talks to no peer yet."""

    @abstractmethod
    def end_work(self, work: Any) -> None:
        """Let go of completed work of that backend; raises ``RuntimeError`` if it failed."""

    def new_group(self, rendezvous: Rendezvous, *, index: int, timeout_s: float) -> CollectiveGroup:
        """Join a group that moves device tensors by the platform's own backend."""
        self.set_device(index)
        return DeviceCollectiveGroup(rendezvous, platform=self, index=index, timeout_s=timeout_s)

    def group_failed(self) -> None:
        """Note that a group of this process lost its peer, or was late, while a tensor moved."""


class DeviceCollectiveGroup(TorchCollectiveGroup):
    """A group of two devices of a platform, which supplies the library's backend."""

    def __init__(
        self, rendezvous: Rendezvous, *, platform: CollectivePlatform, index: int, timeout_s: float
    ) -> None:
        self._platform = platform
        self._backend: Any = None
        super().__init__(rendezvous, device=platform.device(index), timeout_s=timeout_s)

    def _connect(self, rendezvous: Rendezvous, store: TCPStore, deadline: Deadline) -> None:
        """Make the communicator, and use it once in both directions."""
        place = PrefixStore(f"{rendezvous.name}/tensors", store)
        turn: AbstractContextManager[None] = nullcontext()
        if self._platform.turns is not None:
            turn = self._platform.turns.with_peer(
                lambda word: self._put(word, deadline), lambda: self._get(deadline), deadline
            )
        with turn:
            try:
                self._backend = self._platform.data_backend(place, self.rank, 2)
            except RuntimeError as error:
                raise PlatformError(f"no collectives on {self.device}: {error}") from error

            def meet() -> None:
                self._platform.set_device(self.device.index)
                box = torch.zeros(1, device=self.device)
                for root in (0, 1):
                    self._broadcast(box, root, deadline)

            with self._translated(deadline):
                finish_within(deadline, meet, "epd-connect")
        self._flush(deadline)

    def _move(self, tensor: torch.Tensor, deadline: Deadline, *, out: bool) -> None:
        with self._translated(deadline):
            self._platform.set_device(self.device.index)
            self._broadcast(tensor, self.rank if out else 1 - self.rank, deadline)

    def _broadcast(self, tensor: torch.Tensor, root: int, deadline: Deadline) -> None:
        """Queue a broadcast and block until the device has done it; torch's own wait does not."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        work = self._open_backend().broadcast([tensor], options)
        try:
            while not work.is_completed():
                self._open_backend()
                if deadline.passed():
                    raise RuntimeError("device work was not complete at the deadline")
                time.sleep(_WORK_POLL_S)
            self._platform.end_work(work)
        except RuntimeError:
            self._platform.group_failed()
            raise

    def _open_backend(self) -> Any:
        if self._backend is None:
            raise TransportError("the group was closed while a call was under way")
        return self._backend

    def _release(self) -> None:
        """Let go of the backend; returns after 2 s at most, whatever the library does."""
        super()._release()
        backend, self._backend = self._backend, None
        if backend is None:
            return
        # The list holds the last reference, so that the thread drops it and not the caller.
        held = [backend]
        del backend
        thread = threading.Thread(target=_abort, args=(held,), name="epd-release", daemon=True)
        thread.start()
        thread.join(_RELEASE_WAIT_S)
        if thread.is_alive():
            logger.warning(
                "the collective library does not let go of a communicator; its device memory comes "
                "back when its own timeout has passed"
            )


def _abort(held: list[Any]) -> None:
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

"""Groups that move device tensors: by a backend of their own, kept on deadlines.

NCCL and HCCL block without a limit of ours while they make a communicator, and while they take one
down whose kernel still waits for a dead peer. Both happen in threads that a caller waits for no
longer than its deadline; when the library ends its wait, the thread ends.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    Store,
)

from epd_portable.errors import PeerLostError, PlatformError, TransportTimeoutError
from epd_portable.platforms.base import Platform
from epd_portable.platforms.collectives import (
    CollectiveGroup,
    Deadline,
    Rendezvous,
    finish_within,
)

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
        """Release completed work of that backend; raises ``RuntimeError`` if it failed."""

    def new_group(self, rendezvous: Rendezvous, *, index: int, timeout_s: float) -> CollectiveGroup:
        self.set_device(index)
        return DeviceCollectiveGroup(rendezvous, platform=self, index=index, timeout_s=timeout_s)

    def group_failed(self) -> None:
        """Note that a group of this process lost its peer, or was late, while a tensor moved."""


class DeviceCollectiveGroup(CollectiveGroup):
    """A group of two devices of a platform, which supplies the library's backend."""

    def __init__(
        self, rendezvous: Rendezvous, *, platform: CollectivePlatform, index: int, timeout_s: float
    ) -> None:
        self._platform = platform
        super().__init__(rendezvous, device=platform.device(index), timeout_s=timeout_s)

    def _connect(self, store: Store, local_address: str, deadline: Deadline) -> None:
        """Make the communicator, and use it once in both directions."""
        turn: AbstractContextManager[None] = nullcontext()
        if self._platform.turns is not None:
            turn = self._platform.turns.with_peer(Words(store, self.rank, deadline), deadline)
        with self._translated(deadline), turn:
            try:
                place = PrefixStore("tensors", store)
                self._backend = self._platform.data_backend(place, self.rank, 2)
            except RuntimeError as error:
                raise PlatformError(f"no collectives on {self.device}: {error}") from error

            def meet() -> None:
                self._platform.set_device(self.device.index)
                box = torch.zeros(1, device=self.device)
                for root in (0, 1):
                    self._move(box, deadline, out=root == self.rank)

            finish_within(deadline, meet, "epd-connect")

    def _move(self, tensor: torch.Tensor, deadline: Deadline, *, out: bool) -> None:
        """Queue a broadcast and block until the device has done it; torch's own wait does not."""
        self._platform.set_device(self.device.index)
        options = BroadcastOptions()
        options.rootRank = self.rank if out else self._peer
        options.rootTensor = 0
        work = self._open().broadcast([tensor], options)
        try:
            while not work.is_completed():
                self._open()
                if deadline.passed():
                    raise RuntimeError("device work was not complete at the deadline")
                time.sleep(_WORK_POLL_S)
            self._platform.end_work(work)
        except RuntimeError:
            self._platform.group_failed()
            raise

    def _release(self) -> None:
        """Release the backend; returns after 2 s at most, regardless of the library."""
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
                "the collective library does not release a communicator; its device memory comes "
                "back when its own timeout has passed"
            )


def _abort(held: list[Any]) -> None:
    try:
        held[0].abort()
    except RuntimeError as error:
        logger.warning("the collective library failed to abort: %s", error)
    held.clear()


class Words:
    """Words between the two ranks of a group that is being made, by the store where they meet."""

    def __init__(self, store: Store, rank: int, deadline: Deadline) -> None:
        self._store = store
        self._rank = rank
        self._deadline = deadline
        self._put, self._got = count(), count()

    def put(self, word: str) -> None:
        """Give the peer a word; does not wait for it. An empty one ends the group."""
        self._store.set(f"{self._rank}-{next(self._put)}", word)

    def get(self) -> str:
        """Return the peer's next word; raises at the deadline, and for an empty one."""
        key = f"{1 - self._rank}-{next(self._got)}"
        self._store.wait([key], self._deadline.remaining())
        word = self._store.get(key).decode()
        if not word:
            raise PeerLostError("the other rank has left while the group was made")
        return word


class Turns:
    """Turns at making communicators, for libraries that can make only one at a time in a process.

    A communicator is made by two processes together, so both must have their turn at once. Each
    pair serves the process with the lower identity first: with one order for all, processes that
    wait for each other's turns cannot lock up, however many groups they make at the same moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = secrets.token_hex(8)

    @contextmanager
    def with_peer(self, words: Words, deadline: Deadline) -> Iterator[None]:
        """Have the turn of this process and that of the peer, which makes the same call.

        A turn ends with its block, even if a thread of the library is stuck beyond the deadline:
        otherwise this process could never make a group again.

        Args:
            words: To and from the peer.
            deadline: Of the whole block.

        Raises:
            TransportTimeoutError: Other groups of this process took until the deadline.
            PlatformError: The peer is in this process, so both turns can never be obtained.
        """
        own = f"{self._token} {os.getpid()}"
        words.put(own)
        peer = words.get()
        if peer == own:
            raise PlatformError(
                "two ranks of one group in one process, where this platform's library can make "
                "only one communicator at a time; put each rank in a process of its own"
            )
        if peer < own:
            words.get()
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            words.put("")
            raise TransportTimeoutError(
                "other groups of this process were being made, one at a time, for all of "
                f"{deadline.timeout_s:g} s; allow more time or make fewer groups at once"
            )
        try:
            words.put(own)
            if own < peer:
                words.get()
            yield
        finally:
            self._lock.release()

"""A group inside one process, for tests and for trying a transport without a network."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from epd_portable.errors import PeerLostError, TransportTimeoutError
from epd_portable.platforms.handshake import Deadline, HandshakeGroup


class _World:
    """What the ranks of one fake group share: their mailboxes and who has left."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.words: dict[tuple[int, int], deque[list[int]]] = {}
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}
        self.gone: set[int] = set()


class FakeCollectiveGroup(HandshakeGroup):
    """CPU tensors between threads of one process.

    It reproduces the argument checks, the matching of calls, deadlines, and what each rank sees
    when another one closes its group: all of it is the code that real groups run.
    It does not reproduce processes that die, partial transfers, device streams or speed.
    """

    def __init__(self, world: _World, *, rank: int, size: int) -> None:
        super().__init__(name="fake", rank=rank, size=size, device=torch.device("cpu"))
        self._world = world

    @classmethod
    def make(cls, size: int) -> list[FakeCollectiveGroup]:
        """Return all ranks of a new group; each is for one thread.

        Raises:
            ValueError: ``size`` is below 2.
        """
        if size < 2:
            raise ValueError(f"a group of {size}; it takes at least 2 ranks")
        world = _World()
        return [cls(world, rank=rank, size=size) for rank in range(size)]

    def _put(self, word: Sequence[int], dst: int, deadline: Deadline) -> None:
        with self._world.changed:
            self._wait(lambda: dst not in self._world.gone, dst, deadline)
            self._world.words.setdefault((self.rank, dst), deque()).append(list(word))
            self._world.changed.notify_all()

    def _flush(self, deadline: Deadline) -> None:
        with self._world.changed:
            for (src, dst), box in list(self._world.words.items()):
                if src == self.rank:
                    self._wait(lambda box=box: not box, dst, deadline)  # type: ignore[misc]

    def _get(self, src: int, deadline: Deadline) -> list[int]:
        with self._world.changed:
            box = self._world.words.setdefault((src, self.rank), deque())
            self._wait(lambda: bool(box), src, deadline)
            word = box.popleft()
            self._world.changed.notify_all()
            return word

    def _move_out(self, tensor: torch.Tensor, dst: int, deadline: Deadline) -> None:
        key = (self.rank, dst)
        with self._world.changed:
            self._world.tensors[key] = tensor
            self._world.changed.notify_all()
            self._wait(lambda: key not in self._world.tensors, dst, deadline)

    def _move_in(self, tensor: torch.Tensor, src: int, deadline: Deadline) -> None:
        key = (src, self.rank)
        with self._world.changed:
            self._wait(lambda: key in self._world.tensors, src, deadline)
            tensor.copy_(self._world.tensors.pop(key))
            self._world.changed.notify_all()

    def _disconnect(self) -> None:
        with self._world.changed:
            self._world.gone.add(self.rank)
            self._world.changed.notify_all()

    def _wait(self, ready: Callable[[], bool], peer: int, deadline: Deadline) -> None:
        """Wait for ``ready``, the end of ``peer`` or of this rank, or the deadline."""
        gone = self._world.gone
        self._world.changed.wait_for(
            lambda: ready() or peer in gone or self.rank in gone, deadline.remaining_s()
        )
        if self.rank not in gone and ready():
            return
        for rank in (self.rank, peer):
            if rank in gone:
                raise PeerLostError(f"group 'fake': rank {rank} closed its group")
        raise TransportTimeoutError(
            f"group 'fake': rank {peer} did not come within {deadline.timeout_s:g} s"
        )

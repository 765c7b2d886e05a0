"""What every group does alike: check a call, match it with the peer's, and only then move bytes.

A mismatch in a collective library ends in a hang, a crash or wrong bytes. Here the two ends
compare shape and dtype first, in host memory, so a mismatch is an error at both ends, and a kernel
that waits for its peer is never started before the peer has come.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

import torch

from epd_portable.errors import EPDError, ProtocolError, TransportError
from epd_portable.platforms.checks import check_timeout
from epd_portable.platforms.collectives import CollectiveGroup

MAX_DIMS = 8
WORD_LENGTH = 3 + MAX_DIMS
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


class WordKind(IntEnum):
    """First number of a control word."""

    SEND = 1
    ACCEPT = 2
    REFUSE = 3


class Deadline:
    """The end of one call."""

    def __init__(self, timeout_s: float) -> None:
        check_timeout(timeout_s)
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, self._end_s - time.monotonic())

    def remaining_ms(self) -> int:
        """Milliseconds left, rounded up, at least 1."""
        return max(1, math.ceil(self.remaining_s() * 1000))

    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end_s


T = TypeVar("T")


def finish_within(deadline: Deadline, call: Callable[[], T], name: str) -> T:
    """Make a call of a library that keeps no deadline of ours, in a thread of its own.

    Args:
        deadline: The longest wait for it.
        call: Raises nothing but ``RuntimeError`` and our own errors.
        name: Of the thread, and of what was done in the error.

    Raises:
        RuntimeError: The call failed, or is not back at the deadline; then its thread ends when the
            library gives up by itself.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except (RuntimeError, EPDError) as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(deadline.remaining_s())
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(f"{name} was not done at the deadline")
    return results[0]


class HandshakeGroup(CollectiveGroup):
    """A group over a control channel for words of numbers and a data channel for tensors.

    Subclasses supply the two channels. Their methods block until done, and raise
    ``TransportTimeoutError`` at the deadline and ``PeerLostError`` when the peer is gone.
    """

    def __init__(self, *, name: str, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._name = name
        self._closed_because = ""
        self._close_lock = threading.Lock()

    @abstractmethod
    def _put(self, word: Sequence[int], dst: int, deadline: Deadline) -> None:
        """Start to give ``WORD_LENGTH`` numbers to another rank; :meth:`_flush` completes it.

        Does not wait for the other rank, so that two that both begin to send find out.
        """

    @abstractmethod
    def _flush(self, deadline: Deadline) -> None:
        """Block until the other ranks have what was put, so that closing cannot lose it."""

    @abstractmethod
    def _get(self, src: int, deadline: Deadline) -> list[int]:
        """Return the next ``WORD_LENGTH`` numbers that another rank put for this one."""

    @abstractmethod
    def _move_out(self, tensor: torch.Tensor, dst: int, deadline: Deadline) -> None:
        """Send the bytes of a tensor that both ends have agreed on."""

    @abstractmethod
    def _move_in(self, tensor: torch.Tensor, src: int, deadline: Deadline) -> None:
        """Receive the bytes of a tensor that both ends have agreed on."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Drop both channels, so that the other ranks find this one gone; called once."""

    def send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> None:
        """See :meth:`CollectiveGroup.send`."""
        offer = self._describe(tensor)
        self._check_peer(dst)
        with self._call(timeout_s) as deadline:
            self._put(offer, dst, deadline)
            answer = self._expect((WordKind.ACCEPT, WordKind.REFUSE), dst, deadline)
            if answer[0] == WordKind.REFUSE:
                raise _mismatch(f"rank {dst} expects", answer, "this rank sends", offer)
            self._move_out(tensor, dst, deadline)

    def recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> None:
        """See :meth:`CollectiveGroup.recv`."""
        wanted = self._describe(tensor)
        self._check_peer(src)
        with self._call(timeout_s) as deadline:
            offer = self._expect((WordKind.SEND,), src, deadline)
            answer = WordKind.ACCEPT if offer == wanted else WordKind.REFUSE
            self._put([int(answer), *wanted[1:]], src, deadline)
            if offer != wanted:
                raise _mismatch(f"rank {src} sends", offer, "this rank expects", wanted)
            self._move_in(tensor, src, deadline)

    def close(self) -> None:
        """See :meth:`CollectiveGroup.close`."""
        self._close("close() was called")

    def _expect(self, kinds: Sequence[WordKind], src: int, deadline: Deadline) -> list[int]:
        word = self._get(src, deadline)
        if word[0] not in kinds:
            wanted = " or ".join(kind.name.lower() for kind in kinds)
            raise ProtocolError(
                f"group {self._name!r}: rank {src} is at {_kind(word[0])} where this rank "
                f"{self.rank} waits for {wanted}; the two ends make calls that do not match"
            )
        return word

    def _peers(self) -> Iterable[int]:
        return (rank for rank in range(self.size) if rank != self.rank)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"rank {peer} as the other end of rank {self.rank} in a group of {self.size}"
            )

    def _describe(self, tensor: torch.Tensor) -> list[int]:
        if tensor.device != self.device:
            raise ValueError(f"tensor is on {tensor.device}; this group moves {self.device}")
        if not tensor.is_contiguous():
            raise ValueError("tensor is not contiguous; pass tensor.contiguous()")
        if tensor.numel() == 0:
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} is empty")
        if tensor.dim() > MAX_DIMS:
            raise ValueError(f"tensor has {tensor.dim()} dimensions; the limit is {MAX_DIMS}")
        if tensor.dtype not in DTYPES:
            known = ", ".join(_dtype(index) for index in range(len(DTYPES)))
            raise ValueError(f"dtype {tensor.dtype} cannot be moved; view it as one of {known}")
        padding = [0] * (MAX_DIMS - tensor.dim())
        return [
            int(WordKind.SEND),
            DTYPES.index(tensor.dtype),
            tensor.dim(),
            *tensor.shape,
            *padding,
        ]

    @contextmanager
    def _call(self, timeout_s: float) -> Iterator[Deadline]:
        deadline = Deadline(timeout_s)
        if self._closed_because:
            raise TransportError(
                f"group {self._name!r} is closed ({self._closed_because}); make a new one"
            )
        try:
            try:
                yield deadline
            except ValueError:
                # The two ends disagree: the other one must learn it too.
                self._flush(deadline)
                raise
            self._flush(deadline)
        except EPDError as error:
            self._close(f"{type(error).__name__}: {error}")
            raise

    def _close(self, reason: str) -> None:
        with self._close_lock:
            if self._closed_because:
                return
            self._closed_because = reason
        self._disconnect()


def _mismatch(theirs: str, their_word: list[int], ours: str, our_word: list[int]) -> ValueError:
    return ValueError(f"{theirs} {_text(their_word)}, {ours} {_text(our_word)}; nothing was moved")


def _kind(number: int) -> str:
    return WordKind(number).name.lower() if number in list(WordKind) else f"word {number}"


def _dtype(index: int) -> str:
    return str(DTYPES[index]).removeprefix("torch.") if index < len(DTYPES) else f"dtype {index}"


def _text(word: list[int]) -> str:
    return f"{_dtype(word[1])}{tuple(word[3 : 3 + word[2]])}"

"""Groups over torch.distributed, made and torn down at run time.

They do not touch torch's default process group, so they are independent of the engine's own groups.
Words travel over gloo on every platform; tensors over gloo on CPU, and as
:mod:`.collectives_device` does it elsewhere.

A mismatch in a collective library ends in a hang, a crash or wrong bytes. So the two ends of a call
compare the number of bytes first, by words, and a mismatch is an error at both ends; a kernel that
waits for its peer is never started before the peer has come.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from epd_portable.errors import (
    EPDError,
    PeerLostError,
    PlatformError,
    ProtocolError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.platforms.collectives import (
    CollectiveGroup,
    Deadline,
    Rendezvous,
    finish_within,
)

WORD_LENGTH = 2
"""Numbers in a control word."""
_WORD_TAG = 1
_DATA_TAG = 2
_BACKLOG = 128


class WordKind(IntEnum):
    """First number of a control word; the second is one of bytes."""

    SEND = 1
    ACCEPT = 2
    REFUSE = 3


class RendezvousHost:
    """The meeting point of any number of groups; one process holds it open, usually rank 0's.

    Listens on ``host`` only. Groups that have been made do not need it any longer.

    Raises:
        PlatformError: The address cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise PlatformError(
                f"cannot listen at {host}:{port}: {error.strerror}; choose another"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # Given a bound socket, because the store itself would listen on every interface.
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Stop listening."""
        self._store = None


class TorchCollectiveGroup(CollectiveGroup):
    """A group of two processes over torch.distributed.

    Args:
        timeout_s: Seconds until both ranks must have joined; positive.

    Raises:
        TransportTimeoutError: The other rank did not join within ``timeout_s``.
        PeerLostError: Nothing listens at the rendezvous, or the other rank left while joining.
        PlatformError: The platform has no collectives.
    """

    def __init__(self, rendezvous: Rendezvous, *, device: torch.device, timeout_s: float) -> None:
        self.rank = rendezvous.rank
        self._peer = 1 - self.rank
        self.device = device
        self._name = rendezvous.name
        self._closed_because = ""
        self._close_lock = threading.Lock()
        deadline = Deadline(timeout_s)
        local_address = _probe(rendezvous, deadline)
        with self._translated(deadline, "the rendezvous"):
            # The process that listens there may be stopped, and then answers neither of them.
            store = finish_within(deadline, lambda: _store(rendezvous, deadline), "epd-rendezvous")
            words = PrefixStore(f"{rendezvous.name}/words", store)
            options = _gloo_options(local_address, deadline)
            self._gloo: Any = finish_within(
                deadline,
                lambda: ProcessGroupGloo(words, self.rank, 2, options),
                "epd-meet",
            )
        self._put_words: deque[tuple[torch.Tensor, Any]] = deque()
        try:
            self._connect(rendezvous, store, deadline)
        except EPDError:
            self.close()
            raise

    def send(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """See :meth:`CollectiveGroup.send`."""
        data = self._bytes(tensor)
        with self._call(timeout_s) as deadline:
            self._put((WordKind.SEND, data.numel()), deadline)
            answer, wanted = self._expect((WordKind.ACCEPT, WordKind.REFUSE), deadline)
            if answer == WordKind.REFUSE:
                raise ValueError(
                    f"rank {self._peer} expects {wanted} bytes, this rank sends {data.numel()}; "
                    "nothing was moved"
                )
            self._move(data, deadline, out=True)

    def recv(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """See :meth:`CollectiveGroup.recv`."""
        data = self._bytes(tensor)
        with self._call(timeout_s) as deadline:
            _, offered = self._expect((WordKind.SEND,), deadline)
            fits = offered == data.numel()
            self._put((WordKind.ACCEPT if fits else WordKind.REFUSE, data.numel()), deadline)
            if not fits:
                raise ValueError(
                    f"rank {self._peer} sends {offered} bytes, this rank expects {data.numel()}; "
                    "nothing was moved"
                )
            self._move(data, deadline, out=False)

    def close(self) -> None:
        """See :meth:`CollectiveGroup.close`."""
        self._close("close() was called")

    def _expect(self, kinds: Sequence[WordKind], deadline: Deadline) -> list[int]:
        word = self._get(deadline)
        if word[0] not in kinds:
            wanted = " or ".join(kind.name.lower() for kind in kinds)
            raise ProtocolError(
                f"group {self._name!r}: rank {self._peer} is at {_kind(word[0])} where this rank "
                f"{self.rank} waits for {wanted}; the two ends make calls that do not match"
            )
        return word

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as ``(nbytes,)`` uint8."""
        if tensor.device != self.device:
            raise ValueError(f"tensor is on {tensor.device}; this group moves {self.device}")
        if not tensor.is_contiguous():
            raise ValueError("tensor is not contiguous; pass tensor.contiguous()")
        if tensor.numel() == 0:
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} is empty")
        return tensor.view(-1).view(torch.uint8)

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
                self._flush(deadline)  # The other end must learn that the two disagree.
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
        self._release()

    def _release(self) -> None:
        # gloo closes its connections when the last reference goes; it has no other way.
        self._put_words.clear()
        self._gloo = None

    # -- channels --------------------------------------------------------------------------------

    def _connect(self, rendezvous: Rendezvous, store: TCPStore, deadline: Deadline) -> None:
        """Make what moves tensors, if gloo does not; the ranks have met."""

    def _open(self) -> Any:
        """Return gloo, which another thread's ``close()`` may have taken away."""
        gloo = self._gloo
        if gloo is None:
            raise TransportError(f"group {self._name!r} was closed while a call was under way")
        return gloo

    def _put(self, word: Sequence[int], deadline: Deadline) -> None:
        """Start to give ``WORD_LENGTH`` numbers to the other rank; :meth:`_flush` completes it.

        Does not wait for the other rank, so that two that both begin to send find out.
        """
        with self._translated(deadline):
            tensor = torch.tensor(word, dtype=torch.int64)
            # gloo reads the tensor until the work is done, so both are kept.
            work = self._open().send([tensor], self._peer, _WORD_TAG)
            self._put_words.append((tensor, work))

    def _flush(self, deadline: Deadline) -> None:
        """Block until the other rank has what was put, so that closing cannot lose it."""
        while self._put_words:
            with self._translated(deadline):
                self._put_words[0][1].wait(_delta(deadline))
            self._put_words.popleft()

    def _get(self, deadline: Deadline) -> list[int]:
        with self._translated(deadline):
            tensor = torch.empty(WORD_LENGTH, dtype=torch.int64)
            self._open().recv([tensor], self._peer, _WORD_TAG).wait(_delta(deadline))
            word: list[int] = tensor.tolist()
            return word

    def _move(self, tensor: torch.Tensor, deadline: Deadline, *, out: bool) -> None:
        with self._translated(deadline):
            begin = self._open().send if out else self._open().recv
            begin([tensor], self._peer, _DATA_TAG).wait(_delta(deadline))

    @contextmanager
    def _translated(self, deadline: Deadline, peer: str = "") -> Iterator[None]:
        """Turn torch's one RuntimeError into lateness at the deadline, and a lost peer before it.

        torch distinguishes the two by words only, which differ by backend; the clock does on all.
        ``peer`` is the other rank if it is not named.
        """
        peer = peer or f"rank {self._peer}"
        try:
            yield
        except RuntimeError as error:
            if deadline.passed():
                raise TransportTimeoutError(
                    f"group {self._name!r}: {peer} did not come within {deadline.timeout_s:g} s"
                ) from error
            raise PeerLostError(f"group {self._name!r}: lost {peer}: {error}") from error


def _kind(number: int) -> str:
    return WordKind(number).name.lower() if number in list(WordKind) else f"word {number}"


def _store(rendezvous: Rendezvous, deadline: Deadline) -> TCPStore:
    return TCPStore(
        rendezvous.host,
        rendezvous.port,
        is_master=False,
        wait_for_workers=False,
        timeout=_delta(deadline),
    )


def _delta(deadline: Deadline) -> timedelta:
    return timedelta(milliseconds=deadline.remaining_ms())


def _gloo_options(local_address: str, deadline: Deadline) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _delta(deadline)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address)]
    return options


def _probe(rendezvous: Rendezvous, deadline: Deadline) -> str:
    """Return this host's address on the way to the rendezvous, where a process was seen to listen.

    TCPStore would retry for several times its timeout and print a stack trace.
    """
    where = f"{rendezvous.host}:{rendezvous.port}"
    try:
        with socket.create_connection(
            (rendezvous.host, rendezvous.port), deadline.remaining_s()
        ) as connection:
            address: str = connection.getsockname()[0]
            return address
    except TimeoutError as error:
        raise TransportTimeoutError(
            f"group {rendezvous.name!r}: {where} did not answer within {deadline.timeout_s:g} s"
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"group {rendezvous.name!r}: nothing listens at {where}: {error.strerror}"
        ) from error

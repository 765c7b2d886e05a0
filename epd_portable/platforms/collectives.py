"""Groups of two ranks that exchange tensors: by gloo here, by `.collectives_device` on devices.

They do not touch torch's default process group, so they are independent of the engine's own groups.

A mismatch in a collective library ends in a hang, a crash or wrong bytes. So the two ends of a call
agree on it beforehand, over a connection of their own (`epd_portable.transfer.paths.collective`).
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from epd_portable.errors import (
    EPDError,
    PeerLostError,
    PlatformError,
    TransportError,
    TransportTimeoutError,
)

T = TypeVar("T")

_BACKLOG = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Address at which the two ranks of one group connect.

    Attributes:
        host: Address of a `RendezvousHost`.
        name: Of the group; used once at that host.
        rank: This process in the group: 0 or 1.
    """

    host: str
    port: int
    name: str
    rank: int

    def __post_init__(self) -> None:
        if self.rank not in (0, 1):
            raise ValueError(f"rank {self.rank}; the two ranks of a group are 0 and 1")


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


class Deadline:
    """The end of one call."""

    def __init__(self, timeout_s: float) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s={timeout_s!r}; it must be positive and finite")
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, self._end_s - time.monotonic())

    def remaining(self) -> timedelta:
        """Time left, in milliseconds rounded up, at least 1."""
        return timedelta(milliseconds=max(1, math.ceil(self.remaining_s() * 1000)))

    def passed(self) -> bool:
        """Return whether no time is left."""
        return time.monotonic() >= self._end_s


def finish_within(deadline: Deadline, call: Callable[[], T], name: str) -> T:
    """Make a call of a library that knows no deadline, in a thread of that name.

    Args:
        call: Raises nothing but ``RuntimeError`` and our own errors.

    Raises:
        RuntimeError: The call failed, or is not back at the deadline; then its thread ends when the
            library ends its wait.
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


class CollectiveGroup:
    """Two ranks that exchange tensors of the CPU by calls that match.

    Every call blocks until this rank's part is complete, device work included: afterwards any
    stream may use or overwrite the tensor. Calls of a rank come one at a time, from any thread, and
    make `device` that thread's current device; `close` may come from any thread at any time.

    A tensor is contiguous, not empty and on `device`; its bytes are moved. Both ends have agreed on
    the call and on the number of bytes. On devices a rank may send to a peer that has gone, and
    receives from it until its deadline. After an error other than ``ValueError`` the group is
    closed.

    Args:
        timeout_s: Seconds until both ranks must have joined; positive.

    Attributes:
        rank: This process: 0 or 1.

    Raises:
        TransportTimeoutError: The other rank did not join within ``timeout_s``.
        PeerLostError: Nothing listens at the rendezvous, or the other rank left while joining.
        PlatformError: The platform has no collectives.
    """

    def __init__(self, rendezvous: Rendezvous, *, device: torch.device, timeout_s: float) -> None:
        self.rank = rendezvous.rank
        self.device = device
        self._peer = 1 - self.rank
        self._name = rendezvous.name
        self._backend: Any = None
        self._closed_because = ""
        self._close_lock = threading.Lock()
        deadline = Deadline(timeout_s)
        local_address = _probe(rendezvous, deadline)

        def store() -> TCPStore:
            host, port, timeout = rendezvous.host, rendezvous.port, deadline.remaining()
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

        with self._translated(deadline, "the rendezvous"):
            # The process that listens there may be stopped, and then does not reply.
            place = PrefixStore(self._name, finish_within(deadline, store, "epd-rendezvous"))
        try:
            self._connect(place, local_address, deadline)
        except EPDError:
            self.close()
            raise

    def send(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Give a tensor to the other rank, which calls `recv`.

        Args:
            tensor: Work queued on the current stream that fills it is waited for.
            timeout_s: Seconds from the call; positive.

        Raises:
            ValueError: An argument is wrong.
            TransportTimeoutError: Not complete within ``timeout_s``.
            PeerLostError: The other rank closed its group or is gone.
            TransportError: This group is closed.
        """
        self._call(tensor, timeout_s, out=True)

    def recv(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Fill a tensor with what the other rank sends; arguments and errors are those of `send`.

        Its content is undefined after an error other than ``ValueError``.
        """
        self._call(tensor, timeout_s, out=False)

    def close(self) -> None:
        """Leave the group at once; the other rank's calls fail. Calling again does nothing."""
        self._close("close() was called")

    def _call(self, tensor: torch.Tensor, timeout_s: float, *, out: bool) -> None:
        if tensor.device != self.device:
            raise ValueError(f"tensor is on {tensor.device}; this group moves {self.device}")
        if not tensor.is_contiguous():
            raise ValueError("tensor is not contiguous; pass tensor.contiguous()")
        if tensor.numel() == 0:
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} is empty")
        deadline = Deadline(timeout_s)
        if self._closed_because:
            raise TransportError(
                f"group {self._name!r} is closed ({self._closed_because}); make a new one"
            )
        try:
            with self._translated(deadline):
                self._move(tensor.view(-1).view(torch.uint8), deadline, out=out)
        except EPDError as error:
            self._close(f"{type(error).__name__}: {error}")
            raise

    def _close(self, reason: str) -> None:
        with self._close_lock:
            if self._closed_because:
                return
            self._closed_because = reason
        self._release()

    def _open(self) -> Any:
        """Return the backend, which another thread's ``close()`` may have taken away."""
        backend = self._backend
        if backend is None:
            raise TransportError(f"group {self._name!r} was closed while a call was under way")
        return backend

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

    # -- gloo's part ------------------------------------------------------------------------------

    def _connect(self, store: Store, local_address: str, deadline: Deadline) -> None:
        """Make what moves tensors, with the other rank."""

        def meet() -> Any:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = deadline.remaining()
            options._threads = 1
            options._devices = [ProcessGroupGloo.create_device(hostname=local_address)]
            return ProcessGroupGloo(store, self.rank, 2, options)

        with self._translated(deadline, "the rendezvous"):
            self._backend = finish_within(deadline, meet, "epd-meet")

    def _move(self, tensor: torch.Tensor, deadline: Deadline, *, out: bool) -> None:
        """Move bytes, ``(nbytes,)`` uint8; raises ``RuntimeError``."""
        begin = self._open().send if out else self._open().recv
        begin([tensor], self._peer, 0).wait(deadline.remaining())

    def _release(self) -> None:
        # gloo closes its connections when the last reference goes; it has no other way.
        self._backend = None


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
            f"group {rendezvous.name!r}: {where} did not reply within {deadline.timeout_s:g} s"
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"group {rendezvous.name!r}: nothing listens at {where}: {error.strerror}"
        ) from error

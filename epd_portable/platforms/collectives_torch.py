"""Groups over torch.distributed, made and torn down at run time.

They do not touch torch's default process group, so they live beside the engine's own groups.
Words travel over gloo on every platform; tensors over gloo on CPU, and over the platform's own
backend elsewhere.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from epd_portable.errors import PeerLostError, PlatformError, TransportError, TransportTimeoutError
from epd_portable.platforms.collectives import Rendezvous
from epd_portable.platforms.handshake import WORD_LENGTH, Deadline, HandshakeGroup

__all__ = ["DataBackend", "MakeDataBackend", "RendezvousHost", "Store", "TorchCollectiveGroup"]

_WORD_TAG = 1
_DATA_TAG = 2
_WORK_POLL_S = 20e-6
_BACKLOG = 128


class DataBackend(Protocol):
    """A torch.distributed backend whose work completes on a device, such as NCCL or HCCL."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        """Queue a send; returns torch's ``Work``."""

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        """Queue a receive; returns torch's ``Work``."""

    def abort(self) -> None:
        """Stop kernels that wait for a peer, and free the communicators."""


MakeDataBackend = Callable[[Store, int, int], DataBackend]
"""Makes a backend from a store, a rank and a size; does not talk to the peers yet."""


class RendezvousHost:
    """The meeting point of any number of groups; one process holds it open, usually rank 0's.

    Listens on ``host`` only. Groups that have been made do not need it any longer.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen.

        Args:
            host: Address to listen on.
            port: Port; 0 takes a free one.

        Raises:
            PlatformError: The address cannot be bound.
        """
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


class TorchCollectiveGroup(HandshakeGroup):
    """A group of processes over torch.distributed."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        device: torch.device,
        timeout_s: float,
        make_data_backend: MakeDataBackend | None = None,
    ) -> None:
        """Meet the other ranks.

        Args:
            rendezvous: Where, as what, and which rank this is.
            device: Where tensors are.
            timeout_s: Seconds until every rank must have joined; positive.
            make_data_backend: Backend for tensors that are not in host memory.

        Raises:
            TransportTimeoutError: Some rank did not join within ``timeout_s``.
            PeerLostError: Nobody listens at the rendezvous.
        """
        super().__init__(
            name=rendezvous.name, rank=rendezvous.rank, size=rendezvous.size, device=device
        )
        deadline = Deadline(timeout_s)
        local_address = _probe(rendezvous, deadline)
        with self._translated("the rendezvous", deadline):
            store = TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                timeout=_delta(deadline),
            )
            self._gloo: Any = ProcessGroupGloo(
                PrefixStore(f"{rendezvous.name}/words", store),
                self.rank,
                self.size,
                _gloo_options(local_address, deadline),
            )
        self._put_words: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._data: DataBackend | None = None
        if make_data_backend is not None:
            try:
                self._data = make_data_backend(
                    PrefixStore(f"{rendezvous.name}/data", store), self.rank, self.size
                )
            except RuntimeError as error:
                raise PlatformError(f"no collectives on {device}: {error}") from error

    def _open(self) -> Any:
        """Return gloo, which another thread's ``close()`` may have taken away."""
        gloo = self._gloo
        if gloo is None:
            raise TransportError(f"group {self._name!r} was closed while a call was under way")
        return gloo

    def _put(self, word: Sequence[int], dst: int, deadline: Deadline) -> None:
        with self._translated(f"rank {dst}", deadline):
            tensor = torch.tensor(word, dtype=torch.int64)
            # gloo reads the tensor until the work is done, so both are kept.
            self._put_words.append((dst, tensor, self._open().send([tensor], dst, _WORD_TAG)))

    def _flush(self, deadline: Deadline) -> None:
        while self._put_words:
            dst, _, work = self._put_words[0]
            with self._translated(f"rank {dst}", deadline):
                work.wait(_delta(deadline))
            self._put_words.popleft()

    def _get(self, src: int, deadline: Deadline) -> list[int]:
        with self._translated(f"rank {src}", deadline):
            tensor = torch.empty(WORD_LENGTH, dtype=torch.int64)
            self._open().recv([tensor], src, _WORD_TAG).wait(_delta(deadline))
            word: list[int] = tensor.tolist()
            return word

    def _move_out(self, tensor: torch.Tensor, dst: int, deadline: Deadline) -> None:
        with self._translated(f"rank {dst}", deadline):
            if self._data is None:
                self._open().send([tensor], dst, _DATA_TAG).wait(_delta(deadline))
            else:
                _finish(self._data.send([tensor], dst, _DATA_TAG), deadline)

    def _move_in(self, tensor: torch.Tensor, src: int, deadline: Deadline) -> None:
        with self._translated(f"rank {src}", deadline):
            if self._data is None:
                self._open().recv([tensor], src, _DATA_TAG).wait(_delta(deadline))
            else:
                _finish(self._data.recv([tensor], src, _DATA_TAG), deadline)

    def _disconnect(self) -> None:
        # gloo closes its connections when the last reference goes; it has no other way.
        self._put_words.clear()
        self._gloo = None
        if self._data is not None:
            self._data.abort()
            self._data = None

    @contextmanager
    def _translated(self, peer: str, deadline: Deadline) -> Iterator[None]:
        """Turn torch's one RuntimeError into lateness at the deadline, and a lost peer before it.

        torch tells the two apart in words only, and not in the same ones on every backend; the
        clock tells them apart everywhere.
        """
        try:
            yield
        except RuntimeError as error:
            if deadline.passed():
                raise TransportTimeoutError(
                    f"group {self._name!r}: {peer} did not come within {deadline.timeout_s:g} s"
                ) from error
            raise PeerLostError(f"group {self._name!r}: lost {peer}: {error}") from error


def _delta(deadline: Deadline) -> timedelta:
    return timedelta(milliseconds=deadline.remaining_ms())


def _finish(work: Any, deadline: Deadline) -> None:
    """Block until the device has done the work; torch's own wait only queues a wait on the stream.

    Raises:
        RuntimeError: The work failed, or is not complete at the deadline.
    """
    while not work.is_completed():
        if deadline.passed():
            raise RuntimeError("device work was not complete at the deadline")
        time.sleep(_WORK_POLL_S)
    if not work.is_success():
        raise RuntimeError("the device backend says that the work failed")


def _gloo_options(local_address: str, deadline: Deadline) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _delta(deadline)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address)]
    return options


def _probe(rendezvous: Rendezvous, deadline: Deadline) -> str:
    """Return this host's address on the way to the rendezvous, having seen that somebody is there.

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
            f"group {rendezvous.name!r}: nobody listens at {where}: {error.strerror}"
        ) from error

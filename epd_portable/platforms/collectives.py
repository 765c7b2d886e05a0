"""Groups of two ranks that exchange tensors: the interface, and the deadlines of its calls."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from epd_portable.errors import EPDError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the two ranks of one group meet.

    Attributes:
        host: Address of a `epd_portable.platforms.collectives_torch.RendezvousHost`.
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


class CollectiveGroup(ABC):
    """Two ranks that exchange tensors by calls that match.

    Every call blocks until this rank's part is complete, device work included: afterwards any
    stream may use or overwrite the tensor. Calls of a rank come one at a time, from any thread, and
    make `device` that thread's current device; `close` may come from any thread at any time.

    A tensor is contiguous, not empty and on `device`; its bytes are moved. Both ends must agree on
    their number: if they do not, both get ``ValueError``, nothing was moved, and the group stays
    usable. After any other error the group is closed, and the other rank finds this one gone.

    Attributes:
        rank: This process: 0 or 1.
    """

    rank: int
    device: torch.device

    @abstractmethod
    def send(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Give a tensor to the other rank, which calls `recv`.

        Args:
            tensor: Work queued on the current stream that fills it is waited for.
            timeout_s: Seconds from the call; positive.

        Raises:
            ValueError: An argument is wrong, or the other rank expects another number of bytes.
            TransportTimeoutError: Not complete within ``timeout_s``.
            PeerLostError: The other rank closed its group or is gone.
            ProtocolError: The other rank made a call that does not match.
            TransportError: This group is closed.
        """

    @abstractmethod
    def recv(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Fill a tensor with what the other rank sends; arguments and errors are those of `send`.

        Its content is undefined after an error other than ``ValueError``.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group at once; the other rank's calls fail. Calling again does nothing."""


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

    def remaining_ms(self) -> int:
        """Milliseconds left, rounded up, at least 1."""
        return max(1, math.ceil(self.remaining_s() * 1000))

    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end_s


def finish_within(deadline: Deadline, call: Callable[[], T], name: str) -> T:
    """Make a call of a library that knows no deadline, in a thread of that name.

    Args:
        call: Raises nothing but ``RuntimeError`` and our own errors.

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

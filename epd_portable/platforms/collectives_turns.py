"""Turns at making communicators, for libraries that can make only one at a time in a process.

A communicator is made by two processes together, so both must have their turn at once. Each pair
asks the process with the lower identity first: with one order for all, processes that wait for each
other's turns cannot lock up, however many groups they make at the same moment.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from epd_portable.errors import PlatformError, TransportTimeoutError
from epd_portable.platforms.handshake import WORD_LENGTH, Deadline

Say = Callable[[Sequence[int]], None]
"""Starts to give ``WORD_LENGTH`` numbers to the peer; does not wait for it."""

Hear = Callable[[], list[int]]
"""Returns the next numbers of the peer; fails when it is gone, and at the deadline."""


class Turns:
    """What a process has one of, for each library that takes turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = secrets.randbits(62)

    @contextmanager
    def with_peer(self, say: Say, hear: Hear, deadline: Deadline) -> Iterator[None]:
        """Have the turn of this process and that of the peer, which makes the same call.

        Whoever has a turn gives it back at the latest when its own deadline ends the block: a
        thread of the library that is stuck beyond it would otherwise keep the process from ever
        making a group again, which is worse than the improbable success of that thread at the very
        moment of another one's.

        Raises:
            TransportTimeoutError: Other groups of this process took until the deadline.
            PlatformError: The peer is in this process, so both turns can never be obtained.
        """
        own = [self._token, os.getpid()] + [0] * (WORD_LENGTH - 2)
        say(own)
        peer = hear()
        if peer == own:
            raise PlatformError(
                "two ranks of one group in one process, where this platform's library can make "
                "only one communicator at a time; put each rank in a process of its own"
            )
        if peer < own:
            hear()
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise TransportTimeoutError(
                "other groups of this process were being made, one at a time, for all of "
                f"{deadline.timeout_s:g} s; allow more time or make fewer groups at once"
            )
        try:
            say(own)
            if own < peer:
                hear()
            yield
        finally:
            self._lock.release()

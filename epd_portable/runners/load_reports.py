"""PD scheduler: tells routers how busy the engine is, while they want to know."""

from __future__ import annotations

from collections.abc import Callable

from epd_portable.wire.messages import LOAD_EVERY_S, LOAD_HEARTBEAT_S, LOAD_LEASE_S, LoadReport

MAX_ROUTERS = 256
"""Processes of routers that are told; who asks when there are as many pushes the oldest out."""


class LoadReports:
    """Sends what the engine's load is when that has changed, and now and then.

    Nothing is read while nobody wants to know. Times are arguments.

    Args:
        read: Returns the load; quick, and called under the scheduler's lock.
        send: Takes a router's identity and what it is told; never blocks.
    """

    def __init__(
        self, read: Callable[[], LoadReport], send: Callable[[bytes, LoadReport], None]
    ) -> None:
        self._read = read
        self._send = send
        self._until_s: dict[bytes, float] = {}
        self._told = LoadReport()
        self._next_s = 0.0
        self._heartbeat_s = 0.0

    def wanted(self, router: bytes, now: float) -> None:
        """A router wants to know; one that is new is told with the next `tick`."""
        known = self._until_s.pop(router, None) is not None
        self._until_s[router] = now + LOAD_LEASE_S
        if not known:
            self._heartbeat_s = now
            while len(self._until_s) > MAX_ROUTERS:
                del self._until_s[next(iter(self._until_s))]

    def tick(self, now: float) -> None:
        """Tell those who want to know, if it is time to."""
        if not self._until_s or now < self._next_s:
            return
        self._next_s = now + LOAD_EVERY_S
        load = self._read()
        if load == self._told and now < self._heartbeat_s:
            return
        self._told = load
        self._heartbeat_s = now + LOAD_HEARTBEAT_S
        for router in [each for each, until_s in self._until_s.items() if until_s <= now]:
            del self._until_s[router]
        for router in self._until_s:
            self._send(router, load)

"""PD scheduler: reports of load to subscribed routers."""

from __future__ import annotations

from collections.abc import Callable

from epd_portable.wire.messages import LOAD_EVERY_S, LOAD_HEARTBEAT_S, LOAD_LEASE_S, LoadReport

MAX_ROUTERS = 256
"""Routers that get reports; another one takes the place of the oldest."""


class LoadReports:
    """Sends the engine's load to subscribed routers when it has changed, and as a heartbeat.

    Args:
        read: Returns the load; quick, called under the scheduler's lock, and only while a router is
            subscribed.
        send: Takes a router's identity and a report; never blocks.
    """

    def __init__(
        self, read: Callable[[], LoadReport], send: Callable[[bytes, LoadReport], None]
    ) -> None:
        self._read = read
        self._send = send
        self._until_s: dict[bytes, float] = {}
        self._sent = LoadReport()
        self._next_s = 0.0
        self._heartbeat_s = 0.0

    def subscribe(self, router: bytes, now: float) -> None:
        """Subscribe a router, or renew that; a new one gets a report with the next `tick`."""
        known = self._until_s.pop(router, None) is not None
        self._until_s[router] = now + LOAD_LEASE_S
        if not known:
            self._heartbeat_s = now
            while len(self._until_s) > MAX_ROUTERS:
                del self._until_s[next(iter(self._until_s))]

    def tick(self, now: float) -> None:
        """Send reports, if it is time to."""
        if not self._until_s or now < self._next_s:
            return
        self._next_s = now + LOAD_EVERY_S
        load = self._read()
        if load == self._sent and now < self._heartbeat_s:
            return
        self._sent = load
        self._heartbeat_s = now + LOAD_HEARTBEAT_S
        for router in [each for each, until_s in self._until_s.items() if until_s <= now]:
            del self._until_s[router]
        for router in self._until_s:
            self._send(router, load)

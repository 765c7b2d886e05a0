"""PD scheduler: the thread that takes messages in, and reports of load to routers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from epd_portable.connector.endpoint import ConsumerEndpoint
from epd_portable.errors import TransportError
from epd_portable.wire.messages import LOAD_EVERY_S, LOAD_HEARTBEAT_S, LOAD_LEASE_S, LoadReport

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05
"""Deadlines are judged so often while no message comes."""
MAX_ROUTERS = 256
"""Routers that get reports; another one takes the place of the oldest."""


class MessageThread:
    """Takes messages in as they come, by a thread, so that peers wait for no step of the engine.

    The thread and the engine's take turns by `lock`: the engine's holds it while it schedules,
    while it takes in what a step put out, and whenever it changes what it has of requests or of the
    encoder cache.

    Args:
        endpoint: Where messages come.
        take_in: Takes in what has come, and judges deadlines; called under `lock`.

    Attributes:
        lock: See above; reentrant.
        thread: ``None`` before `start`.
    """

    def __init__(self, endpoint: ConsumerEndpoint, take_in: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self._endpoint = endpoint
        self._take_in = take_in
        self._closing = False
        self._death: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self._run, name="epd-receiver", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Find out whether messages are still taken in.

        Raises:
            TransportError: The thread has ended.
        """
        if self._death is not None:
            raise TransportError(
                f"the thread epd-receiver ended with {self._death!r}, and no item comes to this "
                "instance; restart it"
            ) from self._death

    def close(self) -> None:
        """End the thread, then the endpoint."""
        self._closing = True
        if self.thread is not None:
            self._endpoint.wake()
            self.thread.join()
        self._endpoint.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._endpoint.wait(_CHECK_EVERY_S)
                with self.lock:
                    if not self._closing:
                        self._take_in()
        except BaseException as error:
            self._death = error
            logger.critical("the thread epd-receiver ends: no item comes here any more")
            raise


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

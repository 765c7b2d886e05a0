"""A rolling update: instances are restarted one after the other, and no request is lost.

It reads as one sequence and is run in steps, between which the supervisor watches the rest; it asks
the router in a thread, so that a slow router does not block the supervisor.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from epd_portable.config.roles import DUTIES, Duty
from epd_portable.config.schema import Launch
from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run.lifecycle import Action, Lifecycle
from epd_portable.launch.run.router_client import RouterClient, RouterClients

T = TypeVar("T")
Steps = Generator[list[Action], None, T]
"""Yields what to do now, again and again, until there is a result."""

MEANWHILE: dict[Duty, str] = {
    "encode": "requests with media fall back to what can encode without it",
    "prefill": "decode instances prefill their requests themselves",
    "answer": "requests are answered 503",
}
"""What happens while the only instance for something is away."""


class RollingUpdate:
    """One update of some instances, in their order; `step` goes on with it until it has ``ended``.

    Routers drain each instance before, for at most ``drain_s``, and resume it after.
    """

    def __init__(
        self,
        instances: Sequence[ProcessSpec],
        *,
        lifecycle: Lifecycle,
        routers: RouterClients,
        launch: Launch,
        drain_s: float,
    ) -> None:
        self.ended = False
        self._instances = instances
        self._lifecycle = lifecycle
        self._routers = routers
        self._launch = launch
        self._drain_s = drain_s
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epd-update")
        self._steps = self._renew_all()

    def step(self) -> list[Action]:
        """Return what is to be done now; with the last of it the update has ended."""
        try:
            return next(self._steps)
        except StopIteration as end:
            self.give_up()
            last: list[Action] = end.value
            return last

    def give_up(self) -> None:
        """Ask the router nothing more."""
        self.ended = True
        self._given_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _renew_all(self) -> Steps[list[Action]]:
        names = [spec.name for spec in self._instances]
        text = f"updating {', '.join(names)}, one after the other"
        yield [Notice("updating", text, {"instances": names})]
        for done, spec in enumerate(self._instances):
            try:
                yield from self._renew(spec)
            except LaunchError as error:
                updated = names[:done]
                text = (
                    f"the update has ended at {spec.name}: {error}; "
                    f"updated: {', '.join(updated) or 'none'}"
                )
                fields = {"instance": spec.name, "reason": str(error), "instances": updated}
                return [Notice("update_failed", text, fields)]
        return [Notice("updated", f"updated {', '.join(names)}", {"instances": names})]

    def _renew(self, spec: ProcessSpec) -> Steps[None]:
        name = spec.name
        yield from self._others_up(name)
        yield from self._warn_if_alone(spec)
        idle = yield from self._ask(
            lambda one: one.drain(name, timeout_s=self._drain_s, until=self._given_up)
        )
        if not all(idle):
            text = f"{name} still works on requests after {self._drain_s:g} s (router.drain_s)"
            yield [Notice("cutting", f"{text}; they are cut", {"instance": name})]
        if name in self._lifecycle.up():
            yield self._lifecycle.renew(name, time.monotonic())
        # Otherwise it has died meanwhile, and is restarted for that.
        back = yield from self._until(lambda: name in self._lifecycle.up())
        # Also if it is not back: it may come later.
        yield from self._ask(lambda one: one.resume(name))
        if not back:
            raise LaunchError(f"it is not healthy {self._patience_s:g} s after its restart")
        yield from self._ask(
            lambda one: one.wait_up(name, timeout_s=self._patience_s, until=self._given_up)
        )

    def _others_up(self, name: str) -> Steps[None]:
        """Wait until no other instance is down."""
        others = {spec.name for spec in self._instances} - {name}
        if not (yield from self._until(lambda: others <= set(self._lifecycle.up()))):
            away = ", ".join(sorted(others - set(self._lifecycle.up())))
            raise LaunchError(f"{away} must be healthy before, and is not")

    def _warn_if_alone(self, spec: ProcessSpec) -> Steps[None]:
        """Warn what its absence means, unless another one of its duty is up."""
        seen = yield from self._ask(RouterClient.instances)
        assert spec.role != "router"
        duty = DUTIES[spec.role]
        if not any(
            (DUTIES[each["role"]], each["state"]) == (duty, "up") and each["name"] != spec.name
            for each in itertools.chain.from_iterable(seen)
        ):
            text = f"{spec.name} is the only {spec.role} instance that is up; while it is away "
            yield [Notice("warning", text + MEANWHILE[duty])]

    def _until(self, condition: Callable[[], bool]) -> Steps[bool]:
        """Wait for a condition; return whether it became true in time."""
        end = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() >= end:
                return False
            yield []
        return True

    def _ask(self, question: Callable[[RouterClient], T]) -> Steps[list[T]]:
        """Ask each router; return their answers."""
        asked = self._thread.submit(self._routers.each, question)
        while not asked.done():
            yield []
        return asked.result()

    @property
    def _patience_s(self) -> float:
        return self._launch.stop_grace_s + self._launch.startup_timeout_s

"""A rolling update: instances are restarted one after the other, and no request is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import ProcessSpec
from epd_portable.launch.run.front_client import FrontClients

_LOOK_EVERY_S = 0.1


class RollingUpdate(threading.Thread):
    """One update of some instances, in their order.

    Fronts drain each instance before, for at most ``drain_s``, and resume it after.

    Args:
        patience_s: Longest time from a restart until the instance is healthy, and until fronts
            have warmed it up.
        up: Returns the names of what is healthy.
        renew: Ends an instance and starts it again; returns when it no longer counts as up.
        say: Called from this thread.

    Attributes:
        ended: Whether another one may begin; so before the last notice is said.
    """

    def __init__(
        self,
        instances: Sequence[ProcessSpec],
        *,
        fronts: FrontClients,
        drain_s: float,
        patience_s: float,
        up: Callable[[], list[str]],
        renew: Callable[[str], None],
        say: Callable[[Notice], None],
    ) -> None:
        super().__init__(name="epd-update", daemon=True)
        self.ended = False
        self._instances = instances
        self._fronts = fronts
        self._drain_s = drain_s
        self._patience_s = patience_s
        self._up = up
        self._renew_now = renew
        self._say = say
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Restart nothing more; what is drained stays so."""
        self._given_up.set()

    def run(self) -> None:
        """Renew every instance, or end with the first that fails."""
        try:
            last = self._renew_all()
        finally:
            self.ended = True
        if not self._given_up.is_set():
            self._say(last)

    def _renew_all(self) -> Notice:
        names = [spec.name for spec in self._instances]
        text = f"updating {', '.join(names)}, one after the other"
        self._say(Notice("updating", text, {"instances": names}))
        for done, spec in enumerate(self._instances):
            try:
                self._renew(spec)
            except LaunchError as error:
                return _failed(spec.name, str(error), updated=names[:done])
        return Notice("updated", f"updated {', '.join(names)}", {"instances": names})

    def _renew(self, spec: ProcessSpec) -> None:
        name = spec.name
        others = {spec.name for spec in self._instances} - {name}
        if not self._wait_until(lambda: others <= {*self._up()}):
            away = ", ".join(sorted(others.difference(self._up())))
            raise LaunchError(f"{away} must be healthy before, and is not")
        idle = self._fronts.each(
            lambda one: one.drain(name, timeout_s=self._drain_s, until=self._given_up)
        )
        if self._given_up.is_set():
            raise LaunchError("it was given up")
        if not all(idle):
            text = f"{name} still works on requests after {self._drain_s:g} s (front.drain_s)"
            self._say(Notice("cutting", f"{text}; they are cut", {"instance": name}))
        self._renew_now(name)
        back = self._wait_until(lambda: name in self._up())
        # Also if it is not back: it may come later.
        self._fronts.each(lambda one: one.resume(name))
        if not back:
            raise LaunchError(f"it is not healthy {self._patience_s:g} s after its restart")
        self._fronts.each(
            lambda one: one.wait_up(name, timeout_s=self._patience_s, until=self._given_up)
        )

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return whether it became true in time."""
        end = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() >= end or self._given_up.wait(_LOOK_EVERY_S):
                return False
        return True


def _failed(name: str, reason: str, *, updated: list[str]) -> Notice:
    text = f"the update has ended at {name}: {reason}; updated: {', '.join(updated) or 'none'}"
    fields = {"instance": name, "reason": reason, "instances": updated}
    return Notice("update_failed", text, fields)

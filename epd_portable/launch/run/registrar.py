"""Registers a launcher's instances at the fronts that ``launch.join`` names, and lets them leave.

Each instance has a thread for each address of each front: a front that does not answer keeps no
other one waiting. What fronts say of instances is kept, and whatever changes is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.addresses import addresses_of
from epd_portable.launch.run.front_client import FrontClient

_LOOK_EVERY_S = 1.0
_JOINING_S = 0.2
"""Between looks at a front that warms an instance up."""


class Registrar:
    """Every instance at every front that ``launch.join`` leads to, also as its names change.

    Args:
        instances: Fields of `InstanceSettings` of each.
        fronts: Base addresses of fronts, or of names that several of them have.
        is_up: Returns whether an instance answers; a front forgets one that does not.
        leave_timeout_s: Longest wait for open requests of an instance that leaves.
        say: Called from several threads.
        resolve: Returns the addresses of a front's URL; raises `LaunchError` if there are none.

    Attributes:
        leaving: Set to let all instances leave.
    """

    def __init__(
        self,
        instances: Sequence[Mapping[str, Any]],
        fronts: Sequence[str],
        secret: Secret,
        *,
        is_up: Callable[[str], bool],
        leave_timeout_s: float,
        say: Callable[[Notice], None],
        resolve: Callable[[str], list[str]] = addresses_of,
    ) -> None:
        self.leaving = threading.Event()
        self.is_up = is_up
        self.leave_timeout_s = leave_timeout_s
        self.say = say
        self._instances = instances
        self._fronts = fronts
        self._secret = secret
        self._resolve = resolve
        self._addresses: dict[str, list[str]] = {}
        self._unresolved: dict[str, LaunchError] = {}
        self._memberships: dict[tuple[str, str, str], Membership] = {}
        self._thread = threading.Thread(target=self._run, name="epd-join", daemon=True)

    def start(self) -> None:
        """Begin to register instances."""
        self._thread.start()

    def has_ended(self) -> bool:
        """Return whether all have left."""
        return not self._thread.is_alive()

    def states(self) -> dict[str, str]:
        """Return the state of each instance at fronts; at several, of one where it is not up."""
        shown: dict[str, str] = {}
        for each in tuple(self._memberships.values()):
            if shown.get(each.instance, "up") == "up":
                shown[each.instance] = each.state
        return {each["name"]: shown.get(each["name"], "starting") for each in self._instances}

    def problems(self) -> dict[str, LaunchError | None]:
        """Return the instances that are not up at every front, each with the last reason."""
        found: dict[str, LaunchError | None] = {}
        for each in tuple(self._memberships.values()):
            if each.state != "up":
                found[each.instance] = found.get(each.instance) or each.problem
        for name, state in self.states().items():
            if state != "up" and not found.get(name):
                found[name] = next(iter(self._unresolved.values()), None)
        return found

    def is_named(self, url: str, address: str) -> bool:
        """Return whether a front's URL still has an address."""
        return address in self._addresses[url]

    def _run(self) -> None:
        """Follow the names of the fronts until all are to leave, and return when they have."""
        while not self.leaving.is_set():
            for url in self._fronts:
                try:
                    self._addresses[url] = self._resolve(url)
                    self._unresolved.pop(url, None)
                except LaunchError as error:  # Fronts that were known may still be there.
                    if str(self._unresolved.get(url)) != str(error):
                        self.say(Notice("warning", f"front {url}: {error}"))
                    self._unresolved[url] = error
            self._follow()
            self.leaving.wait(_LOOK_EVERY_S)
        for each in self._memberships.values():
            each.join()

    def _follow(self) -> None:
        """Register whatever is new, and forget fronts that have gone."""
        for key, membership in tuple(self._memberships.items()):
            if not membership.is_alive():
                del self._memberships[key]
        for url, addresses in self._addresses.items():
            for address in addresses:
                for instance in self._instances:
                    key = (url, address, instance["name"])
                    if key not in self._memberships:
                        front = FrontClient(url, self._secret, address=address)
                        self._memberships[key] = Membership(self, instance, front, url, address)
                        self._memberships[key].start()


class Membership(threading.Thread):
    """One instance at one front, which is ``url`` at ``address``.

    Attributes:
        instance: Its name.
        state: What the front last said. ``starting`` before the front knows the instance, and
            ``gone`` once it was removed there.
        problem: Why it is not up, as of the last look; `RefusedError` where it would not change.
    """

    def __init__(
        self,
        registrar: Registrar,
        instance: Mapping[str, Any],
        front: FrontClient,
        url: str,
        address: str,
    ) -> None:
        super().__init__(name="epd-join", daemon=True)
        self.instance: str = instance["name"]
        self.state = "starting"
        self.problem: LaunchError | None = None
        self._registrar = registrar
        self._settings = instance
        self._front = front
        self._place = url, address
        self._registered = ""  # the front process that has the instance
        self._joins: str | None = None  # end of the notice once it is up there

    def run(self) -> None:
        """Register when it is up, and again with every restart of the front; then leave.

        Returns without it when the front is neither named any more nor there.
        """
        leaving = self._registrar.leaving
        while not leaving.is_set():
            try:
                self._look()
            except LaunchError as error:
                if not self._registrar.is_named(*self._place):
                    self._warn(f"front {self._front} has gone")
                    return
                if str(error) != str(self.problem):
                    self._warn(str(error))
                self.problem = error
            leaving.wait(_LOOK_EVERY_S if self._joins is None else _JOINING_S)
        if self._registered:
            try:
                timeout_s = self._registrar.leave_timeout_s
                self._front.leave(self.instance, timeout_s=timeout_s)
                self._say("left", f"has left {self._front}")
            except LaunchError as error:
                self._warn(str(error))

    def _look(self) -> None:
        front, seen = self._front.find_instance(self.instance)
        if self._registered and seen is not None:
            if seen["state"] == "up" and self._joins is not None:
                self._say("joined", f"has joined {self._front}{self._joins}")
                self._joins = None
            self.state = seen["state"]
            self.problem = LaunchError(seen["reason"]) if seen["reason"] else None
        elif self._registered == front:
            self._registered, self.state = "", "gone"
            # One that is down, or hangs, is removed after a while.
            on_purpose = self._registrar.is_up(self.instance)
            self._warn(f"front {self._front} has removed it")
            if on_purpose:
                self._warn("joins again when its launcher is started again")
                self._registrar.leaving.wait()
        elif self._registrar.is_up(self.instance):
            again = " again: the front has restarted" if self._registered else ""
            self._registered, self._joins = self._front.register(self._settings), again
            self.problem = None

    def _warn(self, text: str) -> None:
        self._registrar.say(Notice("warning", f"{self.instance}: {text}"))

    def _say(self, event: Literal["joined", "left"], text: str) -> None:
        fields = {"instance": self.instance, "front": str(self._front)}
        self._registrar.say(Notice(event, f"{self.instance} {text}", fields))

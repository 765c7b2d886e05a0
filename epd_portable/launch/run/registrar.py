"""Registers a launcher's instances at the fronts that ``launch.join`` names, and lets them leave.

Each address of each front has a thread: a front that does not respond delays no other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.addresses import addresses_of
from epd_portable.launch.run.front_client import FrontClient

_LOOK_EVERY_S = 1.0
_JOINING_S = 0.2
"""Between looks at a front that warms an instance up, or that an instance leaves."""


class Registrar:
    """Every instance at every front that ``launch.join`` leads to, also as its names change.

    Args:
        instances: Fields of `EngineSettings` of each.
        fronts: Base addresses of fronts, or of names that several of them have.
        is_up: Returns whether an instance responds; a front forgets one that does not.
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
        self.instances = instances
        self.secret = secret
        self._urls = fronts
        self._resolve = resolve
        self._named: dict[str, list[str]] = {}
        self._unresolved: dict[str, LaunchError] = {}
        self._fronts: dict[tuple[str, str], _Front] = {}
        self._thread = threading.Thread(target=self._run, name="epd-join", daemon=True)

    def start(self) -> None:
        """Begin to register instances."""
        self._thread.start()

    def has_ended(self) -> bool:
        """Return whether all have left."""
        return not self._thread.is_alive()

    def problems(self) -> dict[str, LaunchError | None]:
        """Return the instances that are not up at every front, each with the last reason."""
        found: dict[str, LaunchError | None] = {}
        fronts = tuple(self._fronts.values())
        for name in (each["name"] for each in self.instances):
            away = [front for front in fronts if front.members[name].state != "up"]
            reasons = [front.members[name].problem or front.problem for front in away]
            if away or not fronts:
                reasons += self._unresolved.values()
                found[name] = next(filter(None, reasons), None)
        return found

    def noted(self) -> dict[str, str]:
        """Return the problems between instances that serve all the same, as fronts report them."""
        members = (each for front in tuple(self._fronts.values()) for each in front.members.items())
        return {name: member.noted for name, member in members if member.noted}

    def is_named(self, url: str, address: str) -> bool:
        """Return whether a front's URL still has an address."""
        return address in self._named[url]

    def _run(self) -> None:
        """Follow the names of the fronts until all are to leave, and return when they have."""
        while not self.leaving.is_set():
            for url in self._urls:
                try:
                    self._named[url] = self._resolve(url)
                    self._unresolved.pop(url, None)
                except LaunchError as error:  # Fronts that were known may still be there.
                    if str(self._unresolved.get(url)) != str(error):
                        self.say(Notice("warning", f"front {url}: {error}"))
                    self._unresolved[url] = error
            for key in [key for key, front in self._fronts.items() if not front.is_alive()]:
                del self._fronts[key]
            for url, addresses in self._named.items():
                for address in addresses:
                    if (url, address) not in self._fronts:
                        front = self._fronts[url, address] = _Front(self, url, address)
                        front.start()
            self.leaving.wait(_LOOK_EVERY_S)
        for front in self._fronts.values():
            front.join()


@dataclass(slots=True)
class _Member:
    """One instance at one front.

    Attributes:
        state: As the front last reported. ``starting`` before the front knows the instance, and
            ``gone`` once it was removed there.
        problem: Why it is not up; `RefusedError` where it would not change.
        noted: Its problem with others, though it serves.
        registered: Id of the front process that has the instance; empty for none.
        joins: End of the notice once it is up there; ``None`` after that.
    """

    state: str = "starting"
    problem: LaunchError | None = None
    noted: str = ""
    registered: str = ""
    joins: str | None = None


class _Front(threading.Thread):
    """All instances at one front, which is ``url`` at ``address``.

    Attributes:
        members: By the names of instances.
        problem: Why the front did not respond to the last look.
    """

    def __init__(self, registrar: Registrar, url: str, address: str) -> None:
        super().__init__(name="epd-join", daemon=True)
        self.members = {each["name"]: _Member() for each in registrar.instances}
        self.problem: LaunchError | None = None
        self._registrar = registrar
        self._place = url, address
        self._client = FrontClient(url, registrar.secret, address=address)

    def run(self) -> None:
        """Register each instance that is up, and again when the front restarts; then leave.

        Returns without it when the front is neither named any more nor there.
        """
        leaving = self._registrar.leaving
        while not leaving.is_set():
            try:
                self._look()
                self.problem = None
            except LaunchError as error:
                if not self._registrar.is_named(*self._place):
                    self._warn_all(f"front {self._client} has gone")
                    return
                if str(error) != str(self.problem):
                    self._warn_all(str(error))
                self.problem = error
            joining = any(each.joins is not None for each in self.members.values())
            leaving.wait(_JOINING_S if joining else _LOOK_EVERY_S)
        self._leave()

    def _look(self) -> None:
        front, seen = self._client.look()
        states = {each["name"]: each for each in seen}
        for settings in self._registrar.instances:
            name = settings["name"]
            member = self.members[name]
            try:
                self._follow(settings, member, states.get(name), front)
            except LaunchError as error:
                if str(error) != str(member.problem):
                    self._warn(name, str(error))
                member.problem = error

    def _follow(
        self,
        settings: Mapping[str, Any],
        member: _Member,
        seen: Mapping[str, Any] | None,
        front: str,
    ) -> None:
        name, registrar = settings["name"], self._registrar
        if member.registered and seen is not None:
            if seen["state"] == "up" and member.joins is not None:
                self._say("joined", name, f"has joined {self._client}{member.joins}")
                member.joins = None
            member.state, member.noted = seen["state"], seen.get("problem", "")
            member.problem = LaunchError(seen["reason"]) if seen["reason"] else None
        elif member.registered == front:
            # One that is down, or hangs, is removed after a while, and joins again.
            on_purpose = registrar.is_up(name)
            member.state, member.registered = "gone", "never" if on_purpose else ""
            self._warn(name, f"front {self._client} has removed it")
            if on_purpose:
                self._warn(name, "joins again when its launcher is started again")
        elif member.registered != "never" and registrar.is_up(name):
            again = " again: the front has restarted" if member.registered else ""
            member.registered, member.joins = self._client.register(settings), again
            member.problem = None

    def _leave(self) -> None:
        """Remove the instances from the front, and wait for their open requests."""
        there = []
        for name, member in self.members.items():
            if member.registered not in ("", "never"):
                try:
                    self._client.request("DELETE", f"/{name}")
                    there.append(name)
                except LaunchError as error:
                    self._warn(name, str(error))
        end = time.monotonic() + self._registrar.leave_timeout_s
        while there:
            try:
                left = {each["name"]: each["in_flight"] for each in self._client.instances()}
                if time.monotonic() >= end:
                    raise LaunchError(f"front {self._client}: {left} requests are still open")
            except LaunchError as error:
                for name in there:
                    self._warn(name, str(error))
                return
            for name in [name for name in there if name not in left]:
                there.remove(name)
                self._say("left", name, f"has left {self._client}")
            time.sleep(_JOINING_S if there else 0.0)

    def _warn_all(self, text: str) -> None:
        for name in self.members:
            self._warn(name, text)

    def _warn(self, name: str, text: str) -> None:
        self._registrar.say(Notice("warning", f"{name}: {text}"))

    def _say(self, event: Literal["joined", "left"], name: str, text: str) -> None:
        fields = {"instance": name, "front": str(self._client)}
        self._registrar.say(Notice(event, f"{name} {text}", fields))

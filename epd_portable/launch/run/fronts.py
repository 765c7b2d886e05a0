"""Fronts: signed requests to their ``/epd/`` addresses, and the instances of a launcher there.

Instances are watched at the launcher's own front, and registered at others. Each address of each
front has a task: a front that does not respond delays no other one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from epd_portable.config.schema import Launch
from epd_portable.config.secret import Secret
from epd_portable.errors import LaunchError, RefusedError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.processes import Plan

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_FINAL = frozenset({400, 401, 403, 404})
"""Statuses of refusals that only another setting changes. A name is free again later (409)."""
_LOOK_EVERY_S = 1.0
_JOINING_S = 0.2
"""Between looks at a front at which an instance starts, or that an instance leaves."""
_SETTLED = ("up", "down", "gone")


def trusting(cert_file: str) -> ssl.SSLContext:
    """Return a context that accepts the certificate of a PEM file, for any host name."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


async def addresses_of(url: str) -> list[str]:
    """Return every address that the host of a URL has at this moment, in order.

    IPv4 addresses; IPv6 ones where there are no others.

    Raises:
        LaunchError: It has none.
    """
    host = urlsplit(url).hostname or ""
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"{host} has no address: {error}") from error
    v4 = {str(address[0]) for family, *_, address in found if family == socket.AF_INET}
    return sorted(v4 or {str(address[0]) for *_, address in found})


class FrontClient:
    """Sends signed requests to one front.

    Methods raise `LaunchError` if it cannot be reached, or refuses; that is `RefusedError` if it
    would refuse again.

    Args:
        url: Base address of the front, with or without ``/v1``.
        address: Which of the addresses of its name is meant; empty for any of them.
        cert_file: Certificate of a front on this machine, read for each request: it may be renewed.
            By default the system's authorities are trusted.
    """

    def __init__(self, url: str, secret: Secret, *, address: str = "", cert_file: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._address = address
        self._cert_file = cert_file
        self._secret = secret
        self._verify: ssl.SSLContext | bool = False
        if self._url.startswith("https") and not cert_file:
            # For all requests: to read the system's certificates takes 30 ms of CPU.
            self._verify = httpx.create_ssl_context()

    def __str__(self) -> str:
        """Return the URL, and which of its addresses is meant."""
        named = self._address and self._address != httpx.URL(self._url).host
        return f"{self._url} at {self._address}" if named else self._url

    async def instances(self) -> list[dict[str, Any]]:
        """Return what the front reports of each of its instances."""
        return (await self.look())[1]

    async def look(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the id of the front process, and what it reports of each of its instances."""
        answer = await self.request("GET")
        try:
            return answer["front"], answer["instances"]
        except LookupError as error:
            raise LaunchError(
                f"front {self}: no instances in its response. Check the address."
            ) from error

    async def request(
        self, method: str, path: str = "", content: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request to a path below ``/epd/instances``, and return the response."""
        data = json.dumps(content).encode() if content is not None else b""
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        try:
            verify = trusting(self._cert_file) if self._cert_file else self._verify
            url = httpx.URL(f"{self._url}/epd/instances{path}")
            headers = {
                "host": url.netloc.decode(),
                "authorization": self._secret.sign(method, url.raw_path.decode(), data),
                "content-type": "application/json",
            }
            async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=verify) as client:
                answer = await client.request(
                    method,
                    url.copy_with(host=self._address) if self._address else url,
                    content=data,
                    headers=headers,
                    extensions={"sni_hostname": url.host},  # Certificates are for the name.
                )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise LaunchError(f"front {self} cannot be reached: {error}") from error
        try:
            body: dict[str, Any] = answer.json()
            if answer.is_success:
                return body
            reason = body["error"]["message"]
        except (ValueError, LookupError, TypeError) as error:
            raise LaunchError(
                f"front {self}: status {answer.status_code}, and not the response of a front: "
                f"{answer.text[:200]!r}. Check the address."
            ) from error
        final = answer.status_code in _FINAL
        raise (RefusedError if final else LaunchError)(f"front {self}: {reason}")


class Registrar:
    """Every instance at the launcher's own front, or at every front that ``launch.join`` leads to.

    Args:
        is_up: Returns whether an instance responds; a front forgets one that does not.
        leave_timeout_s: Longest wait for open requests of an instance that leaves.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        secret: Secret,
        *,
        is_up: Callable[[str], Awaitable[bool]],
        leave_timeout_s: float,
        say: Callable[[Notice], None],
    ) -> None:
        self.is_up = is_up
        self.leave_timeout_s = leave_timeout_s
        self.say = say
        self.names = [spec.name for spec in plan.processes if spec.role != "front"]
        self._plan = plan
        self._launch = launch
        self._secret = secret
        self._followed_s: float | None = None
        self._unresolved: dict[str, LaunchError] = {}
        self._fronts: dict[tuple[str, str], _Front] = {}
        for spec in plan.processes:
            if spec.role == "front":
                client = FrontClient(spec.url, secret, cert_file=spec.tls_cert_file)
                self._fronts[spec.url, ""] = _Front(self, plan, client, is_own=True)

    def have_joined(self) -> bool:
        """Return whether all instances are up at every front.

        Raises:
            LaunchError: A front refuses one for good, or one was not up in time.
        """
        if self._followed_s is None:
            return False
        problems, limit_s = self.problems(), self._launch.startup_timeout_s
        is_over = asyncio.get_running_loop().time() >= self._followed_s + limit_s
        for name, problem in problems.items():
            if isinstance(problem, RefusedError):
                raise LaunchError(f"{name} cannot join: {problem}") from problem
            if is_over:
                raise LaunchError(
                    f"instances are not up at {', '.join(self._plan.joins) or 'the front'} after "
                    f"{limit_s:g} s (launch.startup_timeout_s): "
                    f"{name}{f': {problem}' if problem else ''}"
                )
        return not problems

    def problems(self) -> dict[str, LaunchError | None]:
        """Return the instances that are not up at every front, each with the last reason."""
        found: dict[str, LaunchError | None] = {}
        fronts = [*self._fronts.values()]
        for name in self.names:
            away = [each for each in fronts if each.members[name].state != "up"]
            if away or not fronts:
                reasons = [each.members[name].problem or each.problem for each in away]
                found[name] = next(filter(None, [*reasons, *self._unresolved.values()]), None)
        return found

    def noted(self) -> dict[str, str]:
        """Return the problems between instances that serve all the same, as fronts report them."""
        members = (each for front in self._fronts.values() for each in front.members.items())
        return {name: member.noted for name, member in members if member.noted}

    async def follow(self) -> None:
        """Follow the names of the fronts, and the instances at each; never returns.

        It is called once all processes are up.
        """
        self._followed_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for front in self._fronts.values():
                group.create_task(front.follow())
            while True:
                for url in self._plan.joins:
                    await self._resolve(url, group)
                await asyncio.sleep(_LOOK_EVERY_S)

    async def leave(self) -> None:
        """Let all instances leave other fronts, and wait for their open requests."""
        await asyncio.gather(*(each.leave() for each in self._fronts.values() if not each.is_own))

    async def _resolve(self, url: str, group: asyncio.TaskGroup) -> None:
        """Follow each front that a name leads to at this moment."""
        try:
            addresses = await addresses_of(url)
            self._unresolved.pop(url, None)
        except LaunchError as error:  # Fronts that were known may still be there.
            if str(self._unresolved.get(url)) != str(error):
                self.say(Notice("warning", f"front {url}: {error}"))
            self._unresolved[url] = error
            return
        for (of, address), front in [*self._fronts.items()]:
            if of == url:
                front.is_named = address in addresses
                if front.has_gone:
                    del self._fronts[of, address]
        for address in addresses:
            if (url, address) not in self._fronts:
                client = FrontClient(url, self._secret, address=address)
                front = self._fronts[url, address] = _Front(self, self._plan, client)
                group.create_task(front.follow())


@dataclass(slots=True)
class _Member:
    """An instance at one front.

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


class _Front:
    """All instances at one front.

    Args:
        is_own: Whether it is the launcher's own, which comes and goes with the instances.

    Attributes:
        members: By the names of instances.
        problem: Why the front did not respond to the last look.
        is_named: Whether ``launch.join`` still leads there.
        has_gone: It is followed no more: it is not named, and does not respond.
    """

    def __init__(
        self, registrar: Registrar, plan: Plan, client: FrontClient, *, is_own: bool = False
    ) -> None:
        self.members = {name: _Member() for name in registrar.names}
        self.problem: LaunchError | None = None
        self.is_named, self.has_gone = True, False
        self.is_own = is_own
        self._registrar = registrar
        self._client = client
        self._to_register = {each["name"]: each for each in plan.members}

    async def follow(self) -> None:
        """Register each instance that is up, and again when the front restarts."""
        while not self.has_gone:
            try:
                await self._look()
                self.problem = None
            except LaunchError as error:
                if not self.is_named:
                    self._warn(f"front {self._client} has gone", *self.members)
                    self.has_gone = True
                elif not self.is_own and str(error) != str(self.problem):
                    self._warn(str(error), *self.members)
                self.problem = error
            settled = all(each.state in _SETTLED for each in self.members.values())
            await asyncio.sleep(_LOOK_EVERY_S if settled else _JOINING_S)

    async def _look(self) -> None:
        front, seen = await self._client.look()
        states = {each["name"]: each for each in seen}
        for name, member in self.members.items():
            try:
                await self._follow(name, member, states.get(name), front)
            except LaunchError as error:
                if str(error) != str(member.problem):
                    self._warn(str(error), name)
                member.problem = error

    async def _follow(
        self, name: str, member: _Member, seen: Mapping[str, Any] | None, front: str
    ) -> None:
        settings = self._to_register.get(name)
        if seen is not None and (member.registered or settings is None):
            if seen["state"] == "up" and member.joins is not None:
                self._say("joined", name, f"has joined {self._client}{member.joins}")
                member.joins = None
            member.state, member.noted = seen["state"], seen.get("problem", "")
            member.problem = LaunchError(seen["reason"]) if seen["reason"] else None
        elif settings is None:
            return
        elif member.registered == front:
            # One that is down, or hangs, is removed after a while, and joins again.
            member.state, member.registered = "gone", ""
            self._warn(f"front {self._client} has removed it", name)
        elif await self._registrar.is_up(name):
            member.joins = " again: the front has restarted" if member.registered else ""
            answer = await self._client.request("POST", content=settings)
            member.registered, member.problem = answer["front"], None

    async def leave(self) -> None:
        """Remove the instances from the front, and wait for their open requests."""
        there = []
        for name, member in self.members.items():
            if member.registered:
                try:
                    await self._client.request("DELETE", f"/{name}")
                    there.append(name)
                except LaunchError as error:
                    self._warn(str(error), name)
        try:
            async with asyncio.timeout(self._registrar.leave_timeout_s):
                while there:
                    left = {each["name"] for each in await self._client.instances()}
                    for name in [name for name in there if name not in left]:
                        there.remove(name)
                        self._say("left", name, f"has left {self._client}")
                    await asyncio.sleep(_JOINING_S if there else 0.0)
        except TimeoutError:
            self._warn(f"front {self._client}: requests are still open", *there)
        except LaunchError as error:
            self._warn(str(error), *there)

    def _warn(self, text: str, *names: str) -> None:
        for name in names:
            self._registrar.say(Notice("warning", f"{name}: {text}"))

    def _say(self, event: Literal["joined", "left"], name: str, text: str) -> None:
        fields = {"instance": name, "front": str(self._client)}
        self._registrar.say(Notice(event, f"{name} {text}", fields))

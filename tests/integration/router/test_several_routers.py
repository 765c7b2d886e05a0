"""Routers side by side, which share nothing, and the instances that join all of them by a name."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from epd_portable.connector.curve import read_keys
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.registrar import Membership
from tests.integration.router.stand_in import DEADLINE_S, ControlEnd, StandIn
from tests.keyring import secret_file

NAME = "http://routers.example"


class RouterProcess:
    """A router of no instances of its own, which can be killed and started again."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.url = f"http://{host}:{port}"
        self.start()

    def start(self) -> None:
        settings = {
            **{"host": self.host, "port": self.port, "model": "demo", "instances": []},
            **{"secret_file": secret_file(), "registration": True, "probe_interval_s": 0.1},
        }
        command = [sys.executable, "-m", "epd_portable.router", "--settings", json.dumps(settings)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert re.search(re.escape(self.url), self.process.stderr.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Names:
    """Addresses of one name, as of a headless Service."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def __call__(self, url: str) -> list[str]:
        assert url.startswith(NAME)
        if not self.addresses:
            raise LaunchError("routers.example has no address: Name or service not known")
        return self.addresses


@pytest.fixture
def routers() -> Iterator[list[RouterProcess]]:
    port = port_source("0000004b")()
    started = [RouterProcess(host, port) for host in ("127.0.0.1", "127.0.0.2")]
    yield started
    for each in started:
        each.kill()


class Stop(threading.Event):
    """Lets all leave; says who waits for it, and how long."""

    def wait(self, timeout: float | None = None) -> bool:
        print(f"thread {threading.get_ident()} waits {timeout} s", flush=True)
        return super().wait(timeout)


class Joined:
    """An instance that answers, registered at every address of a name."""

    def __init__(self, instance: StandIn, port: int, names: Names) -> None:
        self._control = ControlEnd(read_keys(secret_file()))
        self._name = instance.name
        self._stop = Stop()
        settings = RegistrarSettings(
            routers=(f"{NAME}:{port}",),
            secret_file=secret_file(),
            port=0,
            instances=(
                {
                    "name": instance.name,
                    "role": "prefill-decode",
                    "url": instance.serving.url,
                    "control": self._control.address,
                },
            ),
            join_timeout_s=DEADLINE_S,
            leave_timeout_s=DEADLINE_S,
        )
        self.membership = Membership(settings, self._stop, names)
        self._thread = threading.Thread(target=self.membership.run, daemon=True)
        self._thread.start()

    def looks(self, router: RouterProcess, said: str) -> list[float]:
        """Return how long was waited between looks at a router, once it did not wait for it."""
        key = f"{NAME}:{router.port}", router.host, self._name
        _, thread = self.membership._registrars[key]
        found = re.findall(rf"^thread {thread.ident} waits (.+) s$", said, re.MULTILINE)
        return [float(each) for each in found if float(each) > 0.5]

    async def leave(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join, DEADLINE_S)
        assert not self._thread.is_alive()
        self._control.close()


async def until_status(client: httpx.AsyncClient, url: str, status: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get(f"{url}/health")).status_code != status:
            await asyncio.sleep(0.02)


async def chat(client: httpx.AsyncClient, router: RouterProcess) -> int:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    return (await client.post(f"{router.url}/v1/chat/completions", json=body)).status_code


async def test_a_killed_router_learns_its_members_again_and_the_other_serves_meanwhile(
    routers: list[RouterProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    pd = StandIn("pd-0@10.0.0.2", "prefill-decode")
    await pd.serving.start()
    joined = Joined(pd, routers[0].port, Names("127.0.0.1", "127.0.0.2"))
    stays, killed = routers
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
        for each in routers:
            await until_status(client, each.url, 200)
        killed.kill()
        assert await chat(client, stays) == 200
        killed.start()
        capfd.readouterr()
        said = before = after = ""
        async with asyncio.timeout(DEADLINE_S):
            while not joined.looks(killed, after):
                await asyncio.sleep(0.02)
                said += capfd.readouterr().out
                before, _, after = said.partition("again: the router has restarted")
        # Within two seconds: at the first or the second look, with one second before each.
        assert len(joined.looks(killed, before)) <= 1
        assert set(joined.looks(killed, said)) == {1.0}
        await until_status(client, killed.url, 200)
        assert await chat(client, killed) == 200
        await joined.leave()
        # It has left both.
        for each in routers:
            await until_status(client, each.url, 503)
    await pd.serving.stop()


async def test_routers_come_and_go_with_the_addresses_of_their_name(
    routers: list[RouterProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    pd = StandIn("pd-0@10.0.0.2", "prefill-decode")
    await pd.serving.start()
    names = Names()
    first, second = routers
    joined = Joined(pd, first.port, names)
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
        assert joined.membership.states()[pd.name]["reason"] == "router.join has no address"
        names.addresses = ["127.0.0.1"]
        await until_status(client, first.url, 200)
        assert (await client.get(f"{second.url}/health")).status_code == 503
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        await until_status(client, second.url, 200)
        # A router that is there keeps its members, whatever the name says.
        names.addresses = ["127.0.0.1"]
        assert await chat(client, second) == 200
        second.kill()
        said = ""
        async with asyncio.timeout(DEADLINE_S):
            while "routers.example" not in said or "has gone" not in said:
                said += capfd.readouterr().out
                await asyncio.sleep(0.02)
        assert f"router {NAME}:{second.port} at 127.0.0.2 has gone" in said
        assert await chat(client, first) == 200
        await joined.leave()
        await until_status(client, first.url, 503)
    await pd.serving.stop()

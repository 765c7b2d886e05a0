"""The registrar of a launcher whose instances join the router of another, against a real router."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from pathlib import Path

import httpx

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.plan.processes import RegistrarSettings
from epd_portable.launch.run.router_client import RouterClient, RouterClients
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import DEADLINE_S, StandIn


async def started(settings: RegistrarSettings) -> Process:
    command = (sys.executable, "-m", "epd_portable.launch.run.registrar")
    return await asyncio.create_subprocess_exec(
        *command, "--settings", settings.as_json(), stdout=PIPE, stderr=STDOUT
    )


def settings_of(
    *routers: str, secret: str, port: int, instances: Sequence[StandIn]
) -> RegistrarSettings:
    return RegistrarSettings(
        routers=routers,
        secret_file=secret,
        port=port,
        instances=tuple(
            {"name": each.name, "role": "encode", "url": each.serving.url} for each in instances
        ),
        join_timeout_s=30,
        leave_timeout_s=30,
    )


async def says(process: Process, words: str) -> None:
    assert process.stdout is not None
    seen = ""
    while words not in seen:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        assert line, f"{words!r} was not said: {seen}"
        seen += line.decode()


async def told(port: int, instance: StandIn) -> tuple[int, str, str]:
    """Return the status of what a registrar tells, and state and reason of an instance."""
    async with httpx.AsyncClient(trust_env=False) as client:
        health = await client.get(f"http://127.0.0.1:{port}/health")
    seen = health.json()["instances"][instance.name]
    return health.status_code, seen["state"], seen["reason"]


async def until_told(port: int, instance: StandIn, status: int, state: str) -> None:
    end_s = asyncio.get_running_loop().time() + DEADLINE_S
    while (last := await told(port, instance))[:2] != (status, state):
        assert asyncio.get_running_loop().time() < end_s, last
        await asyncio.sleep(0.05)


async def test_instances_join_stay_and_leave_with_their_launcher(
    build: Build, tmp_path: Path
) -> None:
    secret = str(tmp_path / "secret")
    make_secret_file(secret)
    t = await build(secret_file=secret, registration=True)
    newcomer = StandIn("encode-0@10.0.0.2", "encode")
    await newcomer.serving.start()
    port = port_source("0000002b")()
    settings = settings_of(t.router.url, secret=secret, port=port, instances=[newcomer])
    process = await started(settings)
    try:
        await says(process, f"{newcomer.name} has joined")
        assert await told(port, newcomer) == (200, "up", "")
        await t.until_health(lambda seen: seen[newcomer.name]["state"] == "up")
        # It tells what the router says, not what it was once told.
        client = RouterClient(t.router.url, Secret.read(secret))
        stop = threading.Event()
        await asyncio.to_thread(client.drain, newcomer.name, timeout_s=DEADLINE_S, until=stop)
        await until_told(port, newcomer, 503, "draining")
        await asyncio.to_thread(client.resume, newcomer.name)
        await until_told(port, newcomer, 200, "up")
        await t.router.stop()
        await says(process, "cannot be reached")
        await t.start_router_again()
        await says(process, "again: the router has restarted")
        # Somebody lets it go: it stays away until its launcher is started again.
        await asyncio.to_thread(client.leave, newcomer.name, timeout_s=DEADLINE_S)
        await says(process, "joins again when it is started again")
        assert newcomer.name not in (await t.health()).json()["instances"]
        status, state, reason = await told(port, newcomer)
        assert (status, state) == (503, "gone") and "has removed" in reason
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await newcomer.serving.stop()


async def test_at_its_end_every_instance_leaves(build: Build, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    make_secret_file(secret)
    t = await build(secret_file=secret, registration=True)
    newcomers = [StandIn(f"encode-{number}@10.0.0.2", "encode") for number in range(2)]
    for each in newcomers:
        await each.serving.start()
    port = port_source("0000002c")()
    settings = settings_of(t.router.url, secret=secret, port=port, instances=newcomers)
    process = await started(settings)
    try:
        await t.until_health(lambda seen: all(each.name in seen for each in newcomers))
        await t.until_health(
            lambda seen: all(seen[each.name]["state"] == "up" for each in newcomers)
        )
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        left = (await t.health()).json()["instances"]
        assert not any(each.name in left for each in newcomers)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for each in newcomers:
            await each.serving.stop()


async def test_instances_join_drain_and_leave_several_routers_alike(
    build: Build, tmp_path: Path
) -> None:
    secret = str(tmp_path / "secret")
    make_secret_file(secret)
    routers = [await build(secret_file=secret, registration=True) for _ in range(2)]
    newcomer = StandIn("encode-0@10.0.0.2", "encode")
    await newcomer.serving.start()
    port = port_source("0000002d")()
    urls = [each.router.url for each in routers]
    settings = settings_of(*urls, secret=secret, port=port, instances=[newcomer])
    process = await started(settings)
    clients = RouterClients(settings.routers, Secret.read(secret))
    stop = threading.Event()
    try:
        for each in routers:
            await each.until_health(lambda seen: newcomer.name in seen)
        await until_told(port, newcomer, 200, "up")
        idle = await asyncio.to_thread(
            clients.drain, newcomer.name, timeout_s=DEADLINE_S, until=stop
        )
        assert idle
        for each in routers:
            health = await each.health()
            assert health.json()["instances"][newcomer.name]["state"] == "draining"
        await until_told(port, newcomer, 503, "draining")
        await asyncio.to_thread(clients.resume, newcomer.name)
        await until_told(port, newcomer, 200, "up")
        # At one of them it is not up: that one's answer is told.
        one = RouterClient(settings.routers[1], Secret.read(secret))
        await asyncio.to_thread(one.drain, newcomer.name, timeout_s=DEADLINE_S, until=stop)
        await until_told(port, newcomer, 503, "draining")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        for each in routers:
            assert newcomer.name not in (await each.health()).json()["instances"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await newcomer.serving.stop()

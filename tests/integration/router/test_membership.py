"""Instances join and leave while the router serves, by registration with a shared secret."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from epd_portable.wire.messages import NackCode
from tests import keyring
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    DEADLINE_S,
    ControlEnd,
    StandIn,
    answer,
    once,
    refuse,
    refusing,
)
from tests.integration.router.test_requests import RED, TEXT

INSTANCES = "/epd/instances"
AUTH = keyring.Signed()


@pytest.fixture
async def newcomers() -> AsyncIterator[Newcomers]:
    made = Newcomers()
    yield made
    for control in made.controls:
        control.close()
    await asyncio.gather(*(instance.serving.stop() for instance in made.instances))


class Newcomers:
    """Instances that the router is not told of when it starts."""

    def __init__(self) -> None:
        self.instances: list[StandIn] = []
        self.controls: list[ControlEnd] = []

    async def start(self, name: str, role: str) -> dict[str, str]:
        """Start one and return what it is registered with."""
        instance = StandIn(name, role)
        await instance.serving.start()
        self.instances.append(instance)
        body = {"name": name, "role": role, "url": instance.serving.url}
        if role == "prefill-decode":
            self.controls.append(ControlEnd(keyring.keys()))
            body["control"] = self.controls[-1].address
        return body


async def shown(t: Topology) -> dict[str, dict[str, Any]]:
    listed = (await t.client.get(INSTANCES, auth=AUTH)).json()["instances"]
    return {instance["name"]: instance for instance in listed}


async def until_gone(t: Topology, name: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while name in await shown(t):
            await asyncio.sleep(0.02)


async def test_a_router_without_instances_serves_those_that_join(
    build: Build, newcomers: Newcomers
) -> None:
    t = await build(encoders=0, pds=0, registration=True)
    assert (await t.chat(RED)).status_code == 503

    bodies = [await newcomers.start("e", "encode"), await newcomers.start("p", "prefill-decode")]
    for body in bodies:
        joined = await t.client.post(INSTANCES, json=body, auth=AUTH)
        assert (joined.status_code, joined.json()["state"]) == (201, "up")

    assert (await t.chat(RED)).status_code == 200
    encoder, pd = newcomers.instances
    (transfer,) = encoder.received[0].params["transfers"]
    assert transfer["consumer"] == bodies[1]["control"]
    assert pd.received[0].params["transfers"][0]["encoder"] == "e"
    # A newcomer is heard on its control channel.
    pd.behaviour = refusing(
        newcomers.controls[0], NackCode.TOO_LARGE, "9 bytes, at most 8", refuse(500)
    )
    response = await t.chat(RED)
    assert (response.status_code, "9 bytes" in response.text) == (413, True)


async def test_without_a_signature_nothing_is_shown_or_changed(build: Build) -> None:
    t = await build(registration=True)
    body = {"name": "x", "role": "encode", "url": "http://127.0.0.1:1"}
    for token in ("", "Bearer", "Bearer wrong", "Bearer \xe4", "Basic x"):
        headers = {"authorization": token.encode("latin-1")}
        for method, path, given in (
            ("GET", "", None),
            ("POST", "", body),
            ("DELETE", "/pd-0", None),
            ("POST", "/pd-0/drain", None),
            ("POST", "/pd-0/resume", None),
        ):
            url = INSTANCES + path
            refused = await t.client.request(method, url, json=given, headers=headers)
            assert refused.status_code == 401, (method, path, token)
        assert "instances" not in (await t.client.get("/health", headers=headers)).json()
    assert {name: i["state"] for name, i in (await shown(t)).items()} == {
        "encode-0": "up",
        "pd-0": "up",
    }


async def test_a_request_that_somebody_has_overheard_does_nothing(build: Build) -> None:
    t = await build(registration=True)
    path = f"{INSTANCES}/pd-0/drain"
    headers = {"authorization": keyring.secret().sign("POST", path)}
    resume = await t.client.post(f"{INSTANCES}/pd-0/resume", headers=headers)
    assert resume.status_code == 401
    assert (await t.client.post(path, headers=headers)).status_code == 202
    await t.client.post(f"{INSTANCES}/pd-0/resume", auth=AUTH)
    again = await t.client.post(path, headers=headers)
    assert (again.status_code, "used before" in again.text) == (401, True)
    assert (await shown(t))["pd-0"]["state"] == "up"


async def test_the_secret_of_a_run_registers_nobody_and_may_drain(build: Build) -> None:
    t = await build()
    body = {"name": "x", "role": "encode", "url": "http://127.0.0.1:1"}
    for response in (
        await t.client.post(INSTANCES, json=body, auth=AUTH),
        await t.client.delete(f"{INSTANCES}/pd-0", auth=AUTH),
    ):
        assert response.status_code == 404
        assert "secret_file" in response.json()["error"]["message"]
    assert set(await shown(t)) == {"encode-0", "pd-0"}
    drained = await t.client.post(f"{INSTANCES}/encode-0/drain", auth=AUTH)
    seen = drained.json()
    assert (drained.status_code, seen["state"], seen["idle"]) == (202, "draining", True)


async def test_what_is_not_there_is_said(build: Build) -> None:
    t = await build(registration=True)
    for method, path, status in (
        ("PUT", INSTANCES, 405),
        ("GET", f"{INSTANCES}/pd-0", 405),
        ("GET", f"{INSTANCES}/pd-0/drain", 405),
        ("POST", f"{INSTANCES}/pd-0/stop", 404),
        ("POST", f"{INSTANCES}/nobody/drain", 404),
        ("POST", f"{INSTANCES}/nobody/resume", 404),
        ("GET", "/epd/other", 404),
    ):
        answer = await t.client.request(method, path, auth=AUTH)
        assert answer.status_code == status, (method, path)


async def busy(t: Topology) -> tuple[asyncio.Event, list[asyncio.Task[httpx.Response]]]:
    """Have each PD instance answer a request as soon as the event is set."""
    release = asyncio.Event()
    for pd in t.pds:
        pd.behaviour = once(release)
    running = [asyncio.create_task(t.chat(TEXT)) for _ in t.pds]
    for pd in t.pds:
        await pd.until(lambda pd: len(pd.received) == 1)
    return release, running


def registered(url: str, role: str = "encode", **more: str) -> dict[str, str]:
    return {"name": "x", "role": role, "url": url, **more}


async def test_instances_are_where_the_settings_say(build: Build) -> None:
    t = await build(registration=True)
    for host in (
        *("169.254.169.254:80", "[fe80::1]:80", "[::ffff:169.254.169.254]:80", "0.0.0.0:80"),
        *("[::]:80", "224.0.0.1:80", "8.8.8.8:80", "2851995646:80"),
    ):
        for body in (
            registered(f"http://{host}"),
            registered("http://127.0.0.1:1", "prefill-decode", control=f"tcp://{host}"),
        ):
            refused = await t.client.post(INSTANCES, json=body, auth=AUTH)
            message = refused.json()["error"]["message"]
            assert refused.status_code == 403, message
            assert "router.instance_networks" in message and host in message
    assert set(await shown(t)) == {"encode-0", "pd-0"}


@pytest.mark.parametrize(
    ("networks", "asked"),
    [
        # To list everything lists no link.
        (
            ["0.0.0.0/0", "::/0"],
            {"169.254.169.254": 403, "[fe80::1]:80": 403, "0.0.0.0:80": 403, "127.0.0.1:9": 201},
        ),
        (
            ["169.254.0.0/16", "127.0.0.2/32"],
            {"127.0.0.1:9": 403, "localhost:9": 403, "127.0.0.2:9": 201},
        ),
    ],
)
async def test_a_network_that_is_listed_is_asked(
    build: Build, networks: list[str], asked: dict[str, int]
) -> None:
    t = await build(registration=True, instance_networks=networks)
    for host, status in asked.items():
        answer = await t.client.post(INSTANCES, json=registered(f"http://{host}"), auth=AUTH)
        assert answer.status_code == status, host


async def test_a_wrong_registration_is_refused_by_key(build: Build) -> None:
    t = await build(registration=True)
    at = "http://127.0.0.1:1"
    for body, status, word in (
        ("{", 400, "JSON"),
        (" " * 70_000, 413, "70000 bytes"),
        ({**registered(at), "name": "a/b"}, 400, "name"),
        (registered(at, "decoder"), 400, "role"),
        (registered(at, "decode"), 400, "control"),
        (registered(at, "prefill-decode"), 400, "control"),
        (registered(at, x="1"), 400, "x"),
        # URLs that are none, that can be read in two ways, or whose host is not known.
        (registered("h:1"), 400, "url"),
        (registered("http://127.0.0.1?@169.254.169.254"), 400, "url"),
        (registered("http://127.0.0.1#x"), 400, "url"),
        (registered("http://u@127.0.0.1"), 400, "url"),
        (registered("http://a\\b"), 400, "url"),
        (registered("http://no-such-host.invalid:1"), 400, "no-such-host"),
    ):
        content = body if isinstance(body, str) else json.dumps(body)
        refused = await t.client.post(INSTANCES, content=content, auth=AUTH)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, word in message) == (status, True), (body, message)
    assert set(await shown(t)) == {"encode-0", "pd-0"}


async def test_a_name_changes_hands_only_when_its_holder_is_gone(
    build: Build, newcomers: Newcomers
) -> None:
    t = await build(registration=True)
    first = await newcomers.start("p", "prefill-decode")
    second = await newcomers.start("p", "prefill-decode")
    await t.client.post(INSTANCES, json=first, auth=AUTH)

    taken = await t.client.post(INSTANCES, json=second, auth=AUTH)
    assert taken.status_code == 409
    assert first["url"] in taken.json()["error"]["message"]

    await newcomers.instances[0].serving.stop()
    assert (await t.client.post(INSTANCES, json=second, auth=AUTH)).status_code == 201
    assert (await shown(t))["p"]["url"] == second["url"]


async def test_one_that_leaves_finishes_its_work_and_gets_no_more(build: Build) -> None:
    t = await build(pds=2, registration=True)
    release, running = await busy(t)
    left = await t.client.delete(f"{INSTANCES}/pd-0", auth=AUTH)
    seen = left.json()
    assert (left.status_code, seen["state"]) == (202, "draining")
    assert (seen["in_flight"], seen["idle"]) == (1, False)
    t.pds[1].behaviour = answer
    for _ in range(4):
        assert (await t.chat(TEXT)).status_code == 200
    assert len(t.pds[0].received) == 1

    release.set()
    assert [(await r).status_code for r in running] == [200, 200]
    await until_gone(t, "pd-0")
    again = await t.client.delete(f"{INSTANCES}/pd-0", auth=AUTH)
    assert again.status_code == 404
    assert "pd-1" in again.json()["error"]["message"]


async def test_one_that_has_left_is_not_there_though_what_watches_it_has_not_ended(
    build: Build,
) -> None:
    t = await build(registration=True)
    router = t.router.router
    members, instance = router.members, router.instances.get("encode-0")
    assert instance is not None
    ends, ended = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()
            await ended.wait()

    members._start(instance, "watching", watch())
    await t.client.delete(f"{INSTANCES}/encode-0", auth=AUTH)
    await asyncio.wait_for(ends.wait(), DEADLINE_S)
    try:
        for method, verb in (("POST", "/drain"), ("DELETE", "")):
            asked = await t.client.request(method, f"{INSTANCES}/encode-0{verb}", auth=AUTH)
            assert asked.status_code == 404
    finally:
        ended.set()


async def test_an_encoder_stays_until_the_answer_that_needs_its_item_has_begun(
    build: Build,
) -> None:
    """Its job is answered before the item is written."""
    t = await build(registration=True)
    release = asyncio.Event()
    t.pd.behaviour = once(release)
    running = asyncio.create_task(t.chat(RED))
    await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
    await t.pd.until(lambda pd: len(pd.received) == 1)
    await t.client.delete(f"{INSTANCES}/encode-0", auth=AUTH)
    async with asyncio.timeout(DEADLINE_S):
        while (await shown(t))["encode-0"]["in_flight"]:
            await asyncio.sleep(0.01)
    assert (await shown(t))["encode-0"]["state"] == "draining"
    release.set()
    assert (await running).status_code == 200
    await until_gone(t, "encode-0")


async def test_one_that_registers_again_while_it_leaves_stays(
    build: Build, newcomers: Newcomers
) -> None:
    t = await build(encoders=0, pds=0, registration=True)
    body = await newcomers.start("p", "prefill-decode")
    await t.client.post(INSTANCES, json=body, auth=AUTH)
    release = asyncio.Event()
    newcomers.instances[0].behaviour = once(release)
    running = asyncio.create_task(t.chat(TEXT))
    await newcomers.instances[0].until(lambda pd: len(pd.received) == 1)
    await t.client.delete(f"{INSTANCES}/p", auth=AUTH)
    assert (await t.client.post(INSTANCES, json=body, auth=AUTH)).status_code == 200

    release.set()
    assert (await running).status_code == 200
    assert (await t.chat(TEXT)).status_code == 200
    assert (await shown(t))["p"]["state"] == "up"


async def test_a_registered_instance_that_stays_away_is_forgotten_a_configured_one_is_not(
    build: Build, newcomers: Newcomers
) -> None:
    t = await build(registration=True, forget_after_s=0.3)
    body = await newcomers.start("p", "prefill-decode")
    await t.client.post(INSTANCES, json=body, auth=AUTH)
    assert "p" in await shown(t)

    await t.pd.serving.stop()
    await newcomers.instances[0].serving.stop()
    await until_gone(t, "p")
    assert (await shown(t))["pd-0"]["state"] == "down"

"""Media that requests name by URL, through a router between stand-ins."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.front.web import Site, never, once, plain
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import Received, until
from tests.unit.media.samples import STILLS

PNG = STILLS["png"]
INLINED = "data:image/octet-stream;base64," + base64.b64encode(PNG).decode()
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(pages={"/a.png": plain(PNG)})
    await site.start()
    yield site
    await site.stop()


def allowed(site: Site, **settings: Any) -> dict[str, Any]:
    """Return settings with which the router fetches from a site of this machine."""
    return {
        "media_urls": {
            "allowed_domains": [f"localhost:{site.port}"],
            "allowed_networks": ["127.0.0.0/8", "::1/128"],
            **settings,
        }
    }


def image(site: Site, path: str = "/a.png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://localhost:{site.port}{path}"}}


def urls(received: Received) -> list[str]:
    parts = received.body["messages"][-1]["content"]
    given = [part["image_url"] for part in parts if "image_url" in part]
    return [each if isinstance(each, str) else each["url"] for each in given]


async def test_instances_get_the_bytes_and_the_name_of_an_inlined_item(
    build: Build, site: Site
) -> None:
    t = await build(encoders=2, **allowed(site))
    responses = [
        await t.chat(TEXT, image(site)),
        await t.chat(image(site), image(site), TEXT),
        await t.chat(TEXT, {"type": "image_url", "image_url": {"url": INLINED}}),
    ]

    assert [response.status_code for response in responses] == [200] * 3
    assert [urls(received) for received in t.pd.received] == [[INLINED], [INLINED] * 2, [INLINED]]
    jobs = [received for encoder in t.encoders for received in encoder.received]
    assert [urls(job) for job in jobs] == [[INLINED]] * 3
    names = {job.params["transfers"][0]["item_uuid"] for job in jobs}
    assert len(names) == 1
    assert sum(bool(encoder.received) for encoder in t.encoders) == 1
    assert site.paths == ["/a.png"]
    assert await t.metric('epd_router_media_fetches_total{result="ok"}') == 1
    assert await t.metric('epd_router_media_urls_total{source="cache"}') == 1
    assert await t.metric("epd_router_media_fetched_bytes_total") == len(PNG)


async def test_a_slow_site_keeps_nobody_else_waiting(build: Build, site: Site) -> None:
    go_on = asyncio.Event()
    site.pages["/slow"] = once(go_on, plain(PNG))
    # What is fetched is no part of the time in which a body must come.
    t = await build(body_timeout_s=0.2, **allowed(site))
    slow_one = asyncio.create_task(t.chat(image(site, "/slow")))
    await until(lambda: bool(site.heads))
    for _ in range(20):
        assert (await t.chat(TEXT)).status_code == 200
    await asyncio.sleep(0.5)
    assert not slow_one.done()
    go_on.set()
    assert (await slow_one).status_code == 200


async def test_a_client_that_goes_ends_its_fetch(build: Build, site: Site) -> None:
    site.pages["/never"] = never
    t = await build(**allowed(site))
    asked = asyncio.create_task(t.chat(image(site, "/never")))
    await until(lambda: bool(site.heads))
    asked.cancel()
    await until(lambda: site.closed_early == 1)
    await t.until_metric('epd_router_media_fetches_total{result="cancelled"}', 1)
    assert await t.metric("epd_router_requests_in_flight") == 0


async def test_a_body_with_its_media_is_held_to_the_limit_of_bodies(
    build: Build, site: Site
) -> None:
    site.pages["/large"] = plain(bytes(300_000))
    t = await build(max_body_bytes=1 << 20, **allowed(site))
    assert (await t.chat(image(site, "/large"), image(site, "/large"))).status_code == 200
    response = await t.chat(*[image(site, "/large")] * 3)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert (await t.chat(TEXT)).status_code == 200

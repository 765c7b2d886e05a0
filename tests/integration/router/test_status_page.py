"""The status page in a real browser, before a real router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest
from starlette.responses import Response

from epd_portable.router.observability.record import RequestRecord
from epd_portable.router.settings import InstanceSettings
from tests import browser
from tests.browser import Page
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import Received, RouterServing, answer, refuse
from tests.integration.router.test_requests import RED, TEXT
from tests.integration.router.test_status import with_outcome
from tests.keyring import secret

pytestmark = pytest.mark.needs_browser

HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>alert(1)</script>'\"&amp;"
BOX = "document.querySelector('[data-instance=\"{}\"]')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser.running(tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def page(chromium: str) -> AsyncIterator[Page]:
    async with browser.tab(chromium) as page:
        yield page
        # Nothing went wrong, and nothing but the router was asked.
        assert page.problems == []
        assert len({urlsplit(url).netloc for url in page.asked}) == 1


def key() -> str:
    return secret().page_key(until=time.time() + 3600)


async def opened(page: Page, t: Topology) -> Page:
    """Open the page whole."""
    await page.open(f"{t.router.url}/#key={key()}")
    await page.until("document.querySelectorAll('#instances li').length")
    # Tests need not wait for the next second.
    await page.value("void setInterval(ask, 100)")
    return page


async def state_of(page: Page, instance: str, state: str) -> None:
    await page.until(f"{BOX.format(instance)}?.dataset.state === '{state}'")


async def test_it_shows_the_instances_and_turns_red_when_one_is_gone(
    build: Build, page: Page
) -> None:
    t = await build(encoders=2, pds=1)
    await opened(page, t)
    assert await page.value(
        "[...document.querySelectorAll('#instances li strong')].map((each) => each.textContent)"
    ) == ["encode-0", "encode-1", "pd-0"]
    left = "{}.getBoundingClientRect().left"
    encoder, pd = (left.format(BOX.format(name)) for name in ("encode-0", "pd-0"))
    assert await page.value(f"{encoder} < {pd}")
    await state_of(page, "encode-1", "up")
    colour = f"getComputedStyle({BOX.format('encode-1')}).borderLeftColor"
    well = await page.value(colour)
    await t.encoders[1].serving.stop()
    await state_of(page, "encode-1", "down")
    assert await page.value(colour) != well
    assert "down" in await page.text('[data-instance="encode-1"]')
    # Who does not see it hears it.
    await page.until("document.querySelector('#changes').textContent.includes('encode-1 is down')")
    await t.encoders[1].serving.start()
    await state_of(page, "encode-1", "up")


async def test_a_timeline_has_the_encoder_beside_the_prefill(build: Build, page: Page) -> None:
    encoded = asyncio.Event()

    async def encoding(received: Received) -> Response:
        await asyncio.sleep(0.1)
        encoded.set()
        return await answer(received)

    async def answering(received: Received) -> Response:
        if received.params:
            await encoded.wait()
            await asyncio.sleep(0.2)
        return await answer(received)

    t = await build(encoding=encoding, behaviour=answering)
    await opened(page, t)
    named = (await t.chat(TEXT, RED)).headers["x-request-id"]
    row = f"document.querySelector('[data-request=\"{named}\"]')"
    await page.until(f"{row}?.querySelector('.who').innerText.includes('200')")
    bars = await page.value(
        f"[...{row}.querySelectorAll('[data-stage]')].map((bar) => "
        "[bar.dataset.stage, bar.getBoundingClientRect().left, bar.getBoundingClientRect().right, "
        "bar.getBoundingClientRect().top])"
    )
    places = {stage: (left, right, top) for stage, left, right, top in bars}
    encode, wait = places["encode"], places["wait"]
    # At the same time, below one another; the encoder is done before the first byte.
    assert max(encode[0], wait[0]) < min(encode[1], wait[1])
    assert encode[1] < wait[1]
    assert encode[2] < wait[2]
    assert "encode-0: encode" in await page.value(
        f"{row}.querySelector('svg').getAttribute('aria-label')"
    )
    await page.value(f"{row}.querySelector('summary').click()")
    table = await page.until(f"{row}.querySelector('tbody').innerText")
    assert "image: encoded" in table


async def test_a_fallback_that_is_used_lights_up(build: Build, page: Page) -> None:
    t = await build(behaviour=refuse(500))
    await opened(page, t)
    shown = "document.querySelector('[data-fallback=error]')"
    await page.until(f"{shown}?.className === 'unused'")
    await t.chat(TEXT)
    await page.until(f"{shown}.className === 'lit' && {shown}.textContent.includes('now lit')")


async def test_names_run_no_script(build: Build, page: Page) -> None:
    t = await build(model=HOSTILE)
    assert isinstance(t.router, RouterServing)
    # Settings take no such name: it is put in behind their back.
    fleet = t.router.router.instances
    other = InstanceSettings.model_construct(
        name=HOSTILE, role="encode", url="http://127.0.0.1:9", control="", weight=1.0, labels={}
    )
    fleet.add(other).note(HOSTILE)
    record = RequestRecord(id=HOSTILE, endpoint=HOSTILE)
    t.router.router.requests.start(record)
    t.router.router.requests.finish(record)
    await opened(page, t)
    await page.until("document.querySelectorAll('#requests > li').length")
    found = await page.value("document.body.innerText")
    assert found.count(HOSTILE) == 5  # model, name, problem, request, path
    assert await page.value("document.querySelectorAll('img, #detail script').length") == 0
    assert "pwned" not in await page.value("document.title")
    fleet.remove(HOSTILE)


async def test_it_asks_for_a_key_and_says_when_that_is_wrong(build: Build, page: Page) -> None:
    t = await build()
    await page.open(f"{t.router.url}/")
    await page.until("!document.querySelector('#key-form').hidden")
    assert "1 up" not in await page.text("#summary")  # Two are: the rest is for holders of a key.
    assert await page.value("document.querySelector('#detail').hidden")
    await page.value("document.querySelector('#key').focus()")
    await page.press("no such key", "Enter")
    assert "key of the status page is wrong" in await page.text("#notice")
    assert await page.value("sessionStorage.length") == 0
    await page.value("document.querySelector('#key').focus()")
    await page.press(key(), "Enter")
    await page.until("!document.querySelector('#detail').hidden")
    assert await page.value("document.querySelector('#notice').hidden")
    # It is kept for this tab, and nowhere else.
    await page.reload()
    await page.until("!document.querySelector('#detail').hidden")
    assert await page.value("localStorage.length + document.cookie.length") == 0
    await page.value("document.querySelector('#forget').click()")
    await page.until("document.querySelector('#detail').hidden")


async def test_a_line_tells_path_and_bytes_a_second(build: Build, page: Page) -> None:
    t = await build(behaviour=with_outcome)
    await opened(page, t)
    assert await page.value("location.href") == f"{t.router.url}/"  # without the key
    await t.chat(TEXT, RED)
    await page.until(
        "[...document.querySelectorAll('#edges text.flows')].map((each) => each.textContent)"
        ".find((text) => /^shm [0-9.]+ k?B\\/s$/.test(text))"
    )
    row = await page.value(
        "[...document.querySelectorAll('#pairs td')].map((td) => td.textContent)"
    )
    assert row[:4] == ["encode-0", "pd-0", "items", "shm"]
    assert row[6] == "1 item, 1.0 kB of 1 reported"


async def test_it_says_that_the_router_is_gone_and_when_it_is_back(
    build: Build, page: Page
) -> None:
    t = await build()
    await opened(page, t)
    await t.router.stop()
    assert "does not answer" in await page.text("#notice:not([hidden])")
    assert await page.value("document.querySelector('#detail').classList.contains('stale')")
    await t.start_router_again()
    await page.until("document.querySelector('#notice').hidden")
    assert not await page.value("document.querySelector('#detail').classList.contains('stale')")


async def test_it_fits_a_phone_and_follows_the_dark(build: Build, page: Page) -> None:
    t = await build(encoders=2, pds=2)
    await opened(page, t)
    await t.chat(TEXT, RED)
    await page.until("document.querySelectorAll('#requests > li').length")
    bright = await page.value("getComputedStyle(document.body).backgroundColor")
    await page.look(360, 740, dark=True)
    assert await page.value("document.documentElement.scrollWidth") <= 360
    assert await page.value("getComputedStyle(document.body).backgroundColor") != bright


async def test_keys_reach_everything_and_everything_has_a_name(build: Build, page: Page) -> None:
    t = await build()
    await opened(page, t)
    await t.chat(TEXT, RED)
    await page.until("document.querySelectorAll('#requests > li').length")
    reached = []
    for _ in range(8):
        await page.press("Tab")
        reached.append(
            await page.value("document.activeElement.id || document.activeElement.tagName")
        )
    # The way past the topology, its table, a request, the button.
    assert [each for each in reached if each in ("A", "SUMMARY", "forget")] >= ["A", "SUMMARY"]
    assert "forget" in reached
    tree = (await page.do("Accessibility.getFullAXTree"))["nodes"]
    unnamed = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"]
        and node["role"]["value"]
        in ("button", "textbox", "image", "link", "region", "DisclosureTriangle")
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []

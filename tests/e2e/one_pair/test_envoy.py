"""Envoy in front of real engines, with the router as its endpoint picker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable.router import envoy
from epd_portable.router.settings import RouterSettings
from tests.e2e.asking import ask, ask_streamed, assert_equal
from tests.e2e.cases import SINGLE
from tests.e2e.conftest import Pair, Split, router_of
from tests.integration.envoy.conftest import free_port
from tests.integration.envoy.test_picker import asking, gateway
from tests.keyring import secret_file

pytestmark = pytest.mark.needs_envoy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the picker's Envoy reads."""
    return tmp_path_factory.mktemp("envoy")


@pytest.fixture(scope="module")
def fronted(pair: Pair, folder: Path) -> Iterator[Split]:
    options = ("--folder", str(folder), "--threads", "1")
    with router_of(
        pair.split, folder / "picker.log", options=options, store=None, envoy=True
    ) as split:
        yield split


@pytest.mark.parametrize("case", ["one picture twice", "text, picture, text, picture", "text only"])
def test_an_answer_through_envoy_is_that_of_one_process(
    fronted: Split, pair: Pair, case: str
) -> None:
    content = SINGLE[case]
    answer = ask(fronted.url, content)
    assert_equal(answer, ask(pair.reference_url, content))
    streamed = ask_streamed(fronted.url, content)
    assert_equal(streamed, answer)


def test_pictures_come_from_the_encoder(fronted: Split) -> None:
    """Looks back at what is above."""
    assert len(fronted.encoded_by("encode")) == 3
    assert fronted.encoded_by("prefill_decode") == []


@pytest.mark.full
async def test_a_gateway_of_others_gets_the_same_answers(
    fronted: Split, pair: Pair, folder: Path, tmp_path: Path
) -> None:
    settings = RouterSettings.model_validate(
        {"port": free_port(), "model": "demo", "instances": [], "secret_file": secret_file()}
    )
    picker = folder / "picker.sock"
    written = envoy.bootstrap(settings, endpoints=folder / "endpoints.json", picker=picker)
    since = pair.since_now().split
    content = SINGLE["text, picture, text, picture"]
    async with asking(gateway(written), tmp_path):
        url = f"http://127.0.0.1:{settings.port}"
        for asked in (ask, ask_streamed):
            answer = await asyncio.to_thread(asked, url, content)
            assert_equal(answer, await asyncio.to_thread(ask, pair.reference_url, content))
    assert since.encoded_by("prefill_decode") == []

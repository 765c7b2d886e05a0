"""Warm-up requests of a front over played engines, at its start and when an engine comes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core_client import EngineCoreClient

from epd_portable.front.client import SplitClient
from epd_portable.front.server import Front
from epd_portable.front.warm_up import WarmUp
from tests.integration.front.played_front import client_of
from tests.integration.front.test_front_cache import Engine, configured

__all__ = ["configured"]

pytestmark = pytest.mark.needs_vllm

ENCODERS, OTHERS = ("e-0", "e-1"), ("pd-0", "pd-1")


@pytest.fixture
def client(
    configured: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> SplitClient:
    made = client_of(configured, tmp_path, *ENCODERS, *OTHERS)
    made.engines.close = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", lambda *_, **__: made)
    return made


@pytest.fixture
async def front(client: SplitClient) -> AsyncIterator[Front]:
    made = Front.from_vllm_config(client.vllm_config)
    yield made
    made.shutdown()


def items(engine: Engine) -> set[str]:
    return {each.identifier for sent in engine.sent for each in sent.mm_features or ()}


async def test_each_pair_of_engines_has_an_item_of_its_own(
    client: SplitClient, front: Front
) -> None:
    engines = {name: Engine(client, name) for name in (*ENCODERS, "pd-0")}
    warm_up = WarmUp(front, client)
    await warm_up.start()
    assert [len(items(each)) for each in engines.values()] == [1, 1, 2]
    engines["pd-1"] = Engine(client, "pd-1")  # It comes later, and meets both.
    await asyncio.wait(warm_up._tasks)
    pairs = itertools.product(ENCODERS, OTHERS)
    shared = [items(engines[first]) & items(engines[second]) for first, second in pairs]
    assert [len(each) for each in shared] == [1] * 4 and len(set.union(*shared)) == 4
    client.engines.by_name["e-0"].instance.seen_gone("its process has ended")
    again = Engine(client, "e-0")
    await asyncio.wait(warm_up._tasks)
    assert len(items(again) - set.union(*shared)) == 2
    assert [len(items(each)) for each in engines.values()] == [2, 2, 3, 3]


async def test_start_goes_on_when_a_warm_up_fails(
    client: SplitClient, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Engine(client, name) for name in ("e-0", "pd-0")]
    front.renderer.get_mm_processor = None  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.WARNING, "epd_portable"):
        await WarmUp(front, client).start()
    assert "warm-up of e-0 and pd-0: TypeError" in caplog.text
    assert not any(each.sent for each in engines)

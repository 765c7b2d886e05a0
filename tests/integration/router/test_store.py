"""What the store has is not encoded; what it does not bring after all is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.config.store import StoreSection
from epd_portable.connector.stores.base import make_store
from epd_portable.connector.stores.entry import Seal
from epd_portable.connector.stores.file import FileStore
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import EncodeFailed, NackCode
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import Behaviour, Received, once, refuse, refusing, until
from tests.integration.router.test_metadata import GRID, describe, kinds, parts
from tests.integration.router.test_requests import BLUE, RED, TEXT
from tests.keyring import secret

SPEC = TensorSpec(shape=(4, 8), dtype="float32")
SEAL = Seal(secret())
NAMESPACE = SEAL.namespace("model")


def keep(section: StoreSection, name: str, metadata: Any = GRID) -> str:
    """Write an entry of an item; return its key."""
    key = SEAL.key(NAMESPACE, name, "image")
    payload = memoryview(bytes(SPEC.nbytes))
    entry = SEAL.entry(
        payload, key=key, mm_hash=f"engine-{name}", modality="image", metadata=metadata, tensor=SPEC
    )
    make_store(section).save_caches([entry])
    return key


@pytest.fixture
def section(tmp_path: Path) -> StoreSection:
    return StoreSection(kind="file", path=str(tmp_path / "store"), timeout_ms=10_000)


async def learned(build: Build, section: StoreSection, **settings: Any) -> tuple[Topology, str]:
    """Return a topology whose router knows the namespace, and the router's name of `RED`."""
    t = await build(encoding=describe(namespace=NAMESPACE), store=section.model_dump(), **settings)
    assert (await t.chat(RED)).status_code == 200
    # The encoder may say what it writes after the request was answered.
    await t.until_metric('epd_router_items_total{outcome="encoded"}', 1)
    name = parts(t.encoders[0].received[0])[0]["uuid"]
    for instance in t.encoders + t.pds:
        instance.received.clear()
    return t, name


def transfers(t: Topology) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = t.pd.received[-1].params["transfers"]
    return found


async def test_an_item_that_is_stored_is_not_encoded(build: Build, section: StoreSection) -> None:
    t, name = await learned(build, section)
    key = keep(section, name)
    assert (await t.chat(TEXT, BLUE, RED)).status_code == 200
    [job] = t.encoders[0].received
    assert parts(job)[0]["uuid"] != name
    stores = {each["item_uuid"]: each.get("store", "") for each in transfers(t)}
    assert stores == {parts(job)[0]["uuid"]: "", name: key}
    assert list(stores)[1] == name, "in the order of the prompt"
    assert await t.metric('epd_router_items_total{outcome="stored"}') == 1
    assert await t.metric('epd_router_store_items_total{result="hit"}') == 1


async def test_nothing_is_asked_before_an_encoder_has_said_what_it_writes(
    build: Build, section: StoreSection
) -> None:
    t = await build(encoding=describe(), store=section.model_dump())
    for _ in range(2):
        assert (await t.chat(RED)).status_code == 200
    assert await t.metric('epd_router_store_items_total{result="unavailable"}') == 2


async def test_nothing_is_asked_while_encoders_write_different_things(
    build: Build, section: StoreSection
) -> None:
    t, name = await learned(build, section, encoders=2)
    keep(section, name)
    for encoder in t.encoders:
        encoder.behaviour = describe(namespace=SEAL.namespace(encoder.name))
    for number in range(40):
        await t.chat({**RED, "image_url": {"url": f"data:image/png;base64,{number:04d}"}})
    skipped = await t.metric('epd_router_store_items_total{result="unavailable"}')
    await t.chat(RED)
    assert await t.metric('epd_router_store_items_total{result="unavailable"}') == skipped + 1


def not_stored(t: Topology, then: Behaviour | None = None) -> Behaviour:
    """A PD instance that cannot load what it is told to, and answers when an encoder was asked."""

    async def behave(received: Received) -> Response:
        if not received.params["transfers"][0].get("store"):
            return JSONResponse({"choices": [], "seen": kinds(received)})
        await t.control.refuse(received.params, NackCode.NOT_STORED, "gone")
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
        return await (then or answered)(received)

    return behave


async def answered(received: Received) -> Response:
    return JSONResponse({"choices": [], "seen": kinds(received)})


@pytest.mark.parametrize("media", ["concurrent", "metadata"])
async def test_an_item_that_the_pd_instance_cannot_load_is_encoded(
    build: Build, section: StoreSection, media: str
) -> None:
    t, name = await learned(build, section, media=media)
    keep(section, name)
    t.pd.behaviour = not_stored(t)
    response = await t.chat(RED)
    assert response.status_code == 200
    assert response.json()["seen"] == ["image_url" if media == "concurrent" else "image_embeds"]
    [job], [asked] = t.encoders[0].received, t.pd.received
    assert job.params["transfers"][0]["transfer_id"] == transfers(t)[0]["transfer_id"]
    assert asked.params["transfers"][0]["media"] is (media == "concurrent")
    assert await t.metric('epd_router_fallbacks_total{failure="missing",fallback="retried"}') == 1


async def test_without_an_encoder_either_the_pd_instance_is_told_to_encode(
    build: Build, section: StoreSection
) -> None:
    t, name = await learned(build, section)
    keep(section, name)
    await t.encoders[0].serving.stop()
    await t.until_health(lambda seen: seen["encode-0"]["state"] != "healthy")
    told = asyncio.Event()
    t.pd.behaviour = refusing(t.control, NackCode.NOT_STORED, "gone", once(told, answered))
    chat = asyncio.create_task(t.chat(RED))
    message = None
    while not isinstance(message, EncodeFailed):
        _, message = await t.control.receive()
    told.set()
    assert (await chat).status_code == 200
    assert await t.metric('epd_router_fallbacks_total{phase="encode",fallback="local"}') == 1


async def test_an_item_without_its_media_that_nobody_brings_goes_with_its_media(
    build: Build, section: StoreSection
) -> None:
    """It must never be encoded where its media are not: that would end the engine."""
    t, name = await learned(build, section, media="metadata")
    keep(section, name)
    t.encoders[0].behaviour = refuse(500)

    async def lost(received: Received) -> Response:
        if kinds(received) == ["image_url"]:
            return await answered(received)
        await t.control.refuse(received.params, NackCode.NOT_STORED, "gone")
        await t.encoders[0].until(lambda encoder: len(encoder.received) >= 1)
        await t.control.refuse(received.params, NackCode.UNAVAILABLE, "nobody brings it")
        return Response(status_code=500)

    t.pd.behaviour = lost
    response = await t.chat(RED)
    assert response.json()["seen"] == ["image_url"]
    first, second = t.pd.received
    assert (kinds(first), first.params["transfers"][0]["media"]) == (["image_embeds"], False)
    assert parts(second)[0]["uuid"].endswith("-media")


async def test_what_an_item_is_comes_from_its_entry(build: Build, section: StoreSection) -> None:
    t, name = await learned(build, section, media="metadata")
    keep(section, name)
    assert (await t.chat(RED)).status_code == 200
    [received] = t.pd.received
    assert (kinds(received), parts(received)[0]["image_embeds"]) == (["image_embeds"], GRID)
    assert transfers(t)[0]["item_uuid"] == f"engine-{name}"
    assert t.encoders[0].received == []


@pytest.mark.parametrize("metadata", [None, {}])
async def test_an_entry_that_does_not_say_it_is_of_no_use_without_media(
    build: Build, section: StoreSection, metadata: Any
) -> None:
    t, name = await learned(build, section, media="metadata")
    keep(section, name, metadata)
    assert (await t.chat(RED)).status_code == 200
    assert len(t.encoders[0].received) == 1
    assert not transfers(t)[0].get("store")
    assert kinds(t.pd.received[-1]) == ["image_embeds"], "as the encoder says it"
    assert await t.metric('epd_router_fallbacks_total{fallback="original_media"}') == 0


async def test_what_was_not_brought_once_is_not_expected_again(
    build: Build, section: StoreSection
) -> None:
    t, name = await learned(build, section, pds=2)
    keep(section, name)

    async def fails(received: Received) -> Response:
        if not received.params["transfers"][0].get("store"):
            return await answered(received)
        await t.control_of(received).refuse(received.params, NackCode.NOT_STORED, "gone")
        await t.encoders[0].until(lambda encoder: len(encoder.received) == 1)
        return Response(status_code=500)

    for pd in t.pds:
        pd.behaviour = fails
    assert (await t.chat(RED)).status_code == 200
    [first], [second] = (pd.received for pd in t.pds)
    stores = [each.params["transfers"][0].get("store", "") for each in (first, second)]
    assert sorted(map(bool, stores)) == [False, True]


async def test_a_forged_head_is_counted_and_removed(build: Build, section: StoreSection) -> None:
    t, name = await learned(build, section)
    key = keep(section, name)
    store = make_store(section)
    assert isinstance(store, FileStore)
    path = next(Path(str(section.path)).rglob(f"{key}.safetensors"))
    path.write_bytes(path.read_bytes().replace(b"engine-", b"enginf-"))
    assert (await t.chat(RED)).status_code == 200
    assert len(t.encoders[0].received) == 1
    assert await t.metric('epd_router_store_items_total{result="corrupt"}') == 1

    await until(lambda: not path.exists())


class Silent(FileStore):
    """A store that does not answer before it is told to."""

    gate = None

    def has_caches(self, keys: Any) -> Any:
        assert self.gate is not None
        self.gate.wait(30)
        return super().has_caches(keys)


async def test_a_store_that_does_not_answer_is_waited_for_once(
    build: Build, section: StoreSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    Silent.gate = threading.Event()  # type: ignore[assignment]
    monkeypatch.setattr("epd_portable.connector.stores.file.FileStore", Silent)
    slow = section.model_copy(update={"timeout_ms": 50.0})
    t, name = await learned(build, slow)
    keep(section, name)
    try:
        for _ in range(5):
            assert (await t.chat(RED)).status_code == 200
        assert await t.metric('epd_router_store_items_total{result="error"}') >= 1
        assert await t.metric('epd_router_store_items_total{result="unavailable"}') >= 3
        assert await t.metric("epd_router_store_breaker") >= 1
    finally:
        Silent.gate.set()  # type: ignore[attr-defined]

    async with asyncio.timeout(30):
        while not transfers(t)[0].get("store"):
            await t.chat(RED)
            await asyncio.sleep(0.1)

"""Items that a store has: the front expects them from there, and from encoders otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from epd_portable.config.store import StoreSection
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores import lookup
from epd_portable.transfer.stores.base import make_store
from epd_portable.transfer.stores.entry import Seal
from epd_portable.transfer.stores.file import FileStore
from epd_portable.wire.descriptors import TensorSpec
from tests.integration.front.played_front import Front, Make, settle
from tests.unit.builders import Clock
from tests.waiting import until_async

ENDED = FinishReason.STOP
SPEC = TensorSpec(shape=(4, 8), dtype="float32")
Stored = Callable[..., Front]


@pytest.fixture
def section(tmp_path: Path) -> StoreSection:
    return StoreSection(kind="file", path=str(tmp_path / "store"), timeout_ms=10_000)


@pytest.fixture
def front(make: Make, section: StoreSection) -> Stored:
    """Return what makes a front with a store, whose engines load entries of one model."""

    def begin(*names: str, **settings: Any) -> Front:
        store = section.model_copy(update=settings)
        made = make(*names, store=store, max_queued_items=10_000)
        for name in names:
            made.client.engines.by_name[name].namespace = namespace(made)
        return made

    return begin


def namespace(front: Front) -> str:
    return Seal(front.client.secret).namespace("model")


def keep(front: Front, section: StoreSection, name: str) -> str:
    """Write an entry of an item; return its key."""
    seal = Seal(front.client.secret)
    key = seal.key(namespace(front), name, "image")
    payload = memoryview(bytes(SPEC.nbytes))
    entry = seal.entry(payload, key=key, mm_hash=name, modality="image", tensor=SPEC)
    make_store(section).save_caches([entry])
    return key


async def ask(front: Front, *pictures: str, name: str = "r") -> Any:
    """Send a request; return what its engine is told of its items' ways."""
    await front.ask(*pictures, name=name)
    await until_async(lambda: name in front.engines["pd-0"].requests)
    await settle()
    return front.engines["pd-0"].params


def looked_up(front: Front, result: str) -> float:
    registry = front.client.metrics.registry
    return registry.get_sample_value("epd_front_store_items_total", {"result": result}) or 0


async def test_stored_item_costs_no_encode_job(front: Stored, section: StoreSection) -> None:
    played = front("e-0", "pd-0")
    key = keep(played, section, "a")
    params = await ask(played, "b", "a")
    (job,) = played.jobs("e-0")
    assert job.mm_features[0].identifier == "b"
    stores = {each["item_uuid"]: each["store"] for each in params["transfers"]}
    assert stores == {"b": "", "a": key}
    sent = played.engines["pd-0"].last.mm_features
    assert [set(each.data) for each in sent] == [{"image_grid_thw"}] * 2
    await played.says("e-0", job.request_id, end=ENDED)
    await played.says("pd-0", "r", 7, end=ENDED)
    assert played.items() == {"encoded": 1, "stored": 1}
    assert (looked_up(played, "hit"), looked_up(played, "miss")) == (1, 1)
    assert played.is_empty()


@pytest.mark.parametrize("reset", [False, True])
async def test_held_item_is_looked_up_after_a_reset_only(
    front: Stored, section: StoreSection, reset: bool
) -> None:
    played = front("e-0", "pd-0")
    keep(played, section, "a")
    await played.tells("pd-0", a=True)
    if reset:
        await played.client.call_utility_async("reset_encoder_cache")
    (transfer,) = (await ask(played, "a"))["transfers"]
    assert (transfer["on_demand"], bool(transfer["store"])) == (not reset, reset)
    assert looked_up(played, "hit") == reset


async def test_entry_that_is_not_loaded_is_encoded(front: Stored, section: StoreSection) -> None:
    played = front("e-0", "pd-0")
    keep(played, section, "a")
    (transfer,) = (await ask(played, "a"))["transfers"]
    assert transfer["store"] and not played.jobs("e-0")
    await played.tells("pd-0", transfer["transfer_id"])
    (job,) = played.jobs("e-0")
    sent = (job.sampling_params.extra_args or {})["ec_transfer_params"]["transfers"]
    assert sent[0]["transfer_id"] == transfer["transfer_id"]
    await played.says("e-0", job.request_id, end=ENDED)
    await played.ends()
    assert played.items() == {"encoded": 1}


async def test_entry_that_failed_once_is_not_expected_again(
    front: Stored, section: StoreSection
) -> None:
    played = front("e-0", "pd-0", "pd-1")
    keep(played, section, "a")
    await played.ask("a")
    await until_async(lambda: any("r" in each.requests for each in played.engines.values()))
    first = next(name for name, each in played.engines.items() if "r" in each.requests)
    other = "pd-1" if first == "pd-0" else "pd-0"
    (transfer,) = played.engines[first].params["transfers"]
    assert transfer["store"]
    await played.tells(first, transfer["transfer_id"])
    played.goes(first)
    await until_async(lambda: played.engines[other].requests)
    (again,) = played.engines[other].params["transfers"]
    assert again["store"] == ""


async def test_entry_is_encoded_where_it_is_needed_without_encoder(
    front: Stored, section: StoreSection
) -> None:
    played = front("pd-0")
    keep(played, section, "a")
    (transfer,) = (await ask(played, "a"))["transfers"]
    await played.tells("pd-0", transfer["transfer_id"])
    again = played.engines["pd-0"].last
    assert again.request_id == "r-1" and played.engines["pd-0"].params is None
    assert "pixel_values" in again.mm_features[0].data
    await played.says("pd-0", "r-1", 7, end=ENDED)
    assert await played.answers() == [("r", [7], ENDED)]


async def test_store_is_not_read_before_the_engine_names_its_entries(
    front: Stored, section: StoreSection
) -> None:
    played = front("e-0", "pd-0")
    keep(played, section, "a")
    played.client.engines.by_name["pd-0"].namespace = ""
    assert len((await ask(played, "a"))["transfers"]) == len(played.jobs("e-0")) == 1
    assert looked_up(played, "unavailable") == 1


async def test_forged_head_is_counted_and_removed(front: Stored, section: StoreSection) -> None:
    played = front("e-0", "pd-0")
    key = keep(played, section, "aaaa")
    path = next(Path(str(section.path)).rglob(f"{key}.safetensors"))
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaab"))
    await ask(played, "aaaa")
    assert len(played.jobs("e-0")) == 1
    assert looked_up(played, "corrupt") == 1
    await until_async(lambda: not path.exists())


class Silent(FileStore):
    """A store that does not answer before its gate is open."""

    gate: threading.Event

    def has_caches(self, keys: Any) -> Any:
        self.gate.wait(30)
        return super().has_caches(keys)


async def test_silent_store_is_waited_for_once(
    front: Stored, section: StoreSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, Silent.gate = Clock(), threading.Event()
    monkeypatch.setattr("epd_portable.transfer.stores.file.FileStore", Silent)
    monkeypatch.setattr(lookup, "CircuitBreaker", lambda: CircuitBreaker(clock=clock))
    played = front("e-0", "pd-0", timeout_ms=50.0)
    keep(played, section.model_copy(update={"timeout_ms": 50.0}), "a")
    try:
        for number in range(5):
            await ask(played, "a", name=f"r{number}")
            job = played.engines["e-0"].last.request_id
            await played.says("e-0", job, end=ENDED)
            await played.says("pd-0", f"r{number}", 7, end=ENDED)
        assert (looked_up(played, "error"), looked_up(played, "unavailable")) == (1, 4)
    finally:
        Silent.gate.set()
    async with asyncio.timeout(30):
        for number in range(5, 1000):  # A reply may come too late on a busy machine.
            (transfer,) = (await ask(played, "a", name=f"r{number}"))["transfers"]
            if transfer["store"]:
                break
            clock.now += 60.0

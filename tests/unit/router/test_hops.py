"""What is explained of choices that a trusted hop steers."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from epd_portable.placement.instances import EndpointPool
from epd_portable.placement.profiles.selection_types import Explanation
from epd_portable.router.hops import (
    CACHE_KEY,
    ENCODER_MODEL_LABEL,
    ENCODERS,
    MAPPING,
    MODEL,
    PREFILLER,
    HopSelection,
    RoutingHints,
)
from epd_portable.router.prefill import asks_for_kv
from epd_portable.router.selector import EndpointSelector
from tests.unit.builders import instance_settings
from tests.unit.router.test_selector import NOTHING, fleet, picture

ITEMS = (picture("p0"), picture("p1"))
CALL = msgspec.structs.replace(NOTHING, items=ITEMS)
ASKS_FOR_KV = msgspec.structs.replace(
    CALL, fields={"kv_transfer_params": msgspec.Raw(b'{"do_remote_decode": true}')}
)
AT = {"x-request-id": "k"}


class Asked:
    """A hop's request, and what is explained of it."""

    def __init__(self, instances: EndpointPool, call: Any = CALL, **wish: Any) -> None:
        self._explanation = Explanation()
        inner = EndpointSelector(instances).start_selection(call, AT, self._explanation)
        self.selection = HopSelection(RoutingHints(**wish), inner)

    def told(self) -> list[dict[str, Any]]:
        """Return what was explained since the last time."""
        text = self._explanation.text()
        self._explanation.decisions.clear()
        found: list[dict[str, Any]] = json.loads(text)
        return found


def drain(instances: EndpointPool, name: str) -> None:
    instance = instances.get(name)
    assert instance is not None
    instance.drain()


def test_what_is_done_when_who_is_named_cannot_have_it_is_explained() -> None:
    instances = fleet(encoders=2, pds=2)
    drain(instances, "pd1")
    asked = Asked(instances, prefiller="pd1:1", mapping={0: "e0:1"}, encoders=("e0:1",))
    asked.selection.choose_pd(())
    named, chosen = asked.told()
    assert (named["header"], named["winner"]) == (PREFILLER, None)
    assert named["reason"].startswith("pd1 is named and is draining: ")
    assert "the router chooses" in named["reason"]
    assert (chosen["profile"], chosen["winner"]) == ("default", "pd0")
    # Both of its wishes for an item, then the router's own choice.
    asked.selection.choose_encoder(ITEMS[0], ["e0"])
    mapped, among, chosen = asked.told()
    assert (mapped["header"], mapped["winner"]) == (MAPPING, None)
    assert mapped["reason"].startswith("e0 is named and was tried: ")
    assert (among["header"], among["winner"]) == (ENCODERS, None)
    assert among["filters"] == {"there": 2, ENCODERS: 1, "usable": 0}
    assert (chosen["profile"], chosen["winner"]) == ("default", "e1")


def test_how_many_a_header_leaves_is_explained() -> None:
    instances = fleet(encoders=3)
    asked = Asked(instances, encoders=("e1:1", "e2:1"))
    chosen = asked.selection.choose_encoder(ITEMS[0], ())
    (among,) = asked.told()
    assert among["header"] == ENCODERS
    assert among["filters"] == {"there": 3, ENCODERS: 2, "usable": 2}
    assert set(among["scores"]) == {"e1", "e2"} and chosen is not None
    assert among["winner"] == chosen.name in ("e1", "e2")
    assert among["reason"].startswith("by an item's hash")

    asked = Asked(instances, cache_key="album")
    asked.selection.choose_encoder(ITEMS[0], ())
    (among,) = asked.told()
    assert (among["header"], among["filters"][CACHE_KEY]) == (CACHE_KEY, 3)
    assert among["reason"].startswith(f"by {CACHE_KEY}")

    labels = {ENCODER_MODEL_LABEL: "b"}
    instances = EndpointPool()
    for name, more in (("e0", {"labels": labels}), ("e1", {"labels": {ENCODER_MODEL_LABEL: "a"}})):
        instances.add(instance_settings(name, "encode", **more)).seen_well()
    asked = Asked(instances, model="b")
    asked.selection.choose_encoder(ITEMS[0], ())
    asked.selection.choose_encoder(ITEMS[0], ["e0"])
    chosen_one, nobody = asked.told()
    assert (chosen_one["header"], chosen_one["winner"]) == (MODEL, "e0")
    assert chosen_one["filters"] == {"there": 2, MODEL: 1, "usable": 1}
    assert nobody["winner"] is None and "no other may" in nobody["reason"]


def test_a_prefill_instance_that_is_named_is_explained_to_who_has_it_compute() -> None:
    instances = fleet(pds=1)
    instances.add(instance_settings("pre", "prefill")).seen_well()
    assert asks_for_kv(ASKS_FOR_KV)
    asked = Asked(instances, ASKS_FOR_KV, prefiller="pre:1")
    asked.selection.choose_pd(())
    assert asked.selection.choose_pd(["pre"]) is None
    named, nobody = asked.told()
    assert (named["stage"], named["header"], named["winner"]) == ("prefill", PREFILLER, "pre")
    assert nobody["reason"] == (
        "pre is named and was tried: nobody else computes for a hop that wants this one"
    )
    asked = Asked(instances, prefiller="pre:1")
    asked.selection.choose_prefill(())
    (named,) = asked.told()
    assert (named["stage"], named["header"], named["winner"]) == ("prefill", PREFILLER, "pre")

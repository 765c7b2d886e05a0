"""Choices among the instances of a router, by replayed histories of requests."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from epd_portable.config.choice import parse_choice
from epd_portable.placement.assignment import EncodeTimes, choose_encoders
from epd_portable.placement.instances import EndpointPool
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.profiles.selection_types import (
    MAX_EXPLANATION_BYTES,
    Decision,
    Explanation,
)
from epd_portable.router.contents.body import Call, Rules, read_call
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.selector import EndpointSelector, Selection
from tests.unit.builders import instance_settings

AFFINITY = """
plugins:
- {type: encode-filter}
- {type: decode-filter}
- {type: mm-embeddings-cache-scorer}
- {type: prefix-cache-scorer, parameters: {blockSizeTokens: 16}}
- {type: session-affinity-scorer}
- {type: active-request-scorer}
- {type: encode-load-scorer, parameters: {threshold: 8}}
schedulingProfiles:
- name: encode
  plugins:
  - {pluginRef: encode-filter}
  - {pluginRef: mm-embeddings-cache-scorer, weight: 4}
  - {pluginRef: encode-load-scorer}
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: session-affinity-scorer, weight: 4}
  - {pluginRef: prefix-cache-scorer, weight: 4}
  - {pluginRef: active-request-scorer}
"""
NOTHING: Call = Call.untouched("POST", "/v1/chat/completions", b"{}")


def fleet(encoders: int = 0, pds: int = 0) -> EndpointPool:
    instances = EndpointPool(chance=random.Random(7))
    for number in range(encoders):
        instances.add(instance_settings(f"e{number}", "encode")).seen_well()
    for number in range(pds):
        instances.add(instance_settings(f"pd{number}", "prefill-decode")).seen_well()
    return instances


def selector(
    instances: EndpointPool, text: str = AFFINITY, *, deciders: bool = True
) -> EndpointSelector:
    return EndpointSelector(instances, Policy(parse_choice(text)), deciders=deciders)


def begun(
    one: EndpointSelector,
    key: str = "k",
    call: Call = NOTHING,
    *,
    session: str = "",
    explanation: Explanation | None = None,
) -> Selection:
    headers = {"x-request-id": key} | ({"x-session-id": session} if session else {})
    return one.start_selection(call, headers, explanation)


def picture(name: str, pixels: int = 0) -> MediaItem:
    return MediaItem(item_uuid=name, modality="image", part={}, pixels=pixels)


def chat(*texts: str) -> Call:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return read_call("/v1/chat/completions", msgspec.json.encode({"messages": messages}), Rules())


@pytest.mark.parametrize("by_policy", [False, True])
@pytest.mark.parametrize("pds", [4, 200])
def test_no_id_of_a_request_leads_to_an_instance(pds: int, by_policy: bool) -> None:
    instances = fleet(pds=pds)
    one = selector(instances) if by_policy else EndpointSelector(instances)
    with contextlib.ExitStack() as working:
        for _ in range(10 * pds):
            pd = begun(one, "the same id").choose_pd(())
            assert pd is not None
            working.enter_context(pd.working())
        assert max(each.load for each in instances.all) <= 14


# What a policy is told of the instances.


def test_items_of_one_request_are_shared_among_encoders() -> None:
    for one in (selector(fleet(encoders=2)), EndpointSelector(fleet(encoders=2))):
        items = [picture(str(n)) for n in range(8)]
        found = [*choose_encoders(items, begun(one).choose_encoder, EncodeTimes()).values()]
        assert {Counter(found)[each] for each in set(found)} <= {3, 4, 5}


def test_an_item_that_was_not_encoded_is_not_taken_as_held() -> None:
    instances = fleet(encoders=2)
    policy = selector(instances)
    selection, item = begun(policy), picture("p")
    first = selection.choose_encoder(item, ())
    assert first is not None
    selection.note_encode_job(item, first)
    assert all(begun(policy, f"k{n}").choose_encoder(item, ()) is first for n in range(10))
    selection.note_encode_job(item, first, failed=True)
    assert len({begun(policy, f"k{n}").choose_encoder(item, ()) for n in range(20)}) == 2


def test_what_an_instance_had_is_forgotten_when_it_goes_down_or_leaves() -> None:
    instances = fleet(pds=2)
    policy = selector(instances)
    call = chat("hello " * 100)
    first = begun(policy, call=call).choose_pd(())
    assert first is not None
    begun(policy, call=call).note_request(first, [])
    assert len(first.cached.blocks) > 0
    assert all(begun(policy, f"k{n}", call).choose_pd(()) is first for n in range(10))
    first.seen_gone("refused")
    other = begun(policy, call=call).choose_pd(())
    assert other is not None and other is not first
    first.seen_well()
    assert len(first.cached.blocks) == 0
    instances.remove(first.name)
    assert len({begun(policy, f"k{n}", call).choose_pd(()) for n in range(9)}) == 1
    # One that has left while it was asked is no trouble.
    begun(policy, call=call).note_request(first, [picture("p")])
    again = instances.add(instance_settings(first.name, "prefill-decode"))
    again.seen_well()
    assert again in {begun(policy, f"k{n}", call).choose_pd(()) for n in range(30)}


def test_those_that_are_preferred_are_chosen_first_and_excluded_ones_never() -> None:
    instances = fleet(pds=3)
    for one in (selector(instances), EndpointSelector(instances)):
        found = {begun(one, f"k{n}").choose_pd(["pd0"]) for n in range(30)}
        assert {each.name for each in found if each} == {"pd1", "pd2"}
        assert begun(one).choose_pd(["pd0", "pd1", "pd2"]) is None
    suspected = instances.get("pd1")
    assert suspected is not None
    suspected.failed("error")
    for one in (selector(instances), EndpointSelector(instances)):
        found = {begun(one, f"k{n}").choose_pd(["pd0"]) for n in range(30)}
        assert {each.name for each in found if each} == {"pd2"}
        found = {begun(one, f"k{n}").choose_pd(["pd0", "pd2"]) for n in range(30)}
        assert {each.name for each in found if each} == {"pd1"}


# Weights by default.


def test_by_default_an_instance_of_twice_the_weight_gets_twice_as_much() -> None:
    instances = EndpointPool()
    for name, weight in (("small", 1.0), ("large", 2.0)):
        instances.add(instance_settings(name, "prefill-decode", weight=weight)).seen_well()
        instances.add(instance_settings(f"e-{name}", "encode", weight=weight)).seen_well()
    one = EndpointSelector(instances)
    with contextlib.ExitStack() as working:
        for number in range(300):
            selection = begun(one, f"k{number}")
            for chosen in (
                selection.choose_pd(()),
                selection.choose_encoder(picture(f"p{number}"), ()),
            ):
                assert chosen is not None
                working.enter_context(chosen.working())
        loads = {each.name: each.load for each in instances.all}
    assert (loads["small"], loads["large"]) == (100, 200)
    assert 160 < loads["e-large"] < 251


# Explanations.


def told(instances: EndpointPool) -> list[dict[str, Any]]:
    explanation = Explanation()
    selection = begun(EndpointSelector(instances), explanation=explanation)
    selection.choose_pd(["pd1"])
    selection.choose_encoder(picture("p"), ())
    found = json.loads(explanation.text())
    assert isinstance(found, list)
    return found


def test_choices_by_the_default_rules_say_why() -> None:
    decode, encode = told(fleet(encoders=2, pds=2))
    assert (decode["profile"], decode["winner"]) == ("default", "pd0")
    assert decode["filters"] == {"there": 2, "usable": 1}
    assert "least load" in decode["reason"] and "hash" in encode["reason"]
    assert encode["item"] == "p" and set(encode["scores"]) == {"e0", "e1"}
    decode, encode = told(fleet())
    assert decode["winner"] is None and decode["reason"] == "no instance is left"


def test_an_explanation_fits_into_a_header() -> None:
    explanation = Explanation()
    for number in range(300):
        decision = Decision(stage="encode", item=f"{number:064}", winner="ä" * 20)
        decision.totals = {f"instance-{n}": float(n) for n in range(16)}
        explanation.decisions.append(decision)
        if number % 25 == 0:
            text = explanation.text()
            assert len(text) <= MAX_EXPLANATION_BYTES and text.isascii()
    *shown, last = json.loads(text)
    assert len(shown) + last["left_out"] == 276 and len(shown) > 30

"""Built-in types: filters, scorers, pickers and deciders."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from epd_portable.errors import ConfigError
from epd_portable.placement.instances import LoadReport
from epd_portable.placement.profiles.catalogue import make_plugin
from epd_portable.placement.profiles.selection_types import Scorer, SelectionRequest, stages
from tests.unit.placement.profiles.situations import (
    Picture,
    Snapshot,
    asked,
    decided,
    having,
    kept,
    picker,
    scores,
    seen,
    to_encode,
    with_load,
)


@pytest.mark.parametrize(
    ("kind", "parameters", "wrong"),
    [
        ("by-label", {}, "label: Field required"),
        ("by-label", {"label": "a", "values": []}, "label, validValues, allowsNoLabel"),
        ("encode-filter", {"a": 1}, "its parameters: none"),
        ("label-selector-filter", {"matchExpressions": [{"key": "a", "operator": "Gt"}]}, "'In'"),
        ("prefix-cache-affinity-filter", {"peakPrefillThroughput": 0}, "peakPrefillThroughput"),
        ("prefix-cache-affinity-filter", {"ttftSource": "latencyPredictor"}, "ttftSource"),
        ("multimodal-epd-decider", {"minImageSize": -1}, "minImageSize"),
        ("encode-load-scorer", {"threshold": 0}, "threshold"),
        ("encode-load-scorer", {"encoderType": "smell"}, "encoderType"),
        ("consistent-hash-scorer", {"loadBound": 1}, "loadBound"),
        ("prefix-cache-scorer", {"blockSizeTokens": "64"}, "blockSizeTokens"),
        ("active-request-scorer", {"maxBusyScore": 2}, "maxBusyScore"),
        ("queue-scorer", {"threshold": 3}, "threshold"),
        ("mm-embeddings-cache-scorer", {"cacheSizeInMBPerServer": 1}, "cacheSizeInMBPerServer"),
    ],
)
def test_wrong_parameters_are_refused_with_those_that_there_are(
    kind: str, parameters: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"plug-in 'mine': .*{wrong}"):
        make_plugin(kind, "mine", parameters)


# Filters.

ROLES = [
    *("encode", "prefill", "decode", "encode-prefill", "prefill-decode", "encode-prefill-decode"),
    *("all", "both"),
]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("encode-filter", "encode encode-prefill encode-prefill-decode all"),
        ("prefill-filter", "prefill encode-prefill prefill-decode encode-prefill-decode all both"),
        ("decode-filter", "decode prefill-decode encode-prefill-decode all both"),
    ],
)
def test_a_stage_is_for_those_whose_role_has_it(kind: str, names: str) -> None:
    assert kept(kind, asked(), [seen(role, role=role) for role in ROLES]) == names


@pytest.mark.parametrize(
    ("role", "served"),
    [
        ("epd", "decode encode prefill"),
        ("pd", "decode prefill"),
        ("ep", "encode prefill"),
        ("e", "encode"),
        ("", ""),
        ("encode-", ""),
        ("prefill-dance", ""),
    ],
)
def test_roles_are_stages_or_short_words_for_them(role: str, served: str) -> None:
    assert " ".join(sorted(stages(role))) == served


A = seen("a", labels={"zone": "1", "gpu": "a100"})
B = seen("b", labels={"zone": "2"})
NONE = seen("none")
IN = {"key": "zone", "operator": "In", "values": ["1", "3"]}


@pytest.mark.parametrize(
    ("kind", "parameters", "names"),
    [
        ("by-label", {"label": "zone", "validValues": ["1"]}, "a"),
        ("by-label", {"label": "zone", "validValues": ["1"], "allowsNoLabel": True}, "a none"),
        ("by-label", {"label": "zone", "allowsNoLabel": True}, "none"),
        ("by-label", {"label": "llm-d.ai/role", "validValues": ["prefill-decode"]}, "a b none"),
        ("by-label", {"label": "llm-d.ai/role", "validValues": ["encode"]}, ""),
        ("label-selector-filter", {}, "a b none"),
        ("label-selector-filter", {"matchLabels": {"zone": "2"}}, "b"),
        ("by-label-selector", {"matchLabels": {"zone": "2"}}, "b"),
        ("label-selector-filter", {"matchExpressions": [IN]}, "a"),
        ("label-selector-filter", {"matchExpressions": [{**IN, "operator": "NotIn"}]}, "b none"),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
            "a",
        ),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]},
            "b none",
        ),
        ("label-selector-filter", {"matchLabels": {"zone": "2"}, "matchExpressions": [IN]}, ""),
    ],
)
def test_labels_say_who_is_kept(kind: str, parameters: dict[str, Any], names: str) -> None:
    assert kept(kind, asked(), [A, B, NONE], **parameters) == names


def of_type(words: str, load: int = 0) -> Snapshot:
    return seen(words, load=load, labels={"llm-d.ai/encoder-type": words})


@pytest.mark.parametrize(
    ("modality", "names"),
    [
        ("image", "vision none"),
        ("video", "vision audio,video none"),
        ("audio", "audio audio,video none"),
    ],
)
def test_an_item_meets_encoders_of_its_type(modality: Any, names: str) -> None:
    there = [of_type("vision"), of_type("audio"), of_type("audio,video"), NONE]
    assert kept("encoder-type-filter", to_encode(modality=modality), there) == names
    assert len(kept("encoder-type-filter", asked(), there).split()) == 4


@pytest.mark.parametrize(
    ("model", "names"), [("m1", "one two none"), ("m2", "two none"), ("", "one two none")]
)
def test_a_model_meets_instances_that_serve_it(model: str, names: str) -> None:
    one, two = ({"llm-d.ai/model": served} for served in ("m1", "m1, m2"))
    there = [seen("one", labels=one), seen("two", labels=two), NONE]
    assert kept("model-filter", asked(model=model), there) == names


def test_a_session_has_one_instance_while_that_is_there() -> None:
    there = with_load(*[0] * 8)
    need, kind = asked(session="s"), "session-affinity-filter"
    chosen = kept(kind, need, there)
    assert len(chosen.split()) == 1
    assert chosen == kept(kind, need, there[::-1])
    left = [each for each in there if each.name != chosen]
    assert len(kept(kind, need, left).split()) == 1
    assert len(kept(kind, asked(), there).split()) == 8
    assert kept(kind, need, []) == ""


# Scorers.


def reporting(load: int = 0, **report: Any) -> Snapshot:
    return seen("x", load=load, reported=LoadReport(**report))


PDS = [
    reporting(9, waiting=1, running=8, kv_used=0.25),
    reporting(0, waiting=3, running=2, kv_used=0),
]
ENCODERS = [reporting(9, items=1), reporting(0, items=5)]


@pytest.mark.parametrize(
    ("kind", "parameters", "there", "expected"),
    [
        ("active-request-scorer", {}, with_load(0, 0), [1, 1]),
        ("active-request-scorer", {}, with_load(0, 2, 4), [1, 0.5, 0]),
        ("active-request-scorer", {}, with_load(3, 3), [0, 0]),
        ("active-request-scorer", {"idleThreshold": 2}, with_load(1, 2, 4), [1, 1, 0]),
        ("active-request-scorer", {"maxBusyScore": 0.4}, with_load(0, 2, 4), [1, 0.2, 0]),
        ("queue-scorer", {}, with_load(2, 3, 4), [1, 0.5, 0]),
        ("queue-scorer", {}, with_load(3, 3), [1, 1]),
        ("running-requests-size-scorer", {}, with_load(0, 4), [1, 0]),
        ("load-aware-scorer", {}, with_load(0, 64, 128, 500), [0.5, 0.25, 0, 0]),
        ("load-aware-scorer", {"threshold": 10}, with_load(5), [0.25]),
        ("kv-cache-utilization-scorer", {}, with_load(0, 9), [0, 0]),
        # Reports of instances precede counts of the front.
        ("queue-scorer", {}, PDS, [1, 0]),
        ("running-requests-size-scorer", {}, PDS, [0, 1]),
        ("load-aware-scorer", {"threshold": 4}, PDS, [0.375, 0.125]),
        ("kv-cache-utilization-scorer", {}, PDS, [0.75, 1]),
        ("encode-load-scorer", {"threshold": 10}, ENCODERS, [0.9, 0.5]),
        # One that reports nothing: what the front counts stands for all.
        ("queue-scorer", {}, [*PDS, seen("y", load=18)], [0.5, 1, 0]),
        ("running-requests-size-scorer", {}, [PDS[0], reporting()], [0, 1]),
        ("encode-load-scorer", {"threshold": 10}, [*ENCODERS, reporting()], [0.1, 1, 1]),
        # Of something that the front cannot count, the mean.
        (
            "kv-cache-utilization-scorer",
            {},
            [*PDS, seen("y"), reporting()],
            [0.75, 1, 0.875, 0.875],
        ),
    ],
)
def test_scores_follow_reported_or_counted_load(
    kind: str, parameters: dict[str, Any], there: list[Snapshot], expected: list[float]
) -> None:
    assert scores(kind, there, **parameters) == expected


def test_an_instance_of_twice_the_weight_may_have_twice_the_load() -> None:
    pair = [seen("small", load=2), seen("large", load=4, weight=2.0)]
    for kind in ("active-request-scorer", "queue-scorer", "load-aware-scorer"):
        small, large = scores(kind, pair)
        assert small == large
    for each in pair:
        each.reported = LoadReport(waiting=each.load)
    assert scores("queue-scorer", pair) == [1, 1]
    assert scores("weight-scorer", pair) == [0.5, 1]
    small, large = seen("s", pending_encode_s=1.0), seen("l", pending_encode_s=2.0, weight=4.0)
    assert scores("encode-time-scorer", [small, large, seen("idle")]) == [0, 0.5, 1]
    assert scores("encode-time-scorer", [seen("idle")]) == [1]


@pytest.mark.parametrize(
    ("parameters", "modality", "expected"),
    [
        ({}, "image", [1, 0.5, 0.8]),
        ({"threshold": 4}, "image", [1, 0, 0.5]),
        ({"encoderType": "vision"}, "image", [0, 0.5, 0.8]),
        ({"encoderType": "vision"}, "video", [0, 0.5, 0.8]),
        ({"encoderType": "vision"}, "audio", [0, 0, 0]),
        ({"encoderType": "video"}, "video", [0, 0.5, 0.8]),
        ({"encoderType": "video"}, "image", [0, 0, 0]),
        ({"encoderType": "audio"}, "audio", [1, 0, 0.8]),
    ],
)
def test_encoders_are_scored_by_their_queue_and_type(
    parameters: dict[str, Any], modality: Any, expected: list[float]
) -> None:
    there = [of_type("audio"), of_type("vision", load=5), seen("any", load=2)]
    need = to_encode(modality=modality)
    assert scores("encode-load-scorer", there, need, **parameters) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [((), 0), ((1,), 0.25), ((1, 2, 3, 4), 1), ((2, 3, 4), 0), ((1, 2, 4), 0.5)],
)
def test_a_prompt_meets_who_has_computed_its_beginning(
    known: tuple[int, ...], expected: float
) -> None:
    one = having("i", blocks=known)
    assert scores("prefix-cache-scorer", [one], asked(blocks=(1, 2, 3, 4))) == [expected]
    assert scores("prefix-cache-scorer", [one], asked()) == [0]


def test_an_item_meets_who_has_it() -> None:
    there = [having("a", items=["x", "y"]), having("b", items=["x"]), having("c")]
    kind = "mm-embeddings-cache-scorer"
    assert scores(kind, there, to_encode("x")) == [1, 1, 0]
    items = (Picture(item_uuid="x"), Picture(item_uuid="y"))
    assert scores(kind, there, asked(items=items)) == [1, 0.5, 0]
    assert scores(kind, there, asked()) == [0, 0, 0]


def test_session_stays_at_its_instance_when_others_leave() -> None:
    there = with_load(*[0] * 5)
    left = [each for each in there if each is not there[2]]
    # One scorer sees both, in turns.
    scorer = make_plugin("session-affinity-scorer", "s", {})
    assert isinstance(scorer, Scorer)
    led = Counter[str]()
    for number in range(200):
        need = asked(session=f"s{number}", key=f"k{number}")
        found = list(scorer.score(need, there))
        assert sorted(found) == [0, 0, 0, 0, 1]
        first = there[found.index(1)]
        led[first.name] += 1
        second = left[list(scorer.score(need, left)).index(1)]
        assert first is there[2] or second is first
    assert max(led.values()) < 80
    assert list(scorer.score(asked(), there)) == [0] * 5


def test_repeated_image_goes_to_its_encoder_unless_busy() -> None:
    kind, need = "consistent-hash-scorer", to_encode("x")
    first = scores(kind, with_load(0, 0, 0, 0), need).index(1)
    busy = with_load(*[8 if n == first else 0 for n in range(4)])
    assert scores(kind, busy, need).index(1) != first
    # With a wide bound it waits there instead, and a large one has more room.
    assert scores(kind, busy, need, loadBound=1000).index(1) == first
    busy[first].weight = 100.0
    assert scores(kind, busy, need).index(1) == first


# Pickers.


def picks(kind: str, scores: list[float], weights: tuple[float, ...] = (1, 1, 1)) -> Counter[str]:
    there = [seen(f"i{n}", weight=weight) for n, weight in enumerate(weights)]
    one = picker(kind)
    return Counter(one.pick(asked(key=str(n)), there, scores).name for n in range(600))


def test_items_of_one_request_are_spread_over_equal_instances() -> None:
    pair, one = with_load(0, 0), picker("max-score-picker")
    assert len({one.pick(to_encode(str(n)), pair, [1.0, 1.0]).name for n in range(16)}) == 2


def test_random_choice_follows_scores_and_repeats_by_request() -> None:
    found = picks("weighted-random-picker", [0.75, 0.25, 0.0])
    assert 380 < found["i0"] < 520
    assert found["i2"] == 0
    assert found == picks("weighted-random-picker", [0.75, 0.25, 0.0])
    assert min(picks("weighted-random-picker", [0.0, 0.0, 0.0]).values()) > 140
    assert min(picks("random-picker", [1.0, 0.0, 0.0]).values()) > 140
    heavy = picks("random-picker", [0.0, 0.0, 0.0], weights=(8, 1, 1))
    assert 420 < heavy["i0"] < 540


def test_chance_rounded_up_to_one_picks_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelectionRequest, "chance", lambda _: 1.0)
    assert picks("weighted-random-picker", [0.5, 0.5, 0.5]) == {"i2": 600}


# Deciders.


@pytest.mark.parametrize(
    ("parameters", "need", "disaggregates"),
    [
        ({}, to_encode(pixels=1), True),
        ({"minImageSize": 0}, to_encode(pixels=1), True),
        ({"minImageSize": 224}, to_encode(pixels=224 * 224 - 1), False),
        ({"minImageSize": 224}, to_encode(pixels=224 * 224), True),
        # Of a size that is not known.
        ({"minImageSize": 224}, to_encode(pixels=0), True),
        ({"minImageSize": 224}, to_encode(modality="video", pixels=100), True),
        ({"enableEncoding": False}, to_encode(pixels=10**6), False),
        ({"encoderTimeout": 5000}, asked("encode"), False),
    ],
)
def test_small_pictures_stay(
    parameters: dict[str, Any], need: SelectionRequest, disaggregates: bool
) -> None:
    assert decided("multimodal-epd-decider", need, **parameters) is disaggregates


@pytest.mark.parametrize(
    ("parameters", "tokens", "cached", "disaggregates"),
    [
        ({}, 10_000, 0, False),
        ({"nonCachedTokens": 512}, 511, 0, False),
        ({"nonCachedTokens": 512}, 512, 0, True),
        ({"nonCachedTokens": 512}, 1024, 9, False),
        ({"nonCachedTokens": 512}, 1024, 8, True),
        ({"nonCachedTokens": 1, "promptTokens": 256}, 255, 0, False),
        ({"nonCachedTokens": 1, "promptTokens": 256}, 256, 0, True),
    ],
)
def test_long_prompts_of_which_little_is_cached_do_not_stay(
    parameters: dict[str, Any], tokens: int, cached: int, disaggregates: bool
) -> None:
    need = asked("prefill", blocks=range(tokens // 64), tokens=tokens)
    found = decided("prefix-based-pd-decider", need, range(cached), **parameters)
    assert found is disaggregates

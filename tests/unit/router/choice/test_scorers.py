from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.errors import ConfigError
from epd_portable.router.choice.catalogue import make_plugin
from epd_portable.router.choice.selection_types import Scorer, SelectionRequest
from epd_portable.wire.messages import LoadReport
from tests.unit.router.choice.situations import (
    Picture,
    Snapshot,
    asked,
    having,
    seen,
    to_encode,
    with_load,
)


def scores(
    kind: str,
    contenders: Sequence[Snapshot],
    need: SelectionRequest | None = None,
    **parameters: Any,
) -> list[float]:
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Scorer)
    return [round(score, 3) for score in one.score(need or asked(), contenders)]


@pytest.mark.parametrize(
    ("kind", "parameters", "loads", "expected"),
    [
        ("active-request-scorer", {}, [0, 0], [1, 1]),
        ("active-request-scorer", {}, [0, 2, 4], [1, 0.5, 0]),
        ("active-request-scorer", {}, [3, 3], [0, 0]),
        ("active-request-scorer", {"idleThreshold": 2}, [1, 2, 4], [1, 1, 0]),
        ("active-request-scorer", {"maxBusyScore": 0.4}, [0, 2, 4], [1, 0.2, 0]),
        ("active-request-scorer", {"requestTimeout": "2m"}, [0], [1]),
        ("queue-scorer", {}, [2, 3, 4], [1, 0.5, 0]),
        ("queue-scorer", {}, [3, 3], [1, 1]),
        ("running-requests-size-scorer", {}, [0, 4], [1, 0]),
        ("load-aware-scorer", {}, [0, 64, 128, 500], [0.5, 0.25, 0, 0]),
        ("load-aware-scorer", {"threshold": 10}, [5], [0.25]),
        ("kv-cache-utilization-scorer", {}, [0, 9], [0, 0]),
    ],
)
def test_load_decides(
    kind: str, parameters: dict[str, Any], loads: list[int], expected: list[float]
) -> None:
    assert scores(kind, with_load(*loads), **parameters) == expected


def telling(load: int = 0, **told: Any) -> Snapshot:
    return seen("x", load=load, reported=LoadReport(**told))


TOLD = [telling(9, waiting=1, running=8, kv_used=0.25), telling(0, waiting=3, running=2, kv_used=0)]
ENCODERS = [telling(9, items=1, pixels=900), telling(0, items=5, pixels=100)]


@pytest.mark.parametrize(
    ("kind", "parameters", "contenders", "expected"),
    [
        ("queue-scorer", {}, TOLD, [1, 0]),
        ("running-requests-size-scorer", {}, TOLD, [0, 1]),
        ("load-aware-scorer", {"threshold": 4}, TOLD, [0.375, 0.125]),
        ("kv-cache-utilization-scorer", {}, TOLD, [0.75, 1]),
        ("encode-load-scorer", {"threshold": 10}, ENCODERS, [0.9, 0.5]),
        ("encode-pixels-scorer", {}, ENCODERS, [0, 1]),
        # One that tells nothing: what the router counts stands for all.
        ("queue-scorer", {}, [*TOLD, seen("y", load=18)], [0.5, 1, 0]),
        ("running-requests-size-scorer", {}, [TOLD[0], telling()], [0, 1]),
        ("encode-load-scorer", {"threshold": 10}, [*ENCODERS, telling()], [0.1, 1, 1]),
        ("encode-pixels-scorer", {}, [*ENCODERS, telling()], [0, 1, 1]),
        # Of something that the router cannot count, the mean.
        ("kv-cache-utilization-scorer", {}, [*TOLD, seen("y"), telling()], [0.75, 1, 0.875, 0.875]),
    ],
)
def test_what_instances_tell_goes_before_what_the_router_counts(
    kind: str, parameters: dict[str, Any], contenders: list[Snapshot], expected: list[float]
) -> None:
    assert scores(kind, contenders, **parameters) == expected


def test_the_queue_of_an_encoder_is_one_of_items() -> None:
    assert scores("queue-scorer", ENCODERS, to_encode()) == [1, 0]
    assert scores("load-aware-scorer", ENCODERS, to_encode(), threshold=10) == [0.45, 0.25]


def test_an_instance_of_twice_the_weight_may_have_twice_the_load() -> None:
    pair = [seen("small", load=2), seen("large", load=4, weight=2.0)]
    for kind in ("active-request-scorer", "queue-scorer", "load-aware-scorer"):
        small, large = scores(kind, pair)
        assert small == large
    assert scores("weight-scorer", pair) == [0.5, 1]
    times = [
        seen("small", pending_encode_s=1.0),
        seen("large", pending_encode_s=2.0, weight=4.0),
        seen("idle"),
    ]
    assert scores("encode-time-scorer", times) == [0, 0.5, 1]
    assert scores("encode-time-scorer", [seen("idle")]) == [1]


AUDIO = seen("audio", labels={"llm-d.ai/encoder-type": "audio"})
VISION = seen("vision", load=5, labels={"llm-d.ai/encoder-type": "vision"})
ANY = seen("any", load=2)


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
    need = to_encode(modality=modality)
    assert scores("encode-load-scorer", [AUDIO, VISION, ANY], need, **parameters) == expected


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
    contenders = [having("a", items=["x", "y"]), having("b", items=["x"]), having("c")]
    one = "mm-embeddings-cache-scorer"
    assert scores(one, contenders, to_encode("x")) == [1, 1, 0]
    items = (Picture(item_uuid="x"), Picture(item_uuid="y"))
    assert scores(one, contenders, asked(items=items)) == [1, 0.5, 0]
    assert scores(one, contenders, asked()) == [0, 0, 0]


def test_a_session_has_one_instance_and_keeps_it_when_others_leave() -> None:
    contenders = with_load(*[0] * 5)
    led = {}
    for number in range(200):
        need = asked(session=f"s{number}", key=f"k{number}")
        found = scores("session-affinity-scorer", contenders, need)
        assert sorted(found) == [0, 0, 0, 0, 1]
        led[number] = contenders[found.index(1)]
    assert max(Counter(each.name for each in led.values()).values()) < 80
    for number, one in led.items():
        left = [each for each in contenders if each is not contenders[2]]
        found = scores("session-affinity-scorer", left, asked(session=f"s{number}"))
        assert one is contenders[2] or left[found.index(1)] is one
    assert scores("session-affinity-scorer", contenders) == [0] * 5


def test_a_repeated_picture_meets_its_encoder_unless_that_is_too_busy() -> None:
    idle = with_load(0, 0, 0, 0)
    one = "consistent-hash-scorer"
    found = scores(one, idle, to_encode("x"))
    assert found == scores(one, idle, to_encode("x"))
    first = found.index(1)
    busy = with_load(*[8 if n == first else 0 for n in range(4)])
    second = scores(one, busy, to_encode("x")).index(1)
    assert second != first
    # With a wide bound it waits there instead.
    assert scores(one, busy, to_encode("x"), loadBound=1000).index(1) == first
    # A large one has more room.
    large = [
        seen(each.name, load=each.load, weight=100.0 if n == first else 1.0)
        for n, each in enumerate(busy)
    ]
    assert scores(one, large, to_encode("x")).index(1) == first


@given(
    loads=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    weights=st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=12, max_size=12),
    key=st.text(max_size=8),
)
def test_nobody_gets_more_than_the_bound(loads: list[int], weights: list[float], key: str) -> None:
    contenders = [
        seen(f"i{n}", load=load, weight=weight)
        for n, (load, weight) in enumerate(zip(loads, weights, strict=False))
    ]
    found = scores("consistent-hash-scorer", contenders, to_encode(key))
    chosen = contenders[found.index(1)]
    share = chosen.weight / sum(each.weight for each in contenders)
    assert chosen.load < 1.25 * (sum(loads) + 1) * share + 1


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("encode-load-scorer", {"threshold": 0}),
        ("encode-load-scorer", {"encoderType": "smell"}),
        ("consistent-hash-scorer", {"loadBound": 1}),
        ("prefix-cache-scorer", {"blockSizeTokens": "64"}),
        ("active-request-scorer", {"maxBusyScore": 2}),
        ("queue-scorer", {"threshold": 3}),
        ("mm-embeddings-cache-scorer", {"cacheSizeInMBPerServer": 1}),
    ],
)
def test_wrong_parameters_are_refused(kind: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"plug-in 'mine': {next(iter(parameters))}"):
        make_plugin(kind, "mine", parameters)

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from epd_portable.router.choice.catalogue import make_plugin
from epd_portable.router.choice.selection_types import Decider, ScorePicker, SelectionRequest
from tests.unit.router.choice.situations import asked, having, seen, to_encode, with_load


def decided(
    kind: str, need: SelectionRequest, known: tuple[int, ...] = (), **parameters: Any
) -> bool:
    one = make_plugin(kind, kind, parameters)
    assert isinstance(one, Decider)
    return one.disaggregate(need, having("d", blocks=known))


@pytest.mark.parametrize(
    ("parameters", "need", "apart"),
    [
        ({}, to_encode(pixels=1), True),
        ({"minImageSize": 224}, to_encode(pixels=224 * 224 - 1), False),
        ({"minImageSize": 224}, to_encode(pixels=224 * 224), True),
        # Of what nobody has looked at, the size is not known.
        ({"minImageSize": 224}, to_encode(pixels=0), True),
        ({"minImageSize": 224}, to_encode(modality="video", pixels=100), True),
        ({"enableEncoding": False}, to_encode(pixels=10**6), False),
        ({"encoderTimeout": 5000}, asked("encode"), False),
    ],
)
def test_small_pictures_are_not_encoded_apart(
    parameters: dict[str, Any], need: SelectionRequest, apart: bool
) -> None:
    assert decided("multimodal-epd-decider", need, **parameters) is apart


def prompt(tokens: int) -> SelectionRequest:
    blocks = tuple(range(tokens // 64))
    return asked("prefill", blocks=blocks, nbytes=4 * tokens)


@pytest.mark.parametrize(
    ("parameters", "tokens", "cached", "apart"),
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
def test_long_prompts_of_which_little_is_cached_are_computed_apart(
    parameters: dict[str, Any], tokens: int, cached: int, apart: bool
) -> None:
    known = tuple(range(cached))
    assert decided("prefix-based-pd-decider", prompt(tokens), known, **parameters) is apart


@pytest.mark.parametrize("kind", ["always-disagg-multimodal-decider", "always-disagg-pd-decider"])
def test_always_is_always(kind: str) -> None:
    assert decided(kind, to_encode())


# Pickers.


def picks(kind: str, scores: list[float], weights: tuple[float, ...] = (1, 1, 1)) -> Counter[str]:
    one = make_plugin(kind, kind, {"maxNumOfEndpoints": 1})
    assert isinstance(one, ScorePicker)
    contenders = [seen(f"i{n}", weight=weight) for n, weight in enumerate(weights)]
    return Counter(one.pick(asked(key=str(n)), contenders, scores).name for n in range(600))


def test_the_best_is_picked_and_equals_share() -> None:
    assert picks("max-score-picker", [0.2, 0.9, 0.1]) == {"i1": 600}
    shared = picks("max-score-picker", [0.9, 0.9, 0.1])
    assert set(shared) == {"i0", "i1"}
    assert min(shared.values()) > 240


def test_chance_follows_scores_and_weights_and_is_the_same_for_the_same_demand() -> None:
    found = picks("weighted-random-picker", [0.75, 0.25, 0.0])
    assert 380 < found["i0"] < 520
    assert found["i2"] == 0
    assert found == picks("weighted-random-picker", [0.75, 0.25, 0.0])
    assert min(picks("weighted-random-picker", [0.0, 0.0, 0.0]).values()) > 140
    assert min(picks("random-picker", [1.0, 0.0, 0.0]).values()) > 140
    heavy = picks("random-picker", [0.0, 0.0, 0.0], weights=(8, 1, 1))
    assert 420 < heavy["i0"] < 540


def test_items_of_one_request_do_not_all_go_the_same_way() -> None:
    one = make_plugin("max-score-picker", "p", {})
    assert isinstance(one, ScorePicker)
    contenders = with_load(0, 0)
    found = {one.pick(to_encode(str(n)), contenders, [1.0, 1.0]).name for n in range(16)}
    assert found == {"i0", "i1"}

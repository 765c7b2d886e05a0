from __future__ import annotations

import pytest

from epd_portable.items.prompt import match_transfers
from epd_portable.items.table import ItemRequest, PromptItem
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome, PrefillParams, Source
from tests.unit.builders import place
from tests.unit.items.harness import spec

MODALITIES = {"v": "video", "w": "video"}
"""Modalities of the one-letter items that are no images; a transfer's letter is capital where the
engine's name is another."""


def modality(name: str) -> str:
    return MODALITIES.get(name.lower(), "image")


def items(names: str) -> list[PromptItem]:
    return [
        place(name, spec(1), i, input_id=i, modality=modality(name)) for i, name in enumerate(names)
    ]


def matched(names: str, transfers: str) -> dict[str, str]:
    params = PrefillParams(
        transfers=tuple(
            ExpectedTransfer(transfer_id=f"t{name}", item_uuid=name, modality=modality(name))
            for name in transfers
        )
    )
    return {k: v.transfer_id for k, v in match_transfers(items(names), params).items()}


@pytest.mark.parametrize(
    ("names", "transfers", "found"),
    [
        ("aba", "ba", {"a": "ta", "b": "tb"}),
        ("abc", "b", {"b": "tb"}),
        ("a", "", {}),
        # Under the engine's own names by order, which each modality has of its own.
        ("xyx", "AB", {"x": "tA", "y": "tB"}),
        ("xyvw", "AVBW", {"x": "tA", "y": "tB", "v": "tV", "w": "tW"}),
        # What the engine calls by the front's names is left out of the order.
        ("axvy", "BaVC", {"a": "ta", "x": "tB", "y": "tC", "v": "tV"}),
        # Nothing where the numbers differ, as with a video whose sound the engine holds for a clip.
        ("xyv", "AV", {"v": "tV"}),
        ("xv", "ABV", {"v": "tV"}),
    ],
)
def test_transfers_are_matched_by_hash_and_then_by_order(
    names: str, transfers: str, found: dict[str, str]
) -> None:
    assert matched(names, transfers) == found
    assert match_transfers(items(names), None) == {}


def record(*ends: tuple[str, int]) -> ItemRequest:
    """Return a request of items of one token each, by the end of each."""
    return ItemRequest(
        "r",
        0,
        items=[place(name, spec(1), end - 1, input_id=i) for i, (name, end) in enumerate(ends)],
    )


@pytest.mark.parametrize(
    ("ends", "computed", "nexts"),
    [
        # In whatever order it is asked.
        ([("a", 2), ("b", 4)], (0, 1, 2, 3, 4, 0, 2), [0, 0, 1, 1, 2, 0, 1]),
        # Of items that lie within one another, the outer until both are computed.
        ([("video", 8), ("its sound", 4), ("picture", 9)], (0, 4, 7, 8, 9), [0, 0, 0, 2, 3]),
    ],
)
def test_the_next_item_is_the_first_that_is_not_wholly_computed(
    ends: list[tuple[str, int]], computed: tuple[int, ...], nexts: list[int]
) -> None:
    r = record(*ends)
    found = []
    for r.num_computed_tokens in computed:
        found.append(r.next_item)
    assert found == nexts


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("transfer", "encoder_cache", "transfer"),
        ("transfer", "local", "local"),
        ("local", "encoder_cache", "local"),
        ("prefix_cache", "transfer", "prefix_cache"),
    ],
)
def test_first_source_counts_unless_encoded_locally(
    first: Source, then: Source, kept: Source
) -> None:
    r = record(("a", 2))
    for source in (first, then):
        r.note(ItemOutcome(mm_hash="a", source=source))
    assert r.outcomes["a"].source == kept

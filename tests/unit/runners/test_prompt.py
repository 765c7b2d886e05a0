from __future__ import annotations

import pytest

from epd_portable.runners.prompt import (
    match_transfers,
    metadata_only_items,
)
from epd_portable.scheduling.items import Claimant, PromptItem
from epd_portable.wire.params import ExpectedTransfer, ItemOutcome, PrefillParams, Source
from tests.unit.runners.harness import spec

MODALITIES = {"v": "video", "w": "video"}
"""Of the one-letter items that are no images; a transfer's letter is capital where the engine's
name is another."""


def modality(name: str) -> str:
    return MODALITIES.get(name.lower(), "image")


def items(names: str) -> list[PromptItem]:
    return [
        PromptItem(
            input_id=i,
            mm_hash=name,
            begin=i,
            end=i + 1,
            num_embeds=1,
            tensor=spec(1),
            modality=modality(name),
        )
        for i, name in enumerate(names)
    ]


def matched(names: str, transfers: str) -> dict[str, str]:
    params = PrefillParams(
        transfers=tuple(
            ExpectedTransfer(transfer_id=f"t{name}", item_uuid=name, modality=modality(name))
            for name in transfers
        )
    )
    return {k: v.transfer_id for k, v in match_transfers(items(names), params).items()}


def test_transfers_are_matched_by_hash_whatever_their_order() -> None:
    assert matched("aba", "ba") == {"a": "ta", "b": "tb"}


def test_an_item_without_a_transfer_has_none() -> None:
    assert matched("abc", "b") == {"b": "tb"}
    assert match_transfers(items("a"), None) == {}


def test_items_under_the_engine_s_own_names_are_matched_by_order() -> None:
    assert matched("xyx", "AB") == {"x": "tA", "y": "tB"}


def test_each_modality_has_an_order_of_its_own() -> None:
    assert matched("xyvw", "AVBW") == {"x": "tA", "y": "tB", "v": "tV", "w": "tW"}


def test_items_that_the_engine_calls_by_the_router_s_names_are_left_out_of_the_order() -> None:
    assert matched("axvy", "BaVC") == {"a": "ta", "x": "tB", "y": "tC", "v": "tV"}


def test_nothing_is_matched_by_order_where_the_numbers_differ() -> None:
    """As with a video whose sound the engine holds for a clip of its own."""
    assert matched("xyv", "AV") == {"v": "tV"}
    assert matched("xv", "ABV") == {"v": "tV"}


# -- what of an item cannot be encoded here ------------------------------------------------------


def prompt_item(name: str, *, has_media: bool = True) -> PromptItem:
    return PromptItem(
        input_id=0, mm_hash=name, begin=0, end=1, num_embeds=1, tensor=spec(1), has_media=has_media
    )


@pytest.mark.parametrize(
    ("can_encode", "expected"), [(True, {"without", "told"}), (False, {"with", "without", "told"})]
)
def test_bare_is_what_has_no_media_by_the_engine_or_by_the_router(
    can_encode: bool, expected: set[str]
) -> None:
    items = [prompt_item("with"), prompt_item("without", has_media=False), prompt_item("told")]
    transfers = {
        name: ExpectedTransfer(transfer_id=f"t-{name}", item_uuid=name, media=name != "told")
        for name in ("with", "told")
    }
    assert metadata_only_items(items, transfers, can_encode=can_encode) == expected


# -- how far a request is ------------------------------------------------------------------------


def record(*ends: tuple[str, int]) -> Claimant:
    """Return a request of items of one token each, by the end of each."""
    return Claimant(
        "r",
        0,
        items=[
            PromptItem(
                input_id=i, mm_hash=name, begin=end - 1, end=end, num_embeds=1, tensor=spec(1)
            )
            for i, (name, end) in enumerate(ends)
        ],
    )


def test_the_next_item_is_the_first_that_is_not_wholly_computed_in_whatever_order_it_is_asked() -> (
    None
):
    r = record(("a", 2), ("b", 4))
    found = []
    for r.num_computed_tokens in (0, 1, 2, 3, 4, 0, 2):
        found.append(r.next_item)
    assert found == [0, 0, 1, 1, 2, 0, 1]


def test_of_items_that_lie_within_one_another_the_next_is_the_outer_until_both_are_computed() -> (
    None
):
    r = record(("video", 8), ("its sound", 4), ("picture", 9))
    found = []
    for r.num_computed_tokens in (0, 4, 7, 8, 9):
        found.append(r.next_item)
    assert found == [0, 0, 0, 2, 3]


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("transfer", "encoder_cache", "transfer"),
        ("transfer", "local", "local"),
        ("local", "encoder_cache", "local"),
        ("prefix_cache", "transfer", "prefix_cache"),
    ],
)
def test_the_first_way_in_which_an_item_was_had_counts_unless_it_was_encoded_here(
    first: Source, then: Source, kept: Source
) -> None:
    r = record(("a", 2))
    for source in (first, then):
        r.note(ItemOutcome(mm_hash="a", source=source))
    assert r.outcomes["a"].source == kept

from __future__ import annotations

from epd_portable.runners.prompt import PromptItem, match_transfers
from epd_portable.wire.params import ExpectedTransfer, PrefillParams
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
            ExpectedTransfer(transfer_id=f"t{name}", mm_hash=name, modality=modality(name))
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

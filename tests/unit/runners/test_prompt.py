from __future__ import annotations

from epd_portable.runners.prompt import PromptItem, match_transfers
from epd_portable.wire.params import ExpectedTransfer, PrefillParams
from tests.unit.runners.harness import spec


def items(names: str) -> list[PromptItem]:
    return [
        PromptItem(input_id=i, mm_hash=name, begin=i, end=i + 1, num_embeds=1, tensor=spec(1))
        for i, name in enumerate(names)
    ]


def matched(names: str, transfers: str) -> dict[str, str]:
    params = PrefillParams(
        transfers=tuple(ExpectedTransfer(transfer_id=f"t{t}", mm_hash=t) for t in transfers)
    )
    return {k: v.transfer_id for k, v in match_transfers(items(names), params).items()}


def test_transfers_are_matched_by_hash_whatever_their_order() -> None:
    assert matched("aba", "ba") == {"a": "ta", "b": "tb"}


def test_an_item_without_a_transfer_has_none() -> None:
    assert matched("abc", "b") == {"b": "tb"}
    assert match_transfers(items("a"), None) == {}


def test_items_under_the_engine_s_own_names_are_matched_by_order() -> None:
    assert matched("xyx", "abc") == {"x": "ta", "y": "tb"}

"""Suite for a PD instance of two ranks, on every platform: one transfer, placed by both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.asking import ask, assert_brought, assert_equal
from tests.e2e.cases import SINGLE
from tests.e2e.conftest import Pair
from tests.e2e.equality import SMOKE

TWO_RANKS = "instances.prefill_decode.tensor_parallel_size=2"


class TwoRanks:
    """Modules supply the fixture ``pair``, in float32; it is started once for all these tests.

    With ``--full`` all requests with one answer are compared.
    """

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(content, id=name, marks=[pytest.mark.full] * (name not in SMOKE))
            for name, content in SINGLE.items()
        ],
    )
    def test_an_answer_of_two_ranks_is_that_of_one_process(self, pair: Pair, content: Any) -> None:
        split = ask(pair.split.url, content)
        assert_equal(split, ask(pair.reference_url, content))
        assert_brought(split, content, "transfer")

    def test_each_item_was_sent_once_and_placed_by_both_ranks(self, pair: Pair) -> None:
        """Runs last: it looks back at everything above."""
        landed = [event["mm_hash"] for event in pair.split.events("item.landed")]
        placed = [event["mm_hash"] for event in pair.split.events("item.placed")]
        assert len(landed) == len(set(landed)) >= 4
        assert sorted(placed) == sorted(landed * 2)
        assert pair.split.encoded_by("prefill_decode") == []

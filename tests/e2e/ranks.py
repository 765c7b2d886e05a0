"""Suite for a PD instance of two ranks, on every platform: one transfer, placed by both."""

from __future__ import annotations

from tests.e2e.conftest import Pair
from tests.e2e.equality import FloatSmoke

TWO_RANKS = "instances.prefill_decode.tensor_parallel_size=2"


class TwoRanks(FloatSmoke):
    """Modules supply the fixture ``pair``, in float32; it is started once for all these tests."""

    def test_each_item_was_sent_once_and_placed_by_both_ranks(self, pair: Pair) -> None:
        """Runs last: it looks back at everything above."""
        landed = [event["mm_hash"] for event in pair.split.events("item.landed")]
        placed = [event["mm_hash"] for event in pair.split.events("item.placed")]
        assert len(landed) == len(set(landed)) >= 4
        assert sorted(placed) == sorted(landed * 2)

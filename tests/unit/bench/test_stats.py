from __future__ import annotations

import pytest

from epd_portable.bench.stats import paired_ratio, quantile


def test_a_quantile_lies_between_its_neighbours_in_proportion() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([10.0, 20.0], 0.9) == pytest.approx(19.0)
    assert quantile([7.0], 0.99) == 7.0


def test_no_values_and_shares_outside_0_to_1_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match=r"share 1\.5"):
        quantile([1.0], 1.5)


def test_a_ratio_is_taken_pair_by_pair_so_that_common_disturbances_cancel_out() -> None:
    ratio = paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)
    assert str(paired_ratio([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])) == "2.00 (1.50–2.50)"


def test_series_of_different_lengths_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        paired_ratio([1.0], [1.0, 2.0])

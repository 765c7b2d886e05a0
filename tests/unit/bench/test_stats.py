from __future__ import annotations

import pytest

from epd_portable.bench.stats import paired_ratio, quantile


def test_no_values_and_shares_outside_0_to_1_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match=r"share 1\.5"):
        quantile([1.0], 1.5)


def test_series_of_different_lengths_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        paired_ratio([1.0], [1.0, 2.0])

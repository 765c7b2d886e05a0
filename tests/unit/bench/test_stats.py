from __future__ import annotations

import pytest

from epd_portable.bench.stats import paired_ratio


def test_series_of_different_lengths_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        paired_ratio([1.0], [1.0, 2.0])

from __future__ import annotations

from epd_benchmarks.stats import paired_ratio


def test_a_ratio_is_shown_with_the_quartiles_of_its_pairs() -> None:
    peers = [2.0, 1.0, 4.0, 1.0, 2.0]
    ratios = [3.0, 1.0, 5.0, 2.0, 4.0]
    values = [ratio * peer for ratio, peer in zip(ratios, peers, strict=True)]
    assert str(paired_ratio(values, peers)) == "3.00 (2.00–4.00)"

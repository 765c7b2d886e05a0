from __future__ import annotations

from typing import Any

import pytest

from epd_portable.bench.load.guard import regressions
from epd_portable.errors import ConfigError


def summary(load: str = "6/s", side: str = "replicas", **ratios: float) -> dict[str, Any]:
    given = {"ttft": 0.2, "pictures": 1.0, "tpot": 0.5} | ratios

    def of(value: float) -> dict[str, float]:
        return {"median": value, "low": value, "high": value}

    found = {
        "TTFT p99 of text": of(given["ttft"]),
        "TTFT p50 of pictures": of(given["pictures"]),
        "TPOT p99 of all": of(given["tpot"]),
    }
    return {"points": {load: {"ratios": {side: found}}}}


def test_the_same_is_no_worse() -> None:
    assert regressions(summary(), summary(), worse=1.0) == []
    assert regressions(summary(ttft=0.29), summary(), worse=1.5) == []
    assert regressions(summary(ttft=0.01, pictures=0.1), summary(), worse=1.0) == []


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("ttft", 0.31, "6/s, TTFT p99 of text by replicas: 0.31 in place of 0.20"),
        ("pictures", 1.6, "6/s, TTFT p50 of pictures by replicas: 1.60 in place of 1.00"),
        ("tpot", 0.76, "6/s, TPOT p99 of all by replicas: 0.76 in place of 0.50"),
    ],
)
def test_what_is_worse_is_named(name: str, value: float, line: str) -> None:
    assert regressions(summary(**{name: value}), summary(), worse=1.5) == [line]


def test_loads_without_pictures_are_compared_by_the_rest() -> None:
    text = summary()
    text["points"]["6/s"]["ratios"]["replicas"]["TTFT p50 of pictures"] = None
    assert regressions(text, summary(), worse=1.0) == []


@pytest.mark.parametrize("other", [{"load": "2/s"}, {"side": "upstream"}])
def test_runs_that_have_nothing_in_common_are_refused(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="nothing to compare: it has"):
        regressions(summary(), summary(**other), worse=2.0)  # type: ignore[arg-type]

"""Reads a page in Prometheus' text format."""

from __future__ import annotations

import re


def total(page: str, series: str) -> float:
    """Return the sum of a metric's series, named with some of their labels in any order."""
    name, _, labels = series.rstrip("}").partition("{")
    wanted = re.findall(r'\w+="[^"]*"', labels)
    found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", page, re.MULTILINE)
    return sum(
        float(value)
        for given, value in found
        if set(wanted) <= set(re.findall(r'\w+="[^"]*"', given))
    )

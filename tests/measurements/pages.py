"""What pages of measurements say: tables, sentences with figures, and where these are from.

A block of text ends with comments that name the cells its figures are from, and the numbers that
are no results (docs/measurements/README.md, "Rules")::

    By `tcp` an item of 64 MiB takes 10.6 times as long as a memcpy.
    <!-- from: Against memcpy | tcp, 64 MiB | ratio -->
    <!-- given: 64 -->
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
FIGURE = re.compile(
    r"(?<![\w.–/-])(\d[\d,]*\.\d+(?![\d.]*\.\d)|\d[\d,]*(?= ?%| times\b| (?:ms|µs|MB|MiB/s)\b))"
)
"""A number with a decimal point, a percentage, a multiple or one with such a unit; no version."""
FROM = re.compile(r"<!-- from: (.*?) -->", re.DOTALL)
GIVEN = re.compile(r"<!-- given: (.*?) -->", re.DOTALL)
UNKNOWN = "**Not recomputable**"
OLD = "**Measured before**"


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table as the page shows it, without emphasis."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A paragraph or an item of a list, with its comments."""

    text: str
    section: str

    @property
    def figures(self) -> list[str]:
        """The numbers that the block gives out as results."""
        text = re.sub(r"<!--.*?-->", "", self.text, flags=re.DOTALL)
        text = re.sub(r"`[^`]*`", "", text)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        text = re.sub(r"\d[\d-]*\d-\d\d", "", text)
        return FIGURE.findall(text)


def plain(cell: str) -> str:
    """Return a cell without emphasis."""
    return cell.replace("**", "").replace("`", "").strip()


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield each heading with what stands below it, without fenced text."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    unknown = 0
    for part in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        first, _, rest = part.partition("\n")
        level = len(first) - len(first.lstrip("#"))
        if unknown and 0 < level <= unknown:
            unknown = 0
        if UNKNOWN in rest:
            unknown = level
        if not unknown:
            yield first.lstrip("# "), rest


def tables(page: str) -> list[PageTable]:
    """Return the tables of a page that can be recomputed, by the heading above each."""
    found = []
    for heading, text in sections(page):
        for lines in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
            columns, _, *rows = (
                tuple(plain(cell) for cell in line.strip().strip("|").split("|"))
                for line in lines.strip().splitlines()
            )
            if any(NUMBER.search(cell) for row in rows for cell in row[1:]):
                found.append(PageTable(heading=heading, columns=columns, rows=tuple(rows)))
    return found


def blocks(page: str) -> Iterator[Block]:
    """Yield the text of a page, block by block; tables and headings are none."""
    for heading, text in sections(page):
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
        for block in re.split(r"\n\s*\n|\n(?=\s*[-*] |\d+\. )", text):
            if block.strip():
                yield Block(text=block.strip(), section=heading)


def numbers(text: str) -> list[float]:
    """Return all numbers of a cell."""
    return [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def shows(figure: str, value: float) -> bool:
    """Tell whether a figure of a sentence is that value, rounded as far as it is."""
    digits = len(figure.partition(".")[2])
    shown = float(figure.replace(",", ""))
    return math.isclose(shown, value, rel_tol=1e-9, abs_tol=0.5 * 10**-digits * (1 + 1e-9))


def same(shown: str, expected: str) -> bool:
    """Tell whether two cells say the same, but for the last digit that samples in a file keep."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", expected):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(expected), strict=True)
    return all(_close(a.replace(",", ""), b.replace(",", "")) for a, b in pairs)


def _close(shown: str, expected: str) -> bool:
    step = 10.0 ** -len(shown.partition(".")[2].partition("e")[0])
    slack = step if "." in shown else 0.0
    return math.isclose(float(shown), float(expected), rel_tol=0.01, abs_tol=slack * 1.001)

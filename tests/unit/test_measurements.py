"""Results of measurements name their origin, and pages quote their medians."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
PERFORMANCE = ROOT / "docs/performance.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM = re.compile(r"<!-- from: (.*?) -->")
GIVEN = re.compile(r"<!-- given: (.*?) -->")
MINUS = "\N{MINUS SIGN}"
FIGURE = re.compile(rf"[+{MINUS}]?\d[\d,]*(?:\.\d+)?(?: ?%| ms\b| µs\b)?")
"""A number with its unit; integers without one are counts and names."""


def quoted_cells(reference: str) -> Iterator[float]:
    """Yield the medians that a comment names: ``file | table | rows | columns``."""
    name, title, rows, columns = reference.split(" | ")
    document = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))
    for table in document["tables"]:
        if not table["title"].startswith(title):
            continue
        for cells in (dict(zip(table["columns"], row, strict=True)) for row in table["rows"]):
            label = " ".join(filter(None, (next(iter(cells.values())), cells.get("by"))))
            for column, cell in cells.items():
                number = re.match(r"[*]*([\d.]+)", cell)
                if number and re.search(rows, label) and re.search(columns, column):
                    yield float(number[1])


def shows(figure: str, value: float) -> bool:
    """Tell whether a figure is a value, or the change of a ratio in percent, as far as rounded."""
    number = re.sub(r"[^\d.]", "", figure)
    step = 10.0 ** -len(number.partition(".")[2])
    if "%" in figure:
        change = (value - 1) * 100
        right_sign = change >= 0 if "+" in figure else change <= 0 if MINUS in figure else True
        if right_sign and abs(abs(change) - float(number)) <= 0.5 + 1e-6:
            return True
    return math.isclose(float(number), value, abs_tol=0.5 * step * (1 + 1e-6))


def unfounded(block: str) -> Iterator[str]:
    """Yield the figures of a block that are in none of the cells which its comments name."""
    values = [value for each in FROM.findall(block) for value in quoted_cells(each)]
    given = {each for one in GIVEN.findall(block) for each in one.split(", ")}
    text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", "", block)
    for figure in FIGURE.findall(text):
        is_result = "." in figure or figure.endswith(("%", "ms", "µs"))
        if is_result and figure not in given and not any(shows(figure, v) for v in values):
            yield figure


def blocks(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=- )", text)


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.stem)
def test_results_name_command_commit_and_machine(file: Path) -> None:
    document: dict[str, Any] = json.loads(file.read_text("utf-8"))
    conditions = document["conditions"]
    assert document["command"] and document["tables"] and document["samples"]
    assert re.fullmatch(r"[0-9a-f]{7,12}", conditions["commit"])
    assert conditions["date"] and conditions["cpus"] and conditions["versions"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_quoted_figures_equal_medians(page: Path) -> None:
    for block in blocks(page):
        references = FROM.findall(block)
        assert all([*quoted_cells(each)] for each in references), references
        if references or page == PERFORMANCE:
            wrong = [*unfounded(block)]
            assert not wrong, f"{page.name}: {wrong} in: {block}"


def test_every_results_file_has_its_row() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "benchmarks/README.md").read_text("utf-8"), re.M)
    names = [name for row in rows for name in re.findall(r"`([\w*-]+)`", row)]
    unnamed = [
        file.stem
        for file in RESULTS
        if not any(re.fullmatch(name.replace("*", ".*"), file.stem) for name in names)
    ]
    assert not unnamed

"""Pages of measurements say what the data beside them say, and which code these are of."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_benchmarks.measured import digests
from tests.measurements import pages, recomputed
from tests.measurements.pages import PageTable

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/measurements"
CHECKED = sorted(path.stem for path in FOLDER.glob("2*.md"))
QUOTES = {
    "docs/comparison.md": ("What it brings, and where it loses",),
    "docs/configuration.md": ("Transfer paths",),
}
"""Sections of other pages that quote figures."""


@functools.cache
def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text("utf-8")


@functools.cache
def documents(name: str) -> dict[str, recomputed.Document]:
    files = sorted((FOLDER / name).glob("*.json"))
    return {path.name: json.loads(path.read_text("utf-8")) for path in files}


def of_samples(table: PageTable, document: recomputed.Document) -> list[recomputed.Row]:
    """Return rows as the samples give them; cells that no sample shows are those of the file."""
    for (heading, first), compute in recomputed.TABLES.items():
        if re.match(heading, table.heading) and table.columns[0] == first:
            try:
                found = list(compute(document))
            except KeyError:  # A file of another kind.
                return []
            written = [
                dict(zip(each["columns"], map(pages.plain, row), strict=True))
                for each in document.get("tables", ())
                for row in each["rows"]
                if each["columns"][0] == first and re.match(heading, each["title"])
            ]
            beside = {row[first] + row.get("by", ""): row for row in written}
            return [beside.get(row[first] + row.get("by", ""), {}) | row for row in found]
    raise AssertionError(f"nothing computes {table.heading!r} by {table.columns[0]!r}")


def differences(table: PageTable, rows: list[recomputed.Row]) -> Iterator[str]:
    first = table.columns[0]
    for shown in table.rows:
        cells = dict(zip(table.columns, shown, strict=True))
        same_name = [row for row in rows if row[first] == cells[first]]
        problems = [
            [
                f"{table.heading}: {cells[first]}: {name}: {cell}, and by the data {row.get(name)}"
                for name, cell in cells.items()
                if not pages.same(cell, row.get(name, "nothing"))
            ]
            for row in same_name
        ] or [[f"{table.heading}: {cells[first]}: not in the data"]]
        yield from min(problems, key=len)


@pytest.mark.parametrize("name", CHECKED)
def test_every_cell_is_what_the_samples_say(name: str) -> None:
    tables = pages.tables(page(name))
    assert tables
    for table in tables:
        found = [
            list(differences(table, of_samples(table, document)))
            for document in documents(name).values()
        ]
        assert found, f"{name}: {table.heading}: no data beside the page"
        assert not min(found, key=len), "\n".join(min(found, key=len))


def selected(reference: str, name: str) -> list[float]:
    """Return the numbers of the cells that a comment names."""
    if ": 2026" in f": {reference}":
        name, _, reference = reference.partition(": ")
    heading, rows, columns = (part.strip() for part in reference.split(" | "))
    return [
        number
        for table in pages.tables(page(name))
        if table.heading.startswith(heading)
        for row in table.rows
        if re.search(rows, row[0])
        for column, cell in zip(table.columns, row, strict=True)
        if re.search(columns, column)
        for number in pages.numbers(cell)
    ]


def unfounded(text: str, name: str, sections: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the figures of sentences that are not in the cells which these name."""
    notes = {note for document in documents(name).values() for note in document["notes"]}
    for block in pages.blocks(text):
        if sections and block.section not in sections:
            continue
        said = " ".join(block.text.removeprefix("- ").split())
        if said in notes or re.match(r"\d{4}-\d\d-\d\d; \d+ CPU cores", said):
            continue
        found = {each: selected(each, name) for each in pages.FROM.findall(block.text)}
        yield from (f"{each}: no such cells" for each, cells in found.items() if not cells)
        given = {
            each for one in pages.GIVEN.findall(block.text) for each in re.split(r"[,;] +", one)
        }
        values = [value for cells in found.values() for value in cells]
        for figure in block.figures:
            if figure not in given and not any(pages.shows(figure, value) for value in values):
                yield f"{figure} in: {said[:150]}"


@pytest.mark.parametrize("name", CHECKED)
def test_every_figure_of_a_sentence_is_in_the_cells_that_it_names(name: str) -> None:
    assert not list(unfounded(page(name), name))


@pytest.mark.parametrize("name", QUOTES)
def test_other_pages_quote_figures_of_the_measurements(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert not list(unfounded(text, name, QUOTES[name]))


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_says_of_its_data_when_they_were_made_and_where(name: str) -> None:
    dated = re.findall(r"load average ([\d.]+) before,\s+([\d.]+)\s+after", page(name))
    places = [each["conditions"] for each in documents(name).values()]
    known = {(f"{each['load_before']:g}", f"{each['load_after']:g}") for each in places}
    assert set(dated) <= known
    assert all(each["date"] in page(name) for each in places)
    for file, document in documents(name).items():
        assert " ".join(document["command"].split()) in " ".join(page(name).split()), file


def older(name: str) -> set[str]:
    """Return the modules that changed since a page's data were made; "data" if these do not say."""
    found = set()
    for document in documents(name).values():
        measured = document["conditions"].get("measured")
        if not measured:
            found.add("data")
            continue
        for module, digest in measured.items():
            try:
                same = digests([module])[module] == digest
            except ModuleNotFoundError:
                same = False
            if not same:
                found.add(module)
    return found


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_that_is_older_than_what_it_measures_says_so(name: str) -> None:
    lines = rf"^{re.escape(pages.OLD)}.*?(?=\n\n|\Z)"
    said = " ".join(re.findall(lines, page(name), re.MULTILINE | re.DOTALL))
    changed = older(name) - {"data"}
    assert not older(name) or said, f"{name}: measure again, or say {pages.OLD} …: {older(name)}"
    missing = {module for module in changed if f"`{module}`" not in said}
    assert not missing, (
        f"{name}: changed since: measure again, or name beside {pages.OLD}: {missing}"
    )

"""The page that holds other designs against this one names what exists and what runs."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ci import suite

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests/requirements.md"
RUNS_IN = {"engines": "tests/e2e/", "simulated": "tests/npu_sim/", "parts": "tests/", "full": ""}
"""Folder of the tests of a row, by its mark; ``full``: anywhere, but only in the full run."""
WORDS = {*RUNS_IN, "otherwise", "no", "not run"}


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    title: str
    where: str
    shown: frozenset[str]
    by: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0] not in ("what", "---"):
            shown = frozenset(re.findall(r"`([^`]+)`", cells[2]))
            found.append(Row(cells[0], cells[1], shown, cells[3]))
    return found


@dataclass(frozen=True)
class Shown:
    """A test, or those of a file."""

    path: str
    is_full: bool


def is_full(*nodes: ast.AST) -> bool:
    """Return whether the marker is there for all, not for one parameter of several."""
    return any("pytest.mark.full" in ast.unparse(each) for each in nodes)


@cache
def all_tests() -> dict[str, list[Shown]]:
    """Return all tests by their names, and files by their paths."""
    found: defaultdict[str, list[Shown]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        marks = [each for each in tree.body if isinstance(each, ast.Assign)]
        all_full = any(
            "pytestmark" in ast.unparse(each.targets[0]) and is_full(each) for each in marks
        )
        found[name].append(Shown(name, all_full))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                alone = [each for each in node.decorator_list if isinstance(each, ast.Attribute)]
                full = all_full or is_full(*alone)
                found[node.name].append(Shown(name, full))
    return found


def named(row: Row) -> Iterator[Shown]:
    """Yield what a row names; one that several files have, of the file that is named after it."""
    for name, file in re.findall(r"`(test_\w+)`(?: of `(tests/[^`]+)`)?", row.by):
        those = [each for each in all_tests()[name] if file in ("", each.path)]
        assert len(those) == 1, f"{name} is the name of {len(those)} tests"
        yield those[0]
    for path in re.findall(r"(?<! of )`(tests/[^`]+)`", row.by):
        assert (ROOT / path).exists(), f"there is no {path}"
        yield all_tests()[path][0] if path in all_tests() else Shown(path + "/", is_full=False)


@cache
def run_by_make_test() -> tuple[str, ...]:
    """Return the files and folders that ``make test`` gives to pytest."""
    script = (ROOT / "ci/jobs/npu-sim.sh").read_text("utf-8")
    words = [word for piece in suite.pieces(full=False) for word in piece.argv]
    return tuple(re.findall(r"^tests/[^\s]+$", "\n".join([*words, *script.split()]), re.MULTILINE))


def runs(test: Shown) -> bool:
    return not test.is_full and test.path.startswith(run_by_make_test())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.title)
def test_a_row_is_shown_as_it_says(row: Row) -> None:
    assert row.shown, "say how it is shown"
    assert row.shown <= WORDS
    found = list(named(row))
    for word in row.shown & RUNS_IN.keys():
        if "as the first row" in row.by:
            break
        those = [each for each in found if each.path.startswith(RUNS_IN[word])]
        if word == "parts":
            those = [each for each in those if not each.path.startswith("tests/e2e/")]
        ran = [each.is_full if word == "full" else runs(each) for each in those]
        assert any(ran), f"{word}: none of {those} is"
    assert row.shown & {"full"} or all(map(runs, found)), "say which are in the full run only"
    if "otherwise" in row.shown or "no" in row.shown:
        assert row.by, "say why"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.title)
def test_a_row_names_modules_and_records_that_exist(row: Row) -> None:
    for path in re.findall(r"`([^`]+)`", row.where):
        assert (ROOT / "epd_portable" / path).is_file(), f"there is no {path}"
    for numbers in re.findall(r"records? ([\d, and]+)", row.by):
        for number in map(int, re.findall(r"\d+", numbers)):
            assert [*(ROOT / "docs/decisions").glob(f"{number:04d}-*.md")], f"no record {number}"


def test_the_page_has_every_document() -> None:
    text = PAGE.read_text("utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)

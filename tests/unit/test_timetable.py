"""The section that says where the time of a run went."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

ENGINES = """
    import time
    import pytest
    from tests.timetable import note_start

    @pytest.fixture(scope="module")
    def engine():
        time.sleep(0.55)
        note_start("plain engine", 3.5)
        return 1

    @pytest.fixture
    def quick(engine):
        yield
        time.sleep(0.25)

    def test_one(engine, quick):
        time.sleep(0.15)

    def test_two(engine, quick):
        note_start("other engine", 2.0)
        note_start("other engine", 4.0)
"""


@pytest.fixture(autouse=True)
def small_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Two folders with two tests, of which one folder has a fixture that takes long."""
    pytester.makeini("[pytest]\naddopts = -p tests.timetable -p no:cacheprovider\n")
    for folder, text in (("engines", ENGINES), ("plain", "def test_plain():\n    pass\n")):
        (pytester.mkdir(folder) / f"test_{folder}.py").write_text(textwrap.dedent(text))
    return pytester


def table(result: pytest.RunResult, title: str) -> list[list[str]]:
    """Return the rows of a table of the section, by their words."""
    lines = result.outlines[result.outlines.index(f"{title}:") + 1 :]
    rows = []
    for line in lines:
        if not line.startswith("  "):
            break
        rows.append(line.split())
    return rows


@pytest.mark.parametrize(
    "workers",
    [[], ["-p", "xdist.plugin", "-n", "2", "--dist", "loadfile"]],
    ids=["one process", "two workers"],
)
def test_the_section_sums_up_tests_folders_fixtures_and_starts(
    suite: pytest.Pytester, workers: list[str]
) -> None:
    result = suite.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*= where the time went =*"])

    slowest = table(result, "tests, slowest first")[1:]
    assert [name.partition("::")[2] for _, name in slowest][:2] == ["test_one", "test_two"]
    assert len(slowest) == 3
    assert 0.9 <= float(slowest[0][0]) < 5

    folders = {row[-1]: row[:-1] for row in table(result, "jobs")[1:]}
    tests, setup, call, teardown, cpu = map(float, folders["engines"])
    assert tests == 2
    assert 0.5 <= setup < 3
    assert 0.1 <= call < 3
    assert 0.5 <= teardown < 3
    assert 0 <= cpu < 3
    assert folders["plain"] == ["1", "0.0", "0.0", "0.0", "0.0"]

    heads, *fixtures = table(result, "fixtures")
    assert heads == ["set", "up", "seconds", "scope", "fixture", "of"]
    ((times, seconds, *rest),) = fixtures
    assert times == "1"
    assert 0.5 <= float(seconds) < 3
    assert rest == ["module", "engine", "engines/test_engines.py"]

    assert table(result, "starts")[1:] == [
        ["2", "6.0", "4.0", "other", "engine"],
        ["1", "3.5", "3.5", "plain", "engine"],
    ]


def test_a_run_in_which_nothing_took_long_has_only_its_tests_and_folders(
    suite: pytest.Pytester,
) -> None:
    result = suite.runpytest_subprocess("plain")
    result.assert_outcomes(passed=1)
    assert "jobs:" in result.outlines
    assert "fixtures:" not in result.outlines
    assert "starts:" not in result.outlines


def test_only_the_slowest_tests_are_listed(suite: pytest.Pytester) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(40))\ndef test_many(n):\n    pass\n"
    suite.makepyfile(many)
    result = suite.runpytest_subprocess("test_only_the_slowest_tests_are_listed.py")
    assert len(table(result, "tests, slowest first")) == 1 + 15
    assert table(result, "jobs")[1][0] == "40"


def test_a_start_can_be_reported_where_the_plug_in_is_absent(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from tests.timetable import note_start\ndef test_it():\n    note_start('engine', 1.0)\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*where the time went*")

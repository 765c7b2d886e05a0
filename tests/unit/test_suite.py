"""`make test`: pieces side by side, what one needs of another, and what is said at the end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ci import suite
from ci.suite import Piece, Suite

NPU_PARTS = {"devices", "contract", "transfer", "faults", "engines"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    monkeypatch.setattr(suite, "STATE", tmp_path / "passed.json")
    return tmp_path


def piece(name: str, code: str = "", *, engines: bool = False, needs: str = "") -> Piece:
    return Piece(name=name, argv=[sys.executable, "-c", code], engines=engines, needs=needs)


def run(*pieces: Piece) -> Suite:
    made = Suite(pieces)
    made.run()
    return made


def test_failed_piece_is_reported_and_ends_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    failing = (
        "print('FAILED tests/x.py::test_y - no')\n"
        "print('ERROR    some.logger:file.py:1 what a test has logged')\n"
        "raise SystemExit(1)"
    )
    done = run(piece("first", failing), piece("second"))
    assert [done.outcomes[name].status for name in ("first", "second")] == [1, 0]
    assert suite.verdict(done) == 1
    lines = suite.table(done)
    assert lines[1].endswith("first: FAILED, exit status 1")
    assert lines[2].strip() == "FAILED tests/x.py::test_y - no"
    assert lines[3].endswith("second")
    assert "FAILED tests/x.py::test_y" in capfd.readouterr().out


def test_cpu_time_of_child_processes_is_reported() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    done = run(piece("spinning", code), piece("left out", needs="spinning"))
    assert done.outcomes["spinning"].cpu_s >= 0.5
    cells = suite.table(done)[1].split()
    assert cells[1:] == [f"{done.outcomes['spinning'].cpu_s:.0f}", "spinning"]


def test_pieces_run_at_once_but_few_that_start_engines(folder: Path) -> None:
    """The first ends when the third has begun; the second begins after that."""
    order = folder / "order"
    begins = f"import pathlib, time; path = pathlib.Path({str(order)!r})\n"
    writes = begins + "with path.open('a') as file: print({!r}, file=file)\n"
    waits = "while 'other' not in path.read_text(): time.sleep(0.01)\n"
    ends = "with path.open('a') as file: print('ended', file=file)"
    pieces = [
        piece("one", writes.format("one") + waits + ends, engines=True),
        piece("two", writes.format("two"), engines=True),
        piece("other", writes.format("other")),
    ]
    made = Suite(pieces, at_once=(2, 1))
    made.run()
    assert {each.status for each in made.outcomes.values()} == {0}
    assert sorted(order.read_text().split()[:2]) == ["one", "other"]
    assert order.read_text().split()[2:] == ["ended", "two"]


def test_piece_waits_for_its_need() -> None:
    done = run(
        piece("environment", "import time; time.sleep(0.3); raise SystemExit(2)"),
        piece("one", needs="environment"),
    )
    assert done.outcomes["one"].status is None
    assert done.outcomes["one"].why == "environment: exit status 2"
    assert suite.verdict(done) == 1


def test_suite_passes_without_an_npu_environment() -> None:
    environment = suite.NPU_ENVIRONMENT
    done = run(
        piece(environment, f"raise SystemExit({suite.EXIT_UNAVAILABLE})"),
        piece("npu engines", "raise SystemExit(1)", needs=environment),
    )
    assert done.outcomes["npu engines"].status is None
    assert suite.verdict(done) == 0
    other = run(piece("other", f"raise SystemExit({suite.EXIT_UNAVAILABLE})"))
    assert suite.verdict(other) == 1


def test_named_pieces_run_with_what_they_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [piece("some environment"), piece("npu A", needs="some environment"), piece("other")]
    monkeypatch.setattr(suite, "pieces", lambda full: made)
    assert suite.main(["npu-a"]) == 0
    assert re.findall(r"suite: (.*): exit status 0", capsys.readouterr().out) == [
        "some environment",
        "npu A",
    ]
    with pytest.raises(SystemExit):
        suite.main(["npu-b"])
    assert "no piece is named npu-b: some-environment, npu-a, other" in capsys.readouterr().err


@pytest.mark.parametrize("full", [False, True])
def test_each_test_folder_is_in_the_suite_once(full: bool) -> None:
    pieces = suite.pieces(full=full)
    names = [each.name for each in pieces]
    assert len(names) == len(set(names))
    words = [word for each in pieces for word in each.argv]
    root = suite.ROOT / "tests"
    # In environments of their own: pieces that call a script, and jobs beside the suite.
    elsewhere = {"npu_sim", "clients", "devices", "first_hour"}
    for path in root.iterdir():
        if path.is_dir() and any(path.rglob("test_*.py")) and path.name not in elsewhere:
            listed = [word for word in words if word == f"tests/{path.name}"]
            files = {word for word in words if word.startswith(f"tests/{path.name}/")}
            files -= {*suite.OVER_VLLM, *suite.OWN_ENGINES}
            every = {f"tests/{path.name}/{each.name}" for each in path.glob("test_*.py")}
            assert len(listed) == 1 or files == every
    # What one piece leaves out, another one has.
    left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    apart = {*suite.OVER_VLLM, *suite.OWN_ENGINES}
    assert sorted(left_out) == sorted(word for word in words if word in apart)
    for index, each in enumerate(pieces):
        if each.needs:
            assert names.index(each.needs) < index
    npu = [each for each in pieces if "ci/jobs/npu-sim.sh" in each.argv]
    assert {each.argv[-1] for each in npu} == NPU_PARTS | ({"simulator"} if full else set())
    assert ("--full" in words) is full
    assert ("--short" in words) is not full

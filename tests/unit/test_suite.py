"""`make test`: pieces in lanes, what one needs of another, and what is said at the end."""

from __future__ import annotations

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


def piece(name: str, code: str = "", *, lane: str = "a", needs: str = "") -> Piece:
    return Piece(name=name, argv=[sys.executable, "-c", code], lane=lane, needs=needs)


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


def test_piece_waits_for_its_need_in_another_lane() -> None:
    done = run(
        piece("one", lane="a", needs="environment"),
        piece("environment", "import time; time.sleep(0.3); raise SystemExit(2)", lane="b"),
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
            files -= set(suite.OVER_VLLM)
            every = {f"tests/{path.name}/{each.name}" for each in path.glob("test_*.py")}
            assert len(listed) == 1 or files == every
    # What one piece leaves out, another one has.
    left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    assert sorted(left_out) == [word for word in words if word in suite.OVER_VLLM]
    for index, each in enumerate(pieces):
        if each.needs:
            needed = names.index(each.needs)
            assert pieces[needed].lane != each.lane or needed < index
    npu = [each for each in pieces if "ci/jobs/npu-sim.sh" in each.argv]
    assert {each.argv[-1] for each in npu} == NPU_PARTS | ({"simulator"} if full else set())
    assert ("--full" in words) is full
    assert ("--short" in words) is not full

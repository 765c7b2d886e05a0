"""`make test`: pieces in lanes, what one needs of another, and what is said at the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ci import suite
from ci.suite import Piece, Suite

DEADLINE_S = 30.0
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


def waiting_and_making(folder: Path) -> tuple[str, str]:
    """Return what ends when there is a file, and what makes that file."""
    wait = (
        "import pathlib, time\nend = time.monotonic() + 20\n"
        f"while not pathlib.Path({str(folder)!r}, 'there').exists(): "
        "assert time.monotonic() < end; time.sleep(0.01)"
    )
    return wait, f"import pathlib; pathlib.Path({str(folder)!r}, 'there').touch()"


def test_lanes_run_side_by_side_and_the_pieces_of_one_after_each_other(folder: Path) -> None:
    wait, make = waiting_and_making(folder)
    # Neither lane could end if they ran one after the other, in whatever order.
    done = run(
        piece("waits", wait, lane="a"),
        piece("nothing", "", lane="b"),
        piece("makes", make, lane="b"),
    )
    assert {name: each.status for name, each in done.outcomes.items()} == {
        "waits": 0,
        "nothing": 0,
        "makes": 0,
    }
    assert suite.verdict(done) == 0


def test_a_piece_that_fails_is_told_with_its_tests_and_ends_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_a_piece_keeps_what_it_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert (
        run(piece("one", "import sys; sys.exit(sys.dont_write_bytecode)")).outcomes["one"].status
        == 0
    )


def test_pieces_with_engines_never_run_at_once(folder: Path) -> None:
    made = run(
        piece(
            "first",
            f"import time; time.sleep(0.5); open({str(folder / 'over')!r}, 'w')",
            lane=suite.ENGINES,
        ),
        piece("second", f"open({str(folder / 'over')!r})", lane=suite.ENGINES),
        piece("other", lane="b"),
    )
    assert {each.status for each in made.outcomes.values()} == {0}


def test_what_needs_a_piece_of_another_lane_waits_for_it_and_is_left_out_if_it_failed() -> None:
    done = run(
        piece("one", lane="a", needs="environment"),
        piece("environment", "import time; time.sleep(0.3); raise SystemExit(2)", lane="b"),
    )
    assert done.outcomes["one"].status is None
    assert done.outcomes["one"].why == "environment: exit status 2"
    assert suite.verdict(done) == 1


def test_a_machine_that_cannot_have_the_npu_environment_passes_without_it() -> None:
    environment = suite.NPU_ENVIRONMENT
    done = run(
        piece(environment, f"raise SystemExit({suite.EXIT_UNAVAILABLE})"),
        piece("npu engines", "raise SystemExit(1)", needs=environment),
    )
    assert done.outcomes["npu engines"].status is None
    assert suite.verdict(done) == 0
    other = run(piece("other", f"raise SystemExit({suite.EXIT_UNAVAILABLE})"))
    assert suite.verdict(other) == 1


def test_a_stop_interrupts_what_runs_as_the_keyboard_would_and_begins_nothing(
    folder: Path,
) -> None:
    code = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "try:\n (folder / 'begun').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n (folder / 'cleaned up').touch(); raise"
    )
    made = Suite([piece("long", code), piece("next")])
    # What is started in the background of a shell ignores interrupts, unless somebody handles them.
    with suite.stopping(made):
        runs = threading.Thread(target=made.run)
        runs.start()
        end_s = time.monotonic() + DEADLINE_S
        while not (folder / "begun").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        made.stop()
        runs.join(DEADLINE_S)
    assert not runs.is_alive()
    assert (folder / "cleaned up").exists()
    assert made.outcomes["long"].status in (1, 130, -signal.SIGINT)
    assert made.outcomes["next"].why == "stopped"
    assert suite.verdict(made) == 1


ENGINE = """
import os, pathlib, signal, sys
pathlib.Path(os.environ["PYTHONPATH"], "engine").write_text(str(os.getpid()))
signal.pause()
"""
STARTS_ONE = """
import pathlib, sys
import pytest
from epd_portable.bench import servers
from tests import forked

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def fork():
    nursery = forked.nursery("fractions")
    try:
        yield forked.popen_of(nursery)
    finally:
        nursery.close()

def test_which_waits_until_it_is_ready(fork):
    command = [sys.executable, "-m", "slow"]
    server = servers.Server(
        name="engine", argv=command, env={"PYTHONPATH": str(HERE)}, url="http://127.0.0.1:1",
        log=HERE / "log", ready="never", popen=fork,
    )
    with server:
        pass
"""


def test_a_stop_while_an_engine_starts_leaves_none_behind(folder: Path) -> None:
    """As tests with engines start them: forked, in a session of its own."""
    (folder / "slow.py").write_text(ENGINE)
    (folder / "test_it.py").write_text(STARTS_ONE)
    argv = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider"]
    made = Suite([Piece(name="engines", argv=[*argv, str(folder / "test_it.py")], lane="a")])

    def signal_when_it_starts() -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not (folder / "engine").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        # The group gets it, and make passes it on to this one once more.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=signal_when_it_starts)
    with suite.stopping(made):
        sender.start()
        made.run()
        sender.join()
    assert made.outcomes["engines"].status == pytest.ExitCode.INTERRUPTED
    assert not psutil.pid_exists(int((folder / "engine").read_text()))


@pytest.mark.parametrize("full", [False, True])
def test_every_folder_of_tests_is_in_the_suite_once_and_every_need_can_be_met(full: bool) -> None:
    pieces = suite.pieces(full=full)
    names = [each.name for each in pieces]
    assert len(names) == len(set(names))
    words = [word for each in pieces for word in each.argv]
    root = suite.ROOT / "tests"
    # In environments of their own: pieces that call a script, and jobs beside the suite.
    elsewhere = {"npu_sim", "clients", "devices", "cuda", "first_hour"}
    for path in root.iterdir():
        if path.is_dir() and any(path.rglob("test_*.py")) and path.name not in elsewhere:
            listed = [word for word in words if word == f"tests/{path.name}"]
            files = {word for word in words if word.startswith(f"tests/{path.name}/")}
            files -= set(suite.OVER_VLLM)
            every = {f"tests/{path.name}/{each.name}" for each in path.glob("test_*.py")}
            assert len(listed) == 1 or files == every
    # What one piece leaves out, another one has.
    left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    assert left_out == [word for word in words if word in suite.OVER_VLLM]
    for index, each in enumerate(pieces):
        if each.needs:
            needed = names.index(each.needs)
            assert pieces[needed].lane != each.lane or needed < index
    npu = [each for each in pieces if "ci/jobs/npu-sim.sh" in each.argv]
    assert {each.argv[-1] for each in npu} == NPU_PARTS
    assert ("--full" in words) is full
    assert ("--short" in words) is not full

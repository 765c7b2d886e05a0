"""Reports on runs: from processes that live, regardless of files."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from epd_portable.launch.cli import main
from epd_portable.launch.run.running import ProcessRecord, RunRecord, find_runs, write_record
from tests import warm

RUN = "0badcafe"
LAUNCHER = "epd_portable.launch.cli"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the folder of a run, locked as its launcher does."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = tmp_path / f"epd-{RUN}"
    made.mkdir(mode=0o700)
    descriptor = os.open(made, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield made
    os.close(descriptor)


def unlock(folder: Path) -> None:
    """Let go of the folder, as Linux does when a launcher ends."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and os.readlink(entry) == str(folder):
            fcntl.flock(int(entry.name), fcntl.LOCK_UN)


def process(name: str = "encode-0", **changes: Any) -> ProcessRecord:
    made = ProcessRecord(
        name=name,
        role="front" if name == "front" else "encode",
        state="up",
        url="http://127.0.0.1:8000" if name == "front" else "http://127.0.0.1:20000",
        ports={"http": 20000, "control": 20002},
        log=f"/var/log/epd/{name}.log",
    )
    return made.model_copy(update=changes)


def record(*processes: ProcessRecord, **changes: Any) -> RunRecord:
    made = RunRecord(
        run_id=RUN,
        phase="serving",
        platform="cpu",
        model="demo",
        url="http://127.0.0.1:8000/v1",
        config="t.yaml",
        pid=os.getpid(),
        started_s=time.monotonic() - 3600.0,
        processes=processes,
    )
    return made.model_copy(update=changes)


def ask(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_a_run_is_found_as_long_as_its_launcher_lives(folder: Path) -> None:
    now = time.monotonic()
    write_record(folder, record(process(pid=7, started_s=now - 60.0, restarts=2)))
    result = ask("status")
    assert result.exit_code == 0
    assert f"run {RUN}: serving, http://127.0.0.1:8000/v1, model demo, cpu, t.yaml" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("encode-0"))
    assert "up     7    0:01:0" in line
    assert line.endswith("http://127.0.0.1:20000  control 20002  /var/log/epd/encode-0.log")
    answer = json.loads(ask("status", "--json").stdout)
    assert answer["schema_version"] == 1
    assert 3600 <= answer["runs"][0]["uptime_s"] < 3700
    assert 60 <= answer["runs"][0]["processes"][0]["uptime_s"] < 160
    unlock(folder)
    result = ask("status")
    assert result.exit_code == 1
    assert "no topology of yours runs here" in result.stdout


@pytest.mark.parametrize("text", ["", "{", '{"run_id": 3}', "[]"])
def test_a_file_that_says_nothing_is_no_run(folder: Path, text: str) -> None:
    (folder / "run.json").write_text(text)
    assert find_runs(folder.parent) == []


def test_a_run_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(folder, record())
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert find_runs(folder.parent) == []


def test_logs_are_shown_of_all_or_of_one(folder: Path, tmp_path: Path) -> None:
    for name in ("encode-0", "front"):
        (tmp_path / f"{name}.log").write_text("".join(f"{name} says {n}\n" for n in range(30)))
    logs = {name: str(tmp_path / f"{name}.log") for name in ("encode-0", "front")}
    write_record(folder, record(*(process(name, log=log) for name, log in logs.items())))

    def shown(*words: str) -> list[str]:
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        ended = warm.nursery().run("-m", LAUNCHER, "logs", *words, env=env, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    lines = shown("-n", "1")
    assert [each for each in lines if "says" in each] == ["encode-0 says 29", "front says 29"]
    assert shown("-n", "2", "front") == ["front says 28", "front says 29"]
    assert len([each for each in shown() if "says" in each]) == 40
    refused = ask("logs", "encode-9")
    assert refused.exit_code == 2
    assert f"run {RUN} has no process encode-9; there are encode-0, front" in refused.stderr


def test_logs_are_followed_until_the_launcher_ends(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "front.log"
    log.write_text("one\n")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as launcher:
        write_record(folder, record(process("front", log=str(log)), pid=launcher.pid))
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        following = warm.nursery().popen(
            "-m", LAUNCHER, "logs", "-f", stdout=subprocess.PIPE, env=env
        )
        assert following.stdout is not None
        with following.stdout as lines:
            assert lines.readline() == "one\n"
            with log.open("a") as file:
                file.write("two\n")
            assert lines.readline() == "two\n"
            launcher.communicate()
            assert following.wait(30) == 0


def test_logs_are_those_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert ask("logs").exit_code == ask("logs", "--run", RUN).exit_code == 1

"""Logs of processes that write without end."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd_portable.launch.run.log_files import rotate

Launch = Callable[..., Any]
MAX_BYTES = 1 << 20


def test_what_is_written_while_it_is_copied_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * (MAX_BYTES + 1))
    more = iter(range(10))
    real = os.pread

    def pread(source: int, length: int, offset: int) -> bytes:
        data = real(source, length, offset)
        with log.open("ab") as file:
            file.writelines(b"%d\n" % number for number in itertools.islice(more, 1))
        return data

    monkeypatch.setattr(os, "pread", pread)
    rotate(log, max_bytes=MAX_BYTES, files=2)
    kept = (tmp_path / "x.log.1").read_bytes()
    assert kept == b"x" * MAX_BYTES + b"".join(b"%d\n" % number for number in range(10))
    assert log.stat().st_size == 0


def test_a_log_that_grows_faster_than_it_is_copied_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, older = tmp_path / "x.log", tmp_path / "x.log.1"
    log.write_bytes(b"x" * (MAX_BYTES + 1))
    real = os.pread

    def pread(source: int, length: int, offset: int) -> bytes:
        with log.open("ab") as file:
            file.write(b"y" * length)
        return real(source, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    rotate(log, max_bytes=MAX_BYTES, files=2)
    assert older.read_bytes() == b"x" * MAX_BYTES + b"y" * MAX_BYTES
    assert (log.stat().st_size, stat.S_IMODE(older.stat().st_mode)) == (0, 0o600)


@pytest.mark.parametrize(
    ("content", "left", "kept"),
    [
        (b"x" * MAX_BYTES, MAX_BYTES, None),
        # Of one that is far too large the end.
        (b"a" * 3 * MAX_BYTES + b"b" * MAX_BYTES, 0, b"b" * MAX_BYTES),
    ],
    ids=["within", "beyond"],
)
def test_a_log_is_cut_beyond_its_size(
    tmp_path: Path, content: bytes, left: int, kept: bytes | None
) -> None:
    log, older = tmp_path / "x.log", tmp_path / "x.log.1"
    log.write_bytes(content)
    rotate(log, max_bytes=MAX_BYTES, files=3)
    assert log.stat().st_size == left
    assert (older.read_bytes() if older.exists() else None) == kept


def test_parts_beyond_the_number_that_is_kept_go(tmp_path: Path) -> None:
    for number in (1, 2, 3, 17):
        (tmp_path / f"x.log.{number}").write_text(str(number))
    for name in ("y.log.7", "x.log"):
        (tmp_path / name).write_bytes(b"x" * (MAX_BYTES + 1))
    rotate(tmp_path / "x.log", max_bytes=MAX_BYTES, files=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["x.log", "x.log.1", "x.log.2", "y.log.7"]
    assert (tmp_path / "x.log.2").read_text() == "1"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_what_cannot_be_kept_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is bounded also where the disk is full."""
    log = tmp_path / "x.log"
    real = os.open

    def full(path: Any, flags: int, mode: int = 0o777) -> int:
        return real("/dev/full", os.O_WRONLY) if str(path).endswith(".1") else real(path, flags)

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    log.write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(OSError, match="No space left"):
        rotate(log, max_bytes=MAX_BYTES, files=2)
    assert log.stat().st_size == 0


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * (MAX_BYTES + 1))
    (tmp_path / "x.log").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        rotate(tmp_path / "x.log", max_bytes=MAX_BYTES, files=2)
    assert precious.stat().st_size == MAX_BYTES + 1


def test_the_launcher_bounds_the_logs_of_what_it_starts(launch: Launch) -> None:
    run = launch({"encode-0": ["--chatty"], "front": []}, log_max_bytes=64 << 10)
    first = run.pid_of("encode-0")
    older = run.log_dir / "encode-0.log.1"
    for _ in range(2):
        run.until(older.exists, "the log was cut")
        older.unlink()
    assert run.pid_of("encode-0") == first
    assert not (run.log_dir / "encode-0.log.3").exists()
    assert not (run.log_dir / "front.log.1").exists()
    # What it said last is found after a cut.
    run.ask("encode-0", "/raise")
    assert "RuntimeError: at last" in run.wait_for("restarting")
    run.stop()

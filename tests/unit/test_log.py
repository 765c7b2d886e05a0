from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable import log


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Give the package's logger as it is before it is configured, and put everything back."""
    logger = logging.getLogger(log.ROOT)
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers.clear()
    logger.propagate = True
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def test_message_is_one_line_before_its_traceback(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("INFO")
    logger = logging.getLogger("epd_portable.part")
    try:
        raise ValueError("lost")
    except ValueError:
        logger.exception("a peer says %s", "no\nI all is well\r\x1b[2K \u2028\ud800 für")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith(r": a peer says no\nI all is well\r\x1b[2K \u2028\ud800 für")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: lost"


def test_lines_name_the_instance_and_go_to_stderr_once(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPD_INSTANCE", "encode-3")
    log.configure("INFO")
    log.configure("INFO")
    logging.getLogger("epd_portable.part").info("hello %s", "world")
    logging.getLogger("epd_portable.part").debug("hidden")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith(" I encode-3 epd_portable.part: hello world")


@contextlib.contextmanager
def tracing(folder: Path, instance: str) -> Iterator[log.EventTrace]:
    trace = log.EventTrace(str(folder), instance)
    yield trace
    if trace._file is not None:
        trace._file.close()


def read(folder: Path) -> list[dict[str, object]]:
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_events_are_lines_with_time_process_and_fields(tmp_path: Path) -> None:
    with tracing(tmp_path / "new", "pd-0") as trace:
        assert trace.on
        trace("first", at_s=0.5, mm_hash="x")
        trace("second")
    first, second = read(tmp_path / "new")
    assert (first["event"], first["mm_hash"], first["instance"]) == ("first", "x", "pd-0")
    assert first["pid"] == os.getpid()
    assert (first["t_s"], "at_s" in first) == (0.5, False)
    assert second["pid"] == os.getpid()
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"pd-0-{os.getpid()}.jsonl"]


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = log.EventTrace("", "pd-0")
    trace("event")
    assert not trace.on
    assert list(tmp_path.iterdir()) == []


def test_lines_of_several_threads_are_whole(tmp_path: Path) -> None:
    with tracing(tmp_path, "") as trace:

        def work() -> None:
            for number in range(50):
                trace("event", number=number, text="x" * 200)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read(tmp_path)) == 200

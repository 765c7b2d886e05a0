"""Reading logs for people: one telling line, and the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.launch.run.logs import Progress, failure_line, latest_line, text_behind

ENGINE_FAILURE = """\
(APIServer pid=10) INFO 01-31 12:00:00 [api_server.py:9] vLLM API server version 0.32.0
(EngineCore pid=11) ERROR 01-31 12:00:05 [core.py:9] EngineCore failed to start.
(EngineCore pid=11) ERROR 01-31 12:00:05 [core.py:9] Traceback (most recent call last):
(EngineCore pid=11) ERROR 01-31 12:00:05 [core.py:9]   File "x.py", line 1, in y
(EngineCore pid=11) ERROR 01-31 12:00:05 [core.py:9] ValueError: the pool is too small
(EngineCore pid=11) Process EngineCore:
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "z.py", line 1, in z
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. {}
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (ENGINE_FAILURE, "ValueError: the pool is too small"),
        (
            "(APIServer pid=10) RuntimeError: Engine core initialization failed. See above\n",
            "RuntimeError: Engine core initialization failed. See above",
        ),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --x\n",
            "api_server.py: error: unrecognized arguments: --x",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, no such model [type=value_error]\n"
            "    For further information visit https://example.org\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, no such model [type=value_error]",
        ),
        (
            "a\n\x1b[31mModuleNotFoundError: No module named 'vllm'\x1b[0m\n\n",
            "ModuleNotFoundError: No module named 'vllm'",
        ),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("first\nSegmentation fault\n", "Segmentation fault"),
        (
            "WARNING 01-31 12:00:00 [a.py:1] out of memory soon\n"
            'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n12:00:00 I front x: y\n',
            "out of memory soon",
        ),
        ("INFO 01-31 12:00:00 [a.py:1] x\n", ""),
        ("", ""),
    ],
)
def test_the_line_that_says_why(output: str, line: str) -> None:
    assert failure_line(output) == line


def test_reason_of_a_log_is_an_exception_of_bounded_length() -> None:
    assert failure_line("WARNING 01-31 12:00:00 [a.py:1] low memory", guess=False) == ""
    fault = "Fatal Python error: Segmentation fault"
    assert failure_line(f"{fault}\n\nCurrent thread", guess=False) == fault
    assert len(failure_line("ValueError: " + "x" * 10_000)) == 300


def test_the_last_line_of_a_log_is_found_without_its_prefix() -> None:
    assert latest_line("") == "importing"
    prefixed = "(EngineCore pid=11) INFO 01-31 12:00:05 [core.py:9] Loading weights took 1 s\n\n"
    assert latest_line(f"first\n{prefixed}") == "Loading weights took 1 s"
    assert len(latest_line("x" * 1000)) == 80


def test_progress_reports_at_doubled_times_what_is_not_ready() -> None:
    progress = Progress(started_at=100.0)
    stages = {"a": "loading", "b": "importing"}
    times = [now for now in range(100, 200) if progress.notices(stages, float(now))]
    assert times == [102, 104, 108, 116, 132, 162, 192]
    (waiting,) = progress.notices(stages, 222.0)
    assert waiting.text == "122 s  still waiting for a (loading), b (importing)"
    assert (waiting.event, waiting.fields) == ("waiting", {"stages": stages, "elapsed_s": 122.0})
    assert Progress(started_at=0.0).notices({}, 100.0) == []


def test_log_is_read_from_an_offset_or_whole_if_truncated(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert text_behind(log, 0) == ""
    log.write_text("one\ntwo\n")
    assert text_behind(log, 4) == "two\n"
    assert text_behind(log, 8) == ""
    log.write_text("new\n")
    assert text_behind(log, 8) == "new\n"
    log.write_text("x" * (300 << 10) + "end")
    assert text_behind(log, 4) == "x" * ((256 << 10) - 3) + "end"

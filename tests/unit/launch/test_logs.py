"""Reading logs for people: one telling line, and how far a start is."""

from __future__ import annotations

import pytest

from epd_portable.launch.notices import Notice
from epd_portable.launch.run.logs import Progress, failure_line, latest_stage

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


def test_without_a_guess_only_an_exception_is_taken_and_a_very_long_line_is_cut() -> None:
    assert failure_line("WARNING 01-31 12:00:00 [a.py:1] low memory", guess=False) == ""
    fault = "Fatal Python error: Segmentation fault"
    assert failure_line(f"{fault}\n\nCurrent thread", guess=False) == fault
    assert len(failure_line("ValueError: " + "x" * 10_000)) == 300


def test_the_stage_is_the_last_milestone_in_the_log() -> None:
    assert latest_stage("") == "importing"
    assert latest_stage("INFO Starting to load model /m...") == "loading the model"
    assert latest_stage("Starting to load model\nLoading weights took 1 s") == "weights are loaded"


def test_progress_tells_each_change_once_and_breaks_long_silence() -> None:
    progress = Progress(started_at=100.0, quiet_s=10.0)
    assert progress.notices({"a": "importing", "b": "importing"}, 101.0) == []
    stages = {"a": "loading", "b": "importing"}
    assert progress.notices(stages, 105.0) == [
        Notice(
            "stage",
            "  5 s  a: loading",
            {"instance": "a", "stage": "loading", "elapsed_s": 5.0},
        )
    ]
    assert progress.notices(stages, 114.0) == []
    (waiting,) = progress.notices(stages, 115.0)
    assert waiting.text == " 15 s  still waiting for a (loading), b (importing)"
    assert (waiting.event, waiting.fields) == ("waiting", {"stages": stages, "elapsed_s": 15.0})
    assert progress.notices(stages, 116.0) == []

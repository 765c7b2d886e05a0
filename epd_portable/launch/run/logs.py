"""What the logs of processes tell a user: how far a start is, why it failed. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from epd_portable.launch.notices import Notice

MILESTONES = (
    ("non-default args:", "reading the configuration"),
    ("Resolved architecture:", "starting the engine process"),
    ("Initializing a V1 LLM engine", "starting the worker"),
    ("Creating connector with name", "connecting the worker"),
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "weights are loaded"),
    ("Warming up", "warming up"),
    ("init engine (profile", "engine is ready"),
    ("Starting vLLM server", "starting the HTTP server"),
)
"""What vLLM writes while it starts, in its order, and what it means."""
FIRST_STAGE = "importing"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=12) ERROR 01-31 12:00:00 [core.py:99] " before the text of a vLLM line.
_VLLM_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
_QUIET = re.compile(r"^(\([^)]*pid=\d+\)\s*)?(INFO|DEBUG)\b|^[\d:]+ [ID] ")
_EXCEPTION = re.compile(
    r"^([\w.]+\.)?\w*(Error|Exception|Exit|Interrupt|Timeout)(: |$)|^Fatal Python error: "
)
_USAGE = re.compile(r"^\S+: error: ")
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|"
    r"See (the )?root cause|^(asyncio\.\S+\.)?CancelledError"
)
_HEADLINE_ONLY = re.compile(r"validation errors? for")
_LONGEST = 300


def latest_stage(output: str) -> str:
    """Return how far a start is, in words."""
    reached = [meaning for text, meaning in MILESTONES if text in output]
    return reached[-1] if reached else FIRST_STAGE


def failure_line(output: str, *, guess: bool = True) -> str:
    """Return the one line that says best why a process failed, or nothing.

    That is the last exception that does not merely report another process's; failing that, the
    last exception of any kind; failing that, for a guess, the last line above level INFO.
    """
    raw = [line for line in output.splitlines() if not _QUIET.match(line)]
    plain = (_VLLM_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in raw)
    lines = [line for line in plain if line.strip()]
    causes = [i for i, line in enumerate(lines) if _EXCEPTION.match(line) or _USAGE.match(line)]
    first_hand = [i for i in causes if not _SECOND_HAND.search(lines[i])]
    chosen = first_hand or causes
    if not chosen:
        return _shorten(lines[-1]) if lines and guess else ""
    position = chosen[-1]
    text = lines[position].strip()
    # pydantic writes what is wrong on the lines after its headline.
    if _HEADLINE_ONLY.search(text):
        details = itertools.takewhile(
            lambda line: not line.startswith("For further information"),
            (line.strip() for line in lines[position + 1 :]),
        )
        text = " ".join([text, *details])
    return _shorten(text)


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class Progress:
    """Turns stages of processes into notices: one a change, and one after a long silence.

    Args:
        started_at: Time of the start, as all times here in seconds of one clock.
    """

    def __init__(self, *, started_at: float, quiet_s: float = 10.0) -> None:
        self._started_at = started_at
        self._quiet_s = quiet_s
        self._said_at = started_at
        self._stages: dict[str, str] = {}

    def notices(self, stages: Mapping[str, str], now: float) -> list[Notice]:
        """Return what to show, by the stage of each process."""
        elapsed_s = now - self._started_at
        clock = f"{elapsed_s:3.0f} s"
        elapsed = {"elapsed_s": round(elapsed_s, 1)}
        notices = [
            Notice(
                "stage", f"{clock}  {name}: {stage}", {"instance": name, "stage": stage} | elapsed
            )
            for name, stage in stages.items()
            if stage != self._stages.get(name, FIRST_STAGE)
        ]
        self._stages = dict(stages)
        if not notices and now - self._said_at >= self._quiet_s:
            waiting = ", ".join(f"{name} ({stage})" for name, stage in stages.items())
            text = f"{clock}  still waiting for {waiting}"
            notices = [Notice("waiting", text, {"stages": self._stages} | elapsed)]
        if notices:
            self._said_at = now
        return notices

"""Every ``EPD_*`` environment variable, in one table.

Values are read when requested, so that a test or a launcher can set them late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from epd_portable.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """An environment variable.

    Attributes:
        default: Value when it is unset or empty.
        parse: Turns the text into the value; raises ``ValueError`` on bad text.
        meaning: One sentence.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value; `ConfigError` if the text cannot be parsed."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text!r}: {error}. {self.meaning}") from error


def _log_level(text: str) -> str:
    level = text.upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("expected DEBUG, INFO, WARNING or ERROR")
    return level


def _percentage(text: str) -> int | None:
    number = int(text)
    if not 1 <= number <= 100:
        raise ValueError("expected 1 to 100")
    return number


def _overlap(text: str) -> Literal["", "chunks", "stream", "none"]:
    for each in ("chunks", "stream", "none"):
        if text == each:
            return each
    raise ValueError("expected chunks, stream or none")


def _text(name: str, meaning: str) -> Variable[str]:
    return Variable(name, "", str, meaning)


EPD_PLATFORM = _text("EPD_PLATFORM", "Default of --platform of epd-launch: cuda, npu or cpu.")
EPD_LOG_LEVEL = Variable(
    "EPD_LOG_LEVEL", "INFO", _log_level, "Level of the package's own log lines."
)
EPD_TRACE_DIR = _text(
    "EPD_TRACE_DIR", "Folder for event traces, one JSON-lines file a process; empty writes none."
)
EPD_INSTANCE = _text(
    "EPD_INSTANCE", "Name of the instance this process belongs to, for logs and traces."
)
EPD_METRICS_DIR = _text(
    "EPD_METRICS_DIR",
    "Set in the first process of an engine: folder by which the others bring what they count to "
    "its /metrics.",
)
EPD_RUN_ID = _text(
    "EPD_RUN_ID",
    "Set by epd-launch in every process that it starts, so that it can find and end them.",
)
EPD_COMPUTE_SHARE = Variable(
    "EPD_COMPUTE_SHARE",
    None,
    _percentage,
    "Percent of an Ascend device's cores that a worker uses; set in env of a group.",
)
EPD_ENCODE_OVERLAP: Variable[Literal["", "chunks", "stream", "none"]] = Variable(
    "EPD_ENCODE_OVERLAP",
    "",
    _overlap,
    "How an instance encodes next to its steps, for measurements: chunks, stream or none.",
)
TABLE: tuple[Variable[Any], ...] = tuple(
    each for each in globals().copy().values() if isinstance(each, Variable)
)

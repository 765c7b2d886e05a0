"""Every ``EPD_*`` environment variable, in one table.

Values are read when asked for, so that a test or a launcher can set them late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epd_portable.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: Its full name.
        default: Value when it is unset or empty.
        parse: Turns the text into the value; raises ``ValueError`` on bad text.
        meaning: One sentence for the documentation.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the parsed value.

        Raises:
            ConfigError: The text cannot be parsed.
        """
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


def _yes_or_no(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


EPD_PLATFORM = Variable(
    name="EPD_PLATFORM",
    default="",
    parse=str,
    meaning="Default of --platform of epd-launch: cuda, npu or cpu.",
)
EPD_LOG_LEVEL = Variable(
    name="EPD_LOG_LEVEL",
    default="INFO",
    parse=_log_level,
    meaning="Level of the package's own log lines.",
)
EPD_TRACE_DIR = Variable(
    name="EPD_TRACE_DIR",
    default="",
    parse=str,
    meaning="Folder for event traces, one JSON-lines file a process; empty writes none.",
)
EPD_INSTANCE = Variable(
    name="EPD_INSTANCE",
    default="",
    parse=str,
    meaning="Name of the instance this process belongs to, for logs and traces.",
)
EPD_METRICS_DIR = Variable(
    name="EPD_METRICS_DIR",
    default="",
    parse=str,
    meaning="Set in the first process of an engine: folder by which the others bring what they "
    "count to its /metrics.",
)
EPD_RUN_ID = Variable(
    name="EPD_RUN_ID",
    default="",
    parse=str,
    meaning="Set by epd-launch in every process that it starts, so that it can find and end them.",
)
EPD_COMPUTE_SHARE = Variable(
    name="EPD_COMPUTE_SHARE",
    default=None,
    parse=_percentage,
    meaning="Percent of an Ascend device's cores that a worker uses; set by epd-launch.",
)
EPD_PAYLOAD_DIGEST = Variable(
    name="EPD_PAYLOAD_DIGEST",
    default=False,
    parse=_yes_or_no,
    meaning="1 on encode instances sends a digest with every item, which its receivers check.",
)

TABLE: tuple[Variable[Any], ...] = (
    EPD_PLATFORM,
    EPD_LOG_LEVEL,
    EPD_TRACE_DIR,
    EPD_INSTANCE,
    EPD_METRICS_DIR,
    EPD_RUN_ID,
    EPD_COMPUTE_SHARE,
    EPD_PAYLOAD_DIGEST,
)

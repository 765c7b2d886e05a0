"""Types of sections of configuration files: sizes, times, addresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Section(BaseModel):
    """A mapping of a configuration file: unknown keys are refused, types are strict."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def parse_size(value: Any) -> Any:
    """Turn ``"512MiB"`` into bytes; leave everything else to the type check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in UNITS:
        other = re.fullmatch(r"([\d.]+) *(?:([KMGT])I?)?(B|BYTES?)?", value.strip().upper())
        hint = ""
        if other is not None:
            hint = f"; did you mean {other[1]}{f'{other[2]}iB' if other[2] else ''}?"
        raise ValueError(
            f"{value!r} is not a size; write bytes or a unit, as in 512MiB or 1GiB{hint}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def parse_seconds(value: Any) -> Any:
    """Refuse ``"30s"`` with what to write; leave everything else to the type check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    size = _TIMES.get(match[2]) if match else None
    meant = f"write {float(match[1]) * size:g}" if match and size else "write a number, as in 30"
    raise ValueError(f"{value!r} is not a time; times are seconds, without a unit: {meant}")


Size = Annotated[int, BeforeValidator(parse_size)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)]


def url_problem(url: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Return why a text is no address of a server; empty if it is one."""
    example = f"{schemes[0]}://10.0.0.1:8000"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"{url!r} is no URL ({error}); write it as {example}"
    if re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?(/\S*)?", url):
        return f"{url!r} is no URL; write {schemes[0]}://{url}"
    if parts.scheme not in schemes:
        return f"{url!r} is an invalid URL; write it as {example}"
    if not host or port == 0 or re.search(r"\s", url):
        return f"{url!r} names no server; write it as {example}"
    if parts.username is not None or parts.query or parts.fragment:
        return f"{url!r}: leave out what stands before an @ or behind a ? or #"
    return ""


def _check_front(url: str) -> str:
    problem = url_problem(url)
    if not problem and urlsplit(url).path.strip("/"):
        problem = f"{url!r} is no address of a front; leave out what stands behind its port"
    if problem:
        raise ValueError(problem)
    return url.rstrip("/")


FrontUrl = Annotated[str, AfterValidator(_check_front)]
"""Base address of a front, without ``/v1``."""

"""What a schema found wrong with a file, said in the keys and lines that the user wrote."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from epd_portable.config.document import Document, KeyPath, dotted
from epd_portable.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_PROBLEMS = 50
"""Lines of one report."""
_LONGEST_NAME = 64
_LONGEST_VALUE = 200


def read_text(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: It cannot be read, is not UTF-8, or larger than `MAX_FILE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(
                f"configuration file {path}: more than {MAX_FILE_BYTES} bytes; is it another file?"
            )
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"configuration file {path}: {reason}") from error


def all_problems(source: str, problems: Sequence[str]) -> ConfigError:
    """Return one error that lists every problem of a file once."""
    unique = list(dict.fromkeys(problems))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    shown = unique[:MAX_PROBLEMS]
    if len(unique) > len(shown):
        shown.append(f"and {len(unique) - len(shown)} more")
    return ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in shown))


def in_one_line(error: ValidationError, *, whole: str = "value") -> str:
    """Return every key with its problem, for data that nobody wrote by hand.

    Args:
        error: What the schema said.
        whole: What a problem of no single key is of.
    """
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}"
        for item in error.errors(include_url=False)
    )


def explain(
    error: ValidationError,
    document: Document,
    root: type[BaseModel],
    *,
    more_keys: Sequence[str] = (),
    missing: Mapping[KeyPath, str] | None = None,
    refused: Mapping[KeyPath, str] | None = None,
) -> list[str]:
    """Return one line a problem: key, place and what is wrong.

    Args:
        error: What validation found.
        document: What was validated.
        root: The schema of the whole document.
        more_keys: Keys at the top that the schema does not know and the reader does.
        missing: What to add to the line of a missing key.
        refused: What to say instead of "unknown key".
    """
    lines: list[str] = []
    for item in error.errors():
        path: KeyPath = tuple(part for part in item["loc"] if part != "[key]")
        place = document.place(path)
        key, where = (place.key, f" ({place.where})") if place else (dotted(path), "")
        if refused and path in refused:
            message = refused[path]
        elif item["type"] == "missing":
            key, where = dotted(path), ""
            message = "is missing" + (missing or {}).get(path, "")
        elif item["type"] == "extra_forbidden":
            known = _known_keys(root, path[:-1])
            if len(path) == 1:
                known += more_keys
            name = str(path[-1])[:_LONGEST_NAME]
            near = difflib.get_close_matches(name, known, n=1) if len(lines) < MAX_PROBLEMS else ()
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            message = f"unknown key; {hint}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        else:
            got = item["input"]
            shown = "" if isinstance(got, dict | list) else f", got {got!r}"[:_LONGEST_VALUE]
            message = item["msg"][0].lower() + item["msg"][1:] + shown
        lines.append(f"{key}{where}: {message}")
    return lines


def _known_keys(root: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the keys that the schema allows under ``path``."""
    model = root
    for part in path:
        field = model.model_fields.get(str(part))
        inner = _section(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _section(annotation: object) -> type[BaseModel] | None:
    """Return the section that a key holds, ``None`` for a plain value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None

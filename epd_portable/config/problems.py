"""Problems that a schema found in a file, with the keys and lines that the user wrote."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from epd_portable.config.document import KeyPath, dotted, keys_on, read_yaml
from epd_portable.errors import ConfigError, without_passwords

Model = TypeVar("Model", bound=BaseModel)

MAX_FILE_BYTES = 1 << 20
MAX_PROBLEMS = 50
"""Lines of one report."""
_LONGEST_NAME = 64
_LONGEST_VALUE = 200
_SHOWN_KEYS = 6


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


def checked(
    text: str, model: type[Model], *, source: str, missing: Mapping[KeyPath, str] | None = None
) -> Model:
    """Return the content of a YAML file by its schema.

    Args:
        source: Name of the file, for messages.

    Raises:
        ConfigError: Lists every problem.
    """
    data, problems = read_yaml(text, source)
    made, found = validated(data, model, missing=missing)
    if made is None or problems:
        raise all_problems(source, [*problems, *found])
    return made


def validated(
    data: Mapping[str, Any], model: type[Model], **explained: Any
) -> tuple[Model | None, list[str]]:
    """Return data by its schema, or all problems, as `explain` has it."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        return None, explain(error, data, model, **explained)


def all_problems(source: str, problems: Sequence[str]) -> ConfigError:
    """Return one error that lists every problem of a file once."""
    unique = list(dict.fromkeys(problems))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    shown = unique[:MAX_PROBLEMS]
    if len(unique) > len(shown):
        shown.append(f"and {len(unique) - len(shown)} more")
    return ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in shown))


def in_one_line(error: ValidationError, *, whole: str = "value") -> str:
    """Return every key with its problem in one line, for data without lines.

    ``whole`` names the data, for problems of no single key.
    """
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}"
        for item in error.errors(include_url=False)
    )


def explain(
    error: ValidationError,
    data: Mapping[str, Any],
    root: type[BaseModel],
    *,
    more_keys: Sequence[str] = (),
    missing: Mapping[KeyPath, str] | None = None,
) -> list[str]:
    """Return one line a problem: key, place and what is wrong.

    Args:
        data: What was checked, see `read_yaml`.
        root: The schema of all of it.
        more_keys: Keys at the top that the schema does not know and the reader does.
        missing: What to add to the line of a missing key.
    """
    lines: list[str] = []
    for item in error.errors():
        path: KeyPath = tuple(part for part in item["loc"] if part != "[key]")
        key = named_key(data, path)
        if item["type"] == "missing":
            key = dotted(path)
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
            message = _plain(item["type"], item["msg"], item["input"], _known_keys(root, path))
        lines.append(f"{key}: {message}" if key else with_place(message, data))
    return lines


def named_key(data: Mapping[str, Any], path: KeyPath) -> str:
    """Return the key at a path, or the nearest above it, as it was written, and where."""
    keys = keys_on(data, path)
    return f"{keys[-1].written} ({keys[-1].where})" if keys else dotted(path)


def with_place(message: str, data: Mapping[str, Any]) -> str:
    """Add to the first key that a message names the place where it was written."""
    for named in re.finditer(r"[a-z_]+(\.[a-z_]+)*", message):
        path = named[0].split(".")
        keys = keys_on(data, path)
        # Within a sentence a word without a dot is no key.
        if len(keys) == len(path) and (named.start() == 0 or "." in named[0]):
            return f"{message[: named.end()]} ({keys[-1].where}){message[named.end() :]}"
    return message


def by_line(lines: Sequence[str]) -> list[str]:
    """Return problems in the order of their lines in the file; those without come last."""

    def place(line: str) -> int:
        found = re.search(r"\bline (\d+)", line)
        return int(found[1]) if found else 1 << 30

    return sorted(lines, key=place)


def _plain(kind: str, said: str, got: object, keys: Sequence[str]) -> str:
    """Describe the expected value, in terms of YAML instead of Python."""
    shown = "" if isinstance(got, dict | list) else f", got {_as_written(got)}"[:_LONGEST_VALUE]
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        some = ", ".join(keys[:_SHOWN_KEYS]) + (" and more" if len(keys) > _SHOWN_KEYS else "")
        of = f" of {some}" if keys else " of keys and values"
        return f"expected a mapping{of}{shown or ', got a list'}"
    if kind == "list_type":
        return f"expected a list, as [a, b]{shown or ', got a mapping'}"
    if kind == "string_pattern_mismatch":
        return f"{got!r} has not the form that it needs, {said.partition(' pattern ')[2]}"
    message = said[0].lower() + said[1:] + shown
    if kind == "string_type" and isinstance(got, int | float):
        message += f'; put it in quotes, as "{_as_written(got)}"'
    return message


def _as_written(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None:
        return "nothing"
    # Before it is cut: half a URL shows half a password.
    return str(value).lower() if isinstance(value, bool) else without_passwords(repr(value))


def _known_keys(root: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the keys that the schema allows under ``path``."""
    model = root
    for part in path:
        if isinstance(part, int):
            continue  # One of a list of sections.
        field = model.model_fields.get(str(part))
        inner = section_of(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section that a key holds, ``None`` for a plain value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None

"""From a topology file, a platform and overrides to one checked ``Topology``.

Every problem of a file is reported at once, under the key and line where the user wrote it. The
overlays of platforms that were not chosen are checked as well, so that a file that loads on one
platform loads on all.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from epd_portable.config.document import (
    Document,
    KeyPath,
    dotted,
    read_override,
    read_yaml,
)
from epd_portable.config.instance import PlatformName
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError

PLATFORMS: tuple[PlatformName, ...] = typing.get_args(PlatformName)
OVERLAYS = "platform"
NOT_SUPPORTED = {
    ("instances", role): "splitting prefill from decode is not supported yet by this version; "
    "use instances.prefill_decode"
    for role in ("prefill", "decode")
}


def load_topology(path: Path, platform: PlatformName, *, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology file for one platform.

    Args:
        path: YAML file.
        platform: Whose overlay is laid over the file.
        overrides: ``key.subkey=value`` assignments, laid over everything in their order.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"configuration file {path}: {reason}") from error
    return parse_topology(text, platform, overrides=overrides, source=str(path))


def parse_topology(
    text: str,
    platform: PlatformName,
    *,
    overrides: Sequence[str] = (),
    source: str = "configuration",
) -> Topology:
    """Check the text of a topology file; see ``load_topology``."""
    try:
        document = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    overlays, problems = _split_overlays(document)
    changes = [read_override(assignment) for assignment in overrides]
    topology: Topology | None = None
    for name in dict.fromkeys([platform, *overlays]):
        merged = document.overlaid(overlays.get(name, Document()))
        for change in changes:
            merged = merged.overlaid(change)
        try:
            candidate = Topology.model_validate(merged.data)
        except ValidationError as error:
            problems += _explain(error, merged)
            continue
        if name == platform:
            topology = candidate
    if problems or topology is None:
        unique = list(dict.fromkeys(problems))
        count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
        raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in unique))
    return topology


def _split_overlays(document: Document) -> tuple[dict[PlatformName, Document], list[str]]:
    """Take the overlays out of ``document``; return them and what is wrong with their names."""
    overlays: dict[PlatformName, Document] = {}
    problems: list[str] = []
    section = document.data.get(OVERLAYS, {})
    if not isinstance(section, dict):
        problems.append(f"{OVERLAYS}: expected a mapping of {', '.join(PLATFORMS)}")
        section = {}
    for name, content in section.items():
        place = document.places[(OVERLAYS, name)]
        if name not in PLATFORMS:
            problems.append(
                f"{place.key} ({place.where}): unknown platform; known are {', '.join(PLATFORMS)}"
            )
        elif not isinstance(content, dict):
            problems.append(f"{place.key} ({place.where}): expected a mapping of top-level keys")
        else:
            overlays[name] = document.take(OVERLAYS, name)
    document.data.pop(OVERLAYS, None)
    return overlays, problems


def _explain(error: ValidationError, document: Document) -> list[str]:
    lines = []
    for item in error.errors():
        path: KeyPath = tuple(part for part in item["loc"] if part != "[key]")
        place = document.place(path)
        key, where = (place.key, f" ({place.where})") if place else (dotted(path), "")
        known = _known_keys(path[:-1])
        if path in NOT_SUPPORTED:
            message = NOT_SUPPORTED[path]
        elif item["type"] == "missing":
            key, where = dotted(path), ""
            message = "is missing" + (
                "; give a Hugging Face id, a folder or 'demo'" if path == ("model",) else ""
            )
        elif item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(path[-1]), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            message = f"unknown key; {hint}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        else:
            got = item["input"]
            shown = "" if isinstance(got, dict | list) else f", got {got!r}"
            message = item["msg"][0].lower() + item["msg"][1:] + shown
        lines.append(f"{key}{where}: {message}")
    return lines


def _known_keys(path: KeyPath) -> list[str]:
    """Return the keys that the schema allows under ``path``."""
    model: type[BaseModel] = Topology
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    names = list(model.model_fields)
    return [*names, OVERLAYS] if model is Topology else names

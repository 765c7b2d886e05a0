"""YAML text as plain data that remembers where every key was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from epd_portable.errors import ConfigError

_DEEPEST = 32

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value was written.

    Attributes:
        key: Dotted key as the user wrote it, ``platform.cpu.`` prefix included.
        where: ``line 7`` of the file, or the option that set it.
    """

    key: str
    where: str


@dataclass(kw_only=True, slots=True)
class Document:
    """Nested plain data and the place of each of its keys."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place | None:
        """Return the place of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None

    def take(self, *prefix: str) -> Document:
        """Return what stands under ``prefix``, with its places."""
        data: Any = self.data
        for part in prefix:
            data = data[part]
        depth = len(prefix)
        places = {
            path[depth:]: place
            for path, place in self.places.items()
            if path[:depth] == prefix and len(path) > depth
        }
        return Document(data=data, places=places)

    def overlaid(self, top: Document) -> Document:
        """Return this document with ``top`` laid over it: mappings merge, all else replaces."""
        return Document(data=_merge(self.data, top.data), places={**self.places, **top.places})


def dotted(path: KeyPath) -> str:
    """Write a key path as a user would."""
    return ".".join(map(str, path))


def read_yaml(text: str) -> Document:
    """Parse one YAML mapping.

    Raises:
        ConfigError: Not YAML, not a mapping, a key that is no text, or a key written twice.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"not valid YAML: {where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("the file must hold a mapping with a 'model' key at its top")
    document = Document()
    document.data = _read_node(node, (), document.places, yaml.SafeLoader(""))
    return document


def read_override(assignment: str, *, option: str = "--set") -> Document:
    """Parse ``a.b=value``; the value is YAML, so ``true``, ``4`` and ``{image: 2}`` work.

    Raises:
        ConfigError: There is no ``=``, a part of the key is empty, or the value is not YAML.
    """
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{option} {assignment!r}: write it as key.subkey=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option} {assignment!r}: the value is not valid YAML") from error
    document = Document()
    level = document.data
    for depth, part in enumerate(parts, start=1):
        place = Place(key=".".join(parts[:depth]), where=f"{option} {assignment}")
        document.places[tuple(parts[:depth])] = place
        level[part] = value if depth == len(parts) else {}
        level = level[part]
    return document


def _read_node(
    node: yaml.Node, path: KeyPath, places: dict[KeyPath, Place], loader: yaml.SafeLoader
) -> Any:
    if len(path) > _DEEPEST:
        raise ConfigError(f"{_line(node)}: nested more than {_DEEPEST} deep, or refers to itself")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _read_scalar(key_node, loader)
            if not isinstance(key, str):
                under = dotted(path) or "the top"
                raise ConfigError(
                    f"{_line(key_node)}: key {key!r} under {under} is not text; put it in quotes"
                )
            here = (*path, key)
            if key in result:
                raise ConfigError(f"{_line(key_node)}: {dotted(here)} is written twice; keep one")
            places[here] = Place(key=dotted(here), where=_line(key_node))
            result[key] = _read_node(value_node, here, places, loader)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [
            _read_node(item, (*path, index), places, loader)
            for index, item in enumerate(node.value)
        ]
    return _read_scalar(node, loader)


def _read_scalar(node: yaml.Node, loader: yaml.SafeLoader) -> Any:
    if node.tag == "tag:yaml.org,2002:merge":
        raise ConfigError(f"{_line(node)}: merge keys (<<) are not read; write the keys out")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.constructor.ConstructorError, ValueError) as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{_line(node)}: {node.value!r}: {problem}") from error


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _merge(below: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged

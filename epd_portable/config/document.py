"""YAML text as plain data that remembers where every key was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from epd_portable.errors import ConfigError

_DEEPEST = 32
_LONGEST_NUMBER = 200
MAX_VALUES = 20_000
"""Values of one document, each counted as often as aliases repeat it."""

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
    """Nested plain data and the place of each of its keys.

    Attributes:
        problems: Keys that were left out, and why.
    """

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def place(self, path: KeyPath) -> Place | None:
        """Return the place of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None

    def part(self, *prefix: str) -> Document:
        """Return what is under ``prefix``, with its places."""
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
        return Document(
            data=_merge(self.data, top.data),
            places={**self.places, **top.places},
            problems=self.problems,
        )


def dotted(path: KeyPath) -> str:
    """Write a key path as a user would."""
    return ".".join(map(str, path))


def read_yaml(text: str) -> Document:
    """Parse one YAML mapping; keys that are no text, or written twice, are problems of it.

    Raises:
        ConfigError: Not YAML, or not a mapping.
    """
    node = _compose(text)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("the file must hold a mapping of keys and values at its top")
    reader = _Reader()
    data = reader.read(node, ())
    return Document(data=data, places=reader.places, problems=reader.problems)


def read_override(assignment: str, *, option: str = "--set") -> Document:
    """Parse ``a.b=value``; the value is YAML, so ``true``, ``4`` and ``{image: 2}`` work.

    Raises:
        ConfigError: It is neither.
    """
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{option} {assignment!r}: write it as key.subkey=value")
    try:
        node = _compose(text)
        reader = _Reader()
        value = None if node is None else reader.read(node, ())
        if reader.problems:
            raise ConfigError("; ".join(reader.problems))
    except ConfigError as error:
        raise ConfigError(f"{option} {assignment!r}: {error}") from error
    document = Document()
    level = document.data
    for depth, part in enumerate(parts, start=1):
        place = Place(key=".".join(parts[:depth]), where=f"{option} {assignment}")
        document.places[tuple(parts[:depth])] = place
        level[part] = value if depth == len(parts) else {}
        level = level[part]
    return document


def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ConfigError(f"not read: nested more than {_DEEPEST} deep") from error
    # A ValueError is, for example, an escape beyond Unicode.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(
            f"not valid YAML: {where}{getattr(error, 'problem', None) or error}"
        ) from error
    return node


class _Reader:
    """Turns nodes into plain data, within limits that aliases cannot evade."""

    def __init__(self) -> None:
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[str] = []
        self._loader = yaml.SafeLoader("")
        self._count = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return what a node says; keys of mappings are noted in `places`."""
        if len(path) > _DEEPEST:
            raise ConfigError(
                f"{_line(node)}: nested more than {_DEEPEST} deep, or refers to itself"
            )
        self._count += 1
        if self._count > MAX_VALUES:
            raise ConfigError(
                f"{_line(node)}: more than {MAX_VALUES} values; write less, and repeat less by "
                "aliases (*name)"
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            is_plain = isinstance(key_node, yaml.ScalarNode)
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = self._scalar(key_node) if is_plain and not is_merge else None
            if is_merge:
                problem = "merge keys (<<) are not read; write the keys out"
            elif not isinstance(key, str):
                shown = repr(key) if is_plain else "of several values"
                under = dotted(path) or "the top"
                problem = f"key {shown} under {under} is not text; put it in quotes"
            elif key in result:
                problem = f"{dotted((*path, key))} is written twice; keep one"
            else:
                here = (*path, key)
                self.places[here] = Place(key=dotted(here), where=_line(key_node))
                result[key] = self.read(value_node, here)
                continue
            self.problems.append(f"{_line(key_node)}: {problem}")
        return result

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _LONGEST_NUMBER:
            raise ConfigError(
                f"{_line(node)}: a number or date of {len(node.value)} characters; if it is text, "
                "put it in quotes"
            )
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.constructor.ConstructorError, ValueError, OverflowError) as error:
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

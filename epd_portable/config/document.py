"""YAML text as plain data whose keys know where they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from epd_portable.errors import ConfigError

_DEEPEST = 32
_LONGEST_NUMBER = 200
MAX_VALUES = 20_000
"""Values of one document, each counted as often as aliases repeat it."""

KeyPath = tuple[str | int, ...]


class Key(str):
    """A key of a mapping.

    Attributes:
        written: Dotted key as the user wrote it, ``platform.cpu.`` prefix included.
        where: ``line 7`` of the file, or the option that set it.
    """

    written: str
    where: str

    def __new__(cls, text: str, *, written: str, where: str) -> Key:
        """Return a text with its place."""
        key = super().__new__(cls, text)
        key.written, key.where = written, where
        return key


def keys_on(data: Any, path: Sequence[str | int]) -> list[Key]:
    """Return the keys on a path as they were written, as far as they were."""
    found = []
    for part in path:
        if isinstance(data, dict):
            key = next((each for each in data if each == part), None)
            if not isinstance(key, Key):
                break
            found.append(key)
        elif not (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            break
        data = data[part]
    return found


def dotted(path: KeyPath) -> str:
    """Write a key path as a user would."""
    return ".".join(map(str, path))


def read_yaml(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Parse one YAML mapping; also return what is wrong with keys that were left out.

    Those are no text, or written twice.

    Raises:
        ConfigError: Not YAML, or not a mapping; begins with ``source``.
    """
    try:
        node = _compose(text)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("the file must hold a mapping of keys and values at its top")
        reader = _Reader()
        data: dict[str, Any] = reader.read(node, ())
        return data, reader.problems
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def read_override(assignment: str) -> dict[str, Any]:
    """Parse ``a.b=value`` of ``--set``; the value is YAML, as ``true``, ``4`` or ``{image: 2}``.

    Raises:
        ConfigError: It is neither.
    """
    name, equals, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {assignment!r}: write it as key.subkey=value")
    where = f"--set {assignment}"
    try:
        node = _compose(text)
        reader = _Reader(where)
        value: Any = None if node is None else reader.read(node, tuple(parts))
        if reader.problems:
            raise ConfigError("; ".join(reader.problems))
    except ConfigError as error:
        raise ConfigError(f"--set {assignment!r}: {error}") from error
    for depth in range(len(parts), 0, -1):
        value = {Key(parts[depth - 1], written=dotted(tuple(parts[:depth])), where=where): value}
    data: dict[str, Any] = value
    return data


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

    def __init__(self, where: str = "") -> None:
        self.problems: list[str] = []
        self._where = where  # all keys are from; by default each its line
        self._loader = yaml.SafeLoader("")
        self._count = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a node; keys of mappings are `Key`."""
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
                key = Key(key, written=dotted(here), where=self._where or _line(key_node))
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
        if "\0" in node.value:  # Neither a variable, an argument nor a path can have it.
            raise ConfigError(f"{_line(node)}: {node.value!r} has a NUL character; remove it")
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.constructor.ConstructorError, ValueError, OverflowError) as error:
            problem = getattr(error, "problem", None) or error
            raise ConfigError(f"{_line(node)}: {node.value!r}: {problem}") from error


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def overlaid(below: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with others laid over it: mappings merge, all else replaces, also the place."""
    placed = {key: key for key in top}
    merged = {placed.get(key, key): value for key, value in below.items()}
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = overlaid(old, value)
        merged[key] = value
    return merged

"""Looks at classes as they are installed: their methods, what those call, and with what.

Nothing is constructed and none of the engines' code is run, apart from importing it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any


class Missing(Exception):
    """A name cannot be found; the message says which."""


def resolve(path: str) -> Any:
    """Return what ``module:name.name`` names.

    Raises:
        Missing: The module, or a name in it.
    """
    module, _, names = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"module {module} cannot be imported: {error}") from error
    at = module
    for name in names.split("."):
        if not hasattr(found, name):
            raise Missing(f"{at} has no {name}")
        found, at = getattr(found, name), f"{at}:{name}" if at == module else f"{at}.{name}"
    return found


def functions(owner: type, name: str | None = None) -> Iterator[ast.AST]:
    """Yield the syntax trees of methods of a class and its bases, as they are installed.

    Args:
        owner: The class.
        name: Of the methods; ``None`` for all.
    """
    for part in inspect.getmro(owner):
        members = vars(part) if name is None else {name: vars(part).get(name)}
        for member in members.values():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function):
                source = inspect.getsource(inspect.unwrap(function))
                yield ast.parse(textwrap.dedent(source))


def called_by(owner: type, name: str) -> Iterator[tuple[str, str]]:
    """Yield what methods of this name call: the name of the function, and what it is called on."""
    for function in functions(owner, name):
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, ast.unparse(node.func.value)
            elif isinstance(node.func, ast.Name):
                yield node.func.id, ""


def calls_on(owner: type, attribute: str) -> list[ast.Call]:
    """Return the calls of methods of ``self.<attribute>`` in a class and its bases."""
    return [
        node
        for function in functions(owner)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == f"self.{attribute}"
    ]


def mismatch(ours: Any, theirs: Any) -> str | None:
    """Say why a call that fits ``theirs`` would not fit ``ours``, which takes its place."""
    base = inspect.signature(theirs).parameters.values()
    positional = [p for p in base if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    named = [p.name for p in base if p.kind is p.KEYWORD_ONLY]
    named_required = [p.name for p in base if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    # Everything by position, then the least that is allowed, by name except self.
    calls = [
        ([None] * len(positional), named),
        ([None], [p.name for p in required[1:]] + named_required),
    ]
    for arguments, keywords in calls:
        try:
            inspect.signature(ours).bind(*arguments, **dict.fromkeys(keywords))
        except TypeError as error:
            return f"{error}; theirs: {inspect.signature(theirs)}; ours: {inspect.signature(ours)}"
    return None

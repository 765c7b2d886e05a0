"""Sources of the repository, read and parsed once for all guards of a process."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "epd_portable"


@cache
def modules(folder: Path = PACKAGE) -> Sequence[Path]:
    """Return the Python files below a folder."""
    return sorted(folder.rglob("*.py"))


@cache
def text(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """Return all nodes of a module, itself first."""
    return [*ast.walk(ast.parse(text(path)))]


@cache
def strings(path: Path) -> Sequence[ast.Constant]:
    """Return the strings of a module, docstrings and parts of f-strings included."""
    return [
        each
        for each in nodes(path)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


@cache
def docstrings(path: Path) -> frozenset[int]:
    """Return the ids of the strings that are docstrings, those of constants included."""
    return frozenset(id(each.value) for each in nodes(path) if isinstance(each, ast.Expr))


@cache
def literals_of_calls(function: str) -> frozenset[str]:
    """Return the first arguments of every call of a function in the package, where literal."""
    return frozenset(
        str(node.args[0].value)
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and function in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )

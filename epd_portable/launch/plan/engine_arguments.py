"""Which arguments the installed vLLM has, read in its source: importing it takes many seconds.

Names and simple types are those of its classes of arguments and of the options that it adds by
hand. What cannot be told so is left to vLLM. Where none is installed, or its source has another
form, nothing is checked.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from epd_portable.launch.plan.installed import installed_engines

_ENGINE_FILE = "engine/arg_utils.py"
_SERVER_FILES = "entrypoints/**/cli_args.py"
_ENGINE_CLASS = "EngineArgs"
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_WHOLE_NUMBER = re.compile(r"-?\d+|\d+(\.\d+)?[kKmMgGtT]i?|auto")
"""As vLLM reads them for sizes and lengths: ``4096``, ``4k``, ``1.5Gi``."""
_MAPPINGS = ("dict", "Dict", "Mapping")
_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """What vLLM takes for one argument; nothing of it where it takes more than can be told.

    Attributes:
        types: Of ``bool``, ``int``, ``float``, ``str``, ``dict``.
        choices: Texts, where only these are allowed.
    """

    types: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArguments:
    """The arguments of one vLLM.

    Attributes:
        engine: Its name and version, for messages.
        known: By name, with underscores; looked up when it is asked for.
    """

    engine: str
    known: Mapping[str, Callable[[], Argument]]

    def problem(self, name: str, value: JsonValue) -> str:
        """Return why vLLM would not take this; empty if it would, or if that cannot be told."""
        if value is None:  # Left out.
            return ""
        found = self.known.get(name) or self.known.get(name.removeprefix("no_"))
        if found is None:
            near = difflib.get_close_matches(name, self.known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{self.engine} has no such argument{hint}"
        known = found()
        if known.choices and isinstance(value, str) and value not in known.choices:
            near = difflib.get_close_matches(value, known.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {_some(known.choices)}"
            return f"{self.engine} does not know {value!r} here; {hint}"
        if known.types and not any(_fits(value, each) for each in known.types):
            wanted = " or ".join(_WANTED[each] for each in _WANTED if each in known.types)
            return f"{self.engine} wants {wanted} here, got {value!r}"
        return ""


_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "dict": "a mapping",
}


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fits(value: JsonValue, wanted: str) -> bool:
    """Tell whether a value, written as an option of a command line, is of a type."""
    if wanted == "bool" or isinstance(value, bool):
        # An option without a value, which no other takes.
        return wanted == "bool" and isinstance(value, bool)
    if wanted == "dict":
        # A text may be JSON, or the short form of a mapping.
        return isinstance(value, dict | str)
    if isinstance(value, dict | list):
        return False
    if wanted == "int":
        return isinstance(value, int) or bool(_WHOLE_NUMBER.fullmatch(str(value)))
    if wanted == "float":
        return isinstance(value, int | float) or bool(_NUMBER.fullmatch(str(value)))
    return True


@functools.cache
def installed_arguments() -> EngineArguments | None:
    """Return the arguments of the vLLM that is installed; ``None`` if nothing can be told."""
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


def read_arguments(package: Path) -> dict[str, Callable[[], Argument]]:
    """Return the arguments in the source of a vLLM; none if it is of an unknown form.

    Args:
        package: The folder ``vllm``.
    """
    known: dict[str, Callable[[], Argument]] = {}
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
    for tree in (engine, *servers):
        aliases = _Aliases(package, tree)
        for name, annotation in _fields(tree):
            known.setdefault(name, functools.partial(_argument, annotation, aliases))
        for name in _options(tree):
            known.setdefault(name, Argument)
    return known


def _fields(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id, each.annotation


def _options(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for each in node.args:
                if isinstance(each, ast.Constant) and str(each.value).startswith("--"):
                    yield str(each.value)[2:].replace("-", "_")


class _Aliases:
    """Finds what names of types stand for, in the modules that they come from."""

    def __init__(self, package: Path, tree: ast.Module) -> None:
        self._package = package
        self._tree = tree
        self._modules = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
            for alias in node.names
        }

    def choices(self, name: str) -> tuple[str, ...]:
        """Return the texts that a name of ``Literal[…]`` stands for; none if it is another type."""
        module, original = self._modules.get(name, (None, name))
        tree = _parsed(self._package, module) if module else self._tree
        for node in tree.body if tree else ():
            target, value = None, None
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign):
                target, value = node.target, node.value
            if isinstance(target, ast.Name) and target.id == original and value is not None:
                return _literal(value)
        return ()


@functools.cache
def _parsed(package: Path, module: str) -> ast.Module | None:
    place = package.parent.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        try:
            return ast.parse(path.read_text("utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def _literal(node: ast.expr) -> tuple[str, ...]:
    if not (isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"):
        return ()
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    return tuple(map(str, texts)) if all(isinstance(text, str) for text in texts) else ()


def _argument(annotation: ast.expr, aliases: _Aliases) -> Argument:
    types: set[str] = set()
    choices: list[str] = []
    for part in _union(annotation):
        name = getattr(part, "id", "")
        if isinstance(part, ast.Constant) and part.value is None:
            continue
        if name in _WANTED:
            types.add(name)
        elif isinstance(part, ast.Subscript) and getattr(part.value, "id", "") in _MAPPINGS:
            types.add("dict")
        elif found := _literal(part) or (name and aliases.choices(name)):
            choices += found
        else:
            return Argument()
    if choices and not types:
        return Argument(types=frozenset({"str"}), choices=tuple(choices))
    return Argument(types=frozenset(types))


def _union(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _union(node.left)
        yield from _union(node.right)
    else:
        yield node

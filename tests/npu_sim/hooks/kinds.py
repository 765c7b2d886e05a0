"""What can be expected of vLLM and vllm-ascend, and how it is checked in what is installed.

Nothing is constructed and none of the engines' code is run, apart from importing it: a check
belongs into a process of the pair of versions that is asked about. Classes and functions are named
``module:Class.method``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class Missing(Exception):
    """A name cannot be found; the message says which."""


@dataclass(frozen=True)
class Hook:
    """One thing that our code expects.

    Attributes:
        caller: Which part of our code expects it.
        name: What is expected, short.
        check: Says what is wrong, or nothing; it may raise `Missing`.
    """

    caller: str
    name: str
    check: Callable[[], str | None]

    @property
    def title(self) -> str:
        """Name of the test."""
        return f"{self.caller} -> {self.name}"

    def problem(self) -> str | None:
        """Say what is wrong in the installed versions, or nothing."""
        try:
            return self.check()
        except Missing as error:
            return str(error)


def calls(caller: str, *forms: str) -> list[Hook]:
    """We call these, or our methods in their place are called like them.

    Args:
        caller: Which part of our code does.
        forms: ``module:Class.method(self, by_position, by_name=)``.
    """

    def check(form: str) -> str | None:
        target, _, given = form.rstrip(")").partition("(")
        words = given.split(", ") if given else []
        keywords = [word.rstrip("=") for word in words if word.endswith("=")]
        signature = inspect.signature(resolve(target))
        try:
            signature.bind(*words[: len(words) - len(keywords)], **dict.fromkeys(keywords))
        except TypeError as error:
            return f"its signature is {signature}: {error}"
        return None

    return [Hook(caller, short(form), lambda form=form: check(form)) for form in forms]


def attributes(caller: str, owner: str, names: str) -> list[Hook]:
    """We read or replace these attributes, which it or a base declares, or a method assigns."""

    def check(name: str) -> str | None:
        found = resolve(owner)
        for part in inspect.getmro(found):
            if name in vars(part) or name in inspect.get_annotations(part):
                return None
        assigned = f"self.{name}" in accessed(functions(found), ast.Store)
        return None if assigned else "neither declared nor assigned in it or its bases"

    return [
        Hook(caller, f"{short(owner)}.{name}", lambda name=name: check(name))
        for name in names.split()
    ]


def reaches(caller: str, owner: str, method: str, callees: str) -> list[Hook]:
    """A method of theirs calls these, by itself or through methods of its own object."""

    def check(callee: str) -> str | None:
        found = having(owner, method)
        waiting, seen = [method], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for called, on in called_by(found, name):
                if called == callee:
                    return None
                if on in ("self", "super()"):
                    waiting.append(called)
        return f"it does not, nor do the {len(seen)} methods that it calls"

    return [
        Hook(
            caller, f"{short(owner)}.{method} reaches {callee}", lambda callee=callee: check(callee)
        )
        for callee in callees.split()
    ]


def reads(caller: str, owner: str, method: str, expression: str) -> Hook:
    """A method of theirs reads something that we have changed, written there like this."""

    def check() -> str | None:
        trees = functions(having(owner, method), method)
        return None if expression in accessed(trees, ast.Load) else "it does not"

    return Hook(caller, f"{short(owner)}.{method} reads {expression}", check)


def called_by_name(caller: str, source: str, callee: str) -> Hook:
    """They call our object, which they hold by a name, with keyword arguments only.

    Args:
        caller: Which part of our code expects it.
        source: Where they do; its definition counts, whatever has replaced it.
        callee: The name.
    """

    def check() -> str | None:
        module, _, names = source.partition(":")
        body: list[ast.stmt] = ast.parse(inspect.getsource(importlib.import_module(module))).body
        for name in names.split("."):
            found = [part for part in body if getattr(part, "name", None) == name]
            if not found:
                raise Missing(f"{module} has no {names}")
            body = found[0].body  # type: ignore[attr-defined]
        found_calls = [
            node
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == callee
        ]
        if not found_calls:
            return f"it does not call {callee}"
        wrong = [ast.unparse(call) for call in found_calls if call.args]
        return f"it calls `{wrong[0]}`" if wrong else None

    return Hook(caller, f"{short(source)} calls {callee}(keyword=…)", check)


def order(caller: str, owner: str, classes: str) -> Hook:
    """Classes stand in this order in the method-resolution order; others may stand between."""

    def check() -> str | None:
        names = [part.__name__ for part in inspect.getmro(resolve(owner))]
        found = [name for name in names if name in classes.split()]
        return None if found == classes.split() else f"it is {', '.join(names)}"

    return Hook(caller, f"order of {' < '.join(classes.split())}", check)


def provides(caller: str, owner: str, method: str, provider: str) -> Hook:
    """A method is taken from the body of this class and no other, behind all mixins."""

    def check() -> str | None:
        parts = inspect.getmro(having(owner, method))
        by = next(part.__name__ for part in parts if method in vars(part))
        return None if by == provider else f"it is {by}'s"

    return Hook(caller, f"{short(owner)}.{method} is {provider}'s", check)


def implements(caller: str, ours: str, base: str) -> Hook:
    """Our class stands for ``base``: nothing abstract is left, and overrides take the same calls.

    Constructors are left out: who calls them knows the class.
    """

    def check() -> str | None:
        made, theirs = resolve(ours), resolve(base)
        if not issubclass(made, theirs):
            return f"{made.__name__} is no {theirs.__name__}"
        abstract = getattr(made, "__abstractmethods__", ())
        problems = [f"{name} is abstract" for name in sorted(abstract)]
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            override = getattr(made, name)
            if override is method or name == "__init__":
                continue
            if why := mismatch(override, method):
                problems.append(f"{name}: {why}")
        return "; ".join(problems) or None

    return Hook(caller, f"implements {short(base)}", check)


def serves(caller: str, owner: str, attribute: str, ours: str, at_least: str) -> Hook:
    """Our object stands at ``self.<attribute>`` of ``owner``, whose methods call it.

    Args:
        caller: Which part of our code does.
        owner: Theirs, whose calls our object must take.
        attribute: Where it looks for our object.
        ours: Class of our object.
        at_least: Methods that must be called; the object would be useless without.
    """

    def unfit(made: type, call: ast.Call, name: str) -> str | None:
        method = getattr(made, name, None)
        if method is None:
            return f"{made.__name__} has no {name}"
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        try:
            inspect.signature(method).bind(made, *call.args, **dict.fromkeys(keywords))
        except TypeError as error:
            return f"{made.__name__}.{name}{inspect.signature(method)}: {error}"
        return None

    def check() -> str | None:
        made, found = resolve(ours), calls_on(resolve(owner), attribute)
        names = {name for name, _ in found}
        problems = [f"{name} is not called" for name in at_least.split() if name not in names]
        for name, call in found:
            if why := unfit(made, call, name):
                problems.append(f"`{ast.unparse(call)}`: {why}")
        return "; ".join(dict.fromkeys(problems)) or None

    return Hook(caller, f"{short(owner)} calls self.{attribute}", check)


def shared(base: str, method: str, since: str, *, once: bool) -> Hook:
    """Either their scheduler calls a method of the connector, or ours does, by version.

    Args:
        base: Their scheduler.
        method: Of the connector.
        since: Constant of `epd_portable.vllm_plugin.compat`: from here on theirs does.
        once: The method must not be called by both.
    """

    def check() -> str | None:
        from epd_portable.vllm_plugin import compat

        theirs = any(name == method for name, _ in calls_on(resolve(base), "ec_connector"))
        ours = compat.version() < getattr(compat, since)
        if not theirs and not ours:
            return "neither side calls it"
        return "both sides call it" if once and theirs and ours else None

    return Hook(f"compat.py: {since}", f"{short(base)} calls {method} from {since} on", check)


def short(path: str) -> str:
    """Return a name without its module."""
    return path.partition(":")[2]


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


def having(path: str, method: str) -> type:
    """Return a class that has a method.

    Raises:
        Missing: It has not, or is not there.
    """
    resolve(f"{path}.{method}")
    return resolve(path)


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


def accessed(trees: Iterable[ast.AST], how: type[ast.expr_context]) -> Iterator[str]:
    """Yield the attributes that are read (``ast.Load``) or assigned (``ast.Store``), as written."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, how):
                yield ast.unparse(node)


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


def calls_on(owner: type, attribute: str) -> list[tuple[str, ast.Call]]:
    """Return the calls of methods of ``self.<attribute>`` in a class and its bases, by name."""
    return [
        (node.func.attr, node)
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
    for arguments, keywords in [
        ([None] * len(positional), named),
        ([None], [p.name for p in required[1:]] + named_required),
    ]:
        try:
            inspect.signature(ours).bind(*arguments, **dict.fromkeys(keywords))
        except TypeError as error:
            return f"{error}; theirs: {inspect.signature(theirs)}; ours: {inspect.signature(ours)}"
    return None

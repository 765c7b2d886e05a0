"""What can be said about a hook, and how it is checked against the classes that are installed.

Every check imports what it looks at, so it belongs into a process of the pair of versions that is
asked about.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tests.npu_sim.hooks.classes import Missing, called_by, calls_on, functions, mismatch, resolve


@dataclass(frozen=True, kw_only=True)
class Hook(ABC):
    """One thing that our code expects of vLLM or vllm-ascend.

    Attributes:
        caller: Which part of our code expects it.
    """

    caller: str

    @property
    @abstractmethod
    def name(self) -> str:
        """What is expected, short."""

    @abstractmethod
    def check(self) -> str | None:
        """Say what is wrong with it in the installed versions.

        Raises:
            Missing: What is looked at is not there.
        """

    @property
    def title(self) -> str:
        """Name of the test."""
        return f"{self.caller} -> {self.name}"


@dataclass(frozen=True, kw_only=True)
class Calls(Hook):
    """We call ``target``, or our method that takes its place is called like it.

    Attributes:
        target: Function or method, as ``module:Class.method``.
        arguments: What is given by position, ``self`` included.
        keywords: What is given by name.
    """

    target: str
    arguments: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        given = [*self.arguments, *(f"{keyword}=" for keyword in self.keywords)]
        return f"{self.target.partition(':')[2]}({', '.join(given)})"

    def check(self) -> str | None:
        signature = inspect.signature(resolve(self.target))
        try:
            signature.bind(*self.arguments, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"its signature is {signature}: {error}"
        return None


@dataclass(frozen=True, kw_only=True)
class Attribute(Hook):
    """We read or replace an attribute of instances of ``owner``.

    Attributes:
        owner: Class, as ``module:Class``.
        attribute: Its name; a method of the class or one of its bases must assign it, or the class
            must declare it.
    """

    owner: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.attribute}"

    def check(self) -> str | None:
        owner = resolve(self.owner)
        declared = any(
            self.attribute in vars(part) or self.attribute in inspect.get_annotations(part)
            for part in inspect.getmro(owner)
        )
        if declared or any(self._is_assigned_in(function) for function in functions(owner)):
            return None
        return "neither declared nor assigned in it or its bases"

    def _is_assigned_in(self, function: ast.AST) -> bool:
        return any(
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == self.attribute
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            for node in ast.walk(function)
        )


@dataclass(frozen=True, kw_only=True)
class Reaches(Hook):
    """A method of theirs calls another function, by itself or through methods of its own object.

    Attributes:
        owner: Class, as ``module:Class``.
        method: Where the way begins.
        callee: Name of what is called, without what it is called on.
    """

    owner: str
    method: str
    callee: str

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method} reaches {self.callee}"

    def check(self) -> str | None:
        owner = resolve(self.owner)
        if not hasattr(owner, self.method):
            raise Missing(f"{owner.__name__} has no {self.method}")
        waiting, seen = [self.method], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for called, on in called_by(owner, name):
                if called == self.callee:
                    return None
                if on in ("self", "super()"):
                    waiting.append(called)
        return f"it does not, nor do the {len(seen)} methods that it calls"


@dataclass(frozen=True, kw_only=True)
class Reads(Hook):
    """A method of theirs reads something that we have changed.

    Attributes:
        owner: Class, as ``module:Class``.
        method: That reads it.
        expression: What it reads, as it is written there.
    """

    owner: str
    method: str
    expression: str

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method} reads {self.expression}"

    def check(self) -> str | None:
        owner = resolve(self.owner)
        trees = list(functions(owner, self.method))
        if not trees:
            raise Missing(f"{owner.__name__} has no {self.method}")
        read = any(
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node) == self.expression
            for tree in trees
            for node in ast.walk(tree)
        )
        return None if read else "it does not"


@dataclass(frozen=True, kw_only=True)
class CalledByName(Hook):
    """They call our object, which they hold by a name, with keyword arguments only.

    Attributes:
        source: Where, as ``module:Class.method``; its definition, whatever has replaced it.
        callee: The name.
    """

    source: str
    callee: str

    @property
    def name(self) -> str:
        return f"{self.source.partition(':')[2]} calls {self.callee}(keyword=…)"

    def check(self) -> str | None:
        module, _, names = self.source.partition(":")
        body: list[ast.stmt] = ast.parse(inspect.getsource(importlib.import_module(module))).body
        for name in names.split("."):
            found = [part for part in body if getattr(part, "name", None) == name]
            if not found:
                raise Missing(f"{module} has no {names}")
            body = found[0].body  # type: ignore[attr-defined]
        calls = [
            node
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == self.callee
        ]
        if not calls:
            return f"it does not call {self.callee}"
        wrong = [ast.unparse(call) for call in calls if call.args]
        return f"it calls `{wrong[0]}`" if wrong else None


@dataclass(frozen=True, kw_only=True)
class Order(Hook):
    """Classes stand in this order in the method-resolution order of ``owner``.

    Attributes:
        owner: Class, as ``module:Class``.
        classes: Their names; others may stand between.
    """

    owner: str
    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"order of {' < '.join(self.classes)}"

    def check(self) -> str | None:
        order = [part.__name__ for part in inspect.getmro(resolve(self.owner))]
        found = [name for name in order if name in self.classes]
        return None if found == list(self.classes) else f"it is {', '.join(order)}"


@dataclass(frozen=True, kw_only=True)
class Provides(Hook):
    """A method is taken from this class and no other, behind all mixins.

    Attributes:
        owner: Class, as ``module:Class``.
        method: Its method.
        provider: Name of the class in whose body it is.
    """

    owner: str
    method: str
    provider: str

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]}.{self.method} is {self.provider}'s"

    def check(self) -> str | None:
        owner = resolve(self.owner)
        for part in inspect.getmro(owner):
            if self.method in vars(part):
                return None if part.__name__ == self.provider else f"it is {part.__name__}'s"
        raise Missing(f"{owner.__name__} has no {self.method}")


@dataclass(frozen=True, kw_only=True)
class Implements(Hook):
    """Our class stands for ``base``: nothing abstract is left, and overrides take the same calls.

    Constructors are left out: who calls them knows the class.

    Attributes:
        ours: Class, as ``module:Class``.
        base: Class, as ``module:Class``.
    """

    ours: str
    base: str

    @property
    def name(self) -> str:
        return f"implements {self.base.partition(':')[2]}"

    def check(self) -> str | None:
        ours, base = resolve(self.ours), resolve(self.base)
        if not issubclass(ours, base):
            return f"{ours.__name__} is no {base.__name__}"
        abstract = getattr(ours, "__abstractmethods__", ())
        problems = [f"{name} is abstract" for name in sorted(abstract)]
        for name, theirs in inspect.getmembers(base, inspect.isfunction):
            override = getattr(ours, name)
            if override is theirs or name == "__init__":
                continue
            if why := mismatch(override, theirs):
                problems.append(f"{name}: {why}")
        return "; ".join(problems) or None


@dataclass(frozen=True, kw_only=True)
class Serves(Hook):
    """Our object stands at ``self.<attribute>`` of ``owner``, whose methods call it.

    Attributes:
        owner: Class, as ``module:Class``.
        attribute: Where it looks for our object.
        ours: Class of our object, as ``module:Class``.
        at_least: Methods that must be called; the object would be useless without.
    """

    owner: str
    attribute: str
    ours: str
    at_least: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.owner.partition(':')[2]} calls self.{self.attribute}"

    def check(self) -> str | None:
        ours = resolve(self.ours)
        calls = calls_on(resolve(self.owner), self.attribute)
        names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        problems = [f"{name} is not called" for name in self.at_least if name not in names]
        for call in calls:
            assert isinstance(call.func, ast.Attribute)
            if why := self._unfit(ours, call):
                problems.append(f"`{ast.unparse(call)}`: {why}")
        return "; ".join(dict.fromkeys(problems)) or None

    @staticmethod
    def _unfit(ours: type, call: ast.Call) -> str | None:
        assert isinstance(call.func, ast.Attribute)
        method = getattr(ours, call.func.attr, None)
        if method is None:
            return f"{ours.__name__} has no {call.func.attr}"
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        try:
            inspect.signature(method).bind(ours, *call.args, **dict.fromkeys(keywords))
        except TypeError as error:
            return f"{ours.__name__}.{call.func.attr}{inspect.signature(method)}: {error}"
        return None


@dataclass(frozen=True, kw_only=True)
class Shared(Hook):
    """Either their scheduler calls a method of the connector, or ours does, by version.

    Attributes:
        base: Their scheduler, as ``module:Class``.
        method: Of the connector.
        since: Constant of `epd_portable.vllm_plugin.compat`: from here on theirs does.
        once: The method must not be called by both.
    """

    base: str
    method: str
    since: str
    once: bool

    @property
    def name(self) -> str:
        return f"{self.base.partition(':')[2]} calls {self.method} from {self.since} on"

    def check(self) -> str | None:
        from epd_portable.vllm_plugin import compat

        calls = calls_on(resolve(self.base), "ec_connector")
        theirs = any(ast.unparse(call.func).endswith(f".{self.method}") for call in calls)
        ours = compat.version() < getattr(compat, self.since)
        if not theirs and not ours:
            return "neither side calls it"
        return "both sides call it" if self.once and theirs and ours else None

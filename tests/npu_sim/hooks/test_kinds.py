"""A hook that is renamed, moved or changed is found; on classes made for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_sim.hooks import kinds
from tests.npu_sim.hooks.kinds import Hook

HERE = __name__


class Cache:
    def allocate(self, request: Any, index: int) -> None:
        raise NotImplementedError


class SmallCache:
    def allocate(self, request: Any) -> None:
        raise NotImplementedError


class Engine:
    """What an engine's class looks like."""

    declared: int

    def __init__(self) -> None:
        self.cache = Cache()

    def step(self, output: Any, more: Any = None) -> None:
        self._encode(output)

    def _encode(self, output: Any) -> None:
        self.cache.allocate(output, 1)
        save(output)

    def renamed(self) -> None:
        raise NotImplementedError


class Ours(Engine):
    def step(self, output: Any, *args: Any, **kwargs: Any) -> None:
        super().step(output, *args, **kwargs)


class Narrow(Engine):
    def step(self, output: Any) -> None:
        super().step(output)


class Wide(Engine):
    def step(self, output: Any, more: Any, extra: Any) -> None:
        super().step(output, more)


class Factory:
    def by_name(self) -> Any:
        return Maker(config=1)

    def by_position(self) -> Any:
        return Maker(1)


Maker = dict


def save(output: Any) -> None:
    raise NotImplementedError


ENGINE, OURS = f"{HERE}:Engine", f"{HERE}:Ours"
SIZED = "collections.abc:Sized"


def calls(form: str) -> Hook:
    return kinds.calls("us", form)[0]


def attribute(name: str) -> Hook:
    return kinds.attributes("us", ENGINE, name)[0]


def implements(ours: str) -> Hook:
    return kinds.implements("us", f"{HERE}:{ours}", ENGINE)


def order(classes: str) -> Hook:
    return kinds.order("us", OURS, classes)


def reaches(method: str) -> Hook:
    return kinds.reaches("us", OURS, method, "save")[0]


def reads(expression: str) -> Hook:
    return kinds.reads("us", ENGINE, "_encode", expression)


def by_name(method: str) -> Hook:
    return kinds.called_by_name("us", f"{HERE}:Factory.{method}", "Maker")


def serves(ours: str, at_least: str = "allocate") -> Hook:
    return kinds.serves("us", ENGINE, "cache", f"{HERE}:{ours}", at_least)


@pytest.mark.parametrize(
    "hook",
    [
        calls(f"{ENGINE}.step(self, x)"),
        calls(f"{ENGINE}.step(self, x, more=)"),
        attribute("declared"),
        attribute("cache"),
        implements("Ours"),
        order("Ours Engine"),
        kinds.provides("us", ENGINE, "step", "Engine"),
        reaches("step"),
        reads("self.cache.allocate"),
        by_name("by_name"),
        serves("Cache"),
    ],
    ids=lambda hook: hook.name,
)
def test_matching_hook_has_no_problem(hook: Hook) -> None:
    assert hook.problem() is None


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (calls(f"{ENGINE}.gone(self)"), "Engine has no gone"),
        (calls("engine.gone:Engine.step(self)"), "module engine.gone cannot be imported"),
        (calls(f"{ENGINE}.step(self)"), "'output'"),
        (calls(f"{ENGINE}.step(self, x, other=)"), "'other'"),
        (attribute("gone"), "neither declared nor assigned"),
        (implements("Narrow"), "step: "),
        (implements("Wide"), "step: "),
        (kinds.implements("us", SIZED, SIZED), "__len__ is abstract"),
        (order("Engine Ours"), "it is Ours, Engine, object"),
        (order("Ours Gone"), "it is Ours, Engine, object"),
        (kinds.provides("us", OURS, "step", "Engine"), "it is Ours's"),
        (reaches("renamed"), "it does not, nor do the 1 methods that it calls"),
        (reaches("gone"), "has no gone"),
        (reads("self.gone"), "it does not"),
        (by_name("by_position"), "it calls `Maker(1)`"),
        (serves("SmallCache"), "too many positional"),
        (serves("Factory"), "has no allocate"),
        (serves("Cache", "free"), "free is not called"),
    ],
)
def test_problem_names_a_missing_or_changed_hook(hook: Hook, problem: str) -> None:
    assert problem in (hook.problem() or "")

"""A hook that is renamed, moved or changed is found; on classes made for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_sim.hooks.classes import Missing
from tests.npu_sim.hooks.kinds import (
    Attribute,
    CalledByName,
    Calls,
    Implements,
    Order,
    Provides,
    Reaches,
    Reads,
    Serves,
)

HERE = __name__


class Cache:
    def allocate(self, request: Any, index: int) -> None:
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


class SmallCache:
    def allocate(self, request: Any) -> None:
        raise NotImplementedError


class Factory:
    def by_name(self) -> Any:
        return Maker(config=1)

    def by_position(self) -> Any:
        return Maker(1)


Maker = dict


def save(output: Any) -> None:
    raise NotImplementedError


def test_a_call_that_fits_has_no_problem() -> None:
    assert Calls(caller="us", target=f"{HERE}:Engine.step", arguments=("self", "x")).check() is None


def test_a_method_that_was_renamed_is_named() -> None:
    with pytest.raises(Missing, match="Engine has no gone"):
        Calls(caller="us", target=f"{HERE}:Engine.gone").check()


def test_a_module_that_was_moved_is_named() -> None:
    with pytest.raises(Missing, match=r"module engine\.gone cannot be imported"):
        Calls(caller="us", target="engine.gone:Engine.step").check()


def test_a_parameter_that_we_do_not_give_is_named() -> None:
    problem = Calls(caller="us", target=f"{HERE}:Engine.step", arguments=("self",)).check()
    assert problem is not None
    assert "'output'" in problem


@pytest.mark.parametrize(
    ("attribute", "there"), [("declared", True), ("cache", True), ("gone", False)]
)
def test_an_attribute_is_declared_or_assigned(attribute: str, there: bool) -> None:
    hook = Attribute(caller="us", owner=f"{HERE}:Engine", attribute=attribute)
    assert (hook.check() is None) is there


def test_an_override_that_takes_every_call_fits() -> None:
    assert Implements(caller="us", ours=f"{HERE}:Ours", base=f"{HERE}:Engine").check() is None


@pytest.mark.parametrize("ours", ["Narrow", "Wide"])
def test_an_override_that_refuses_a_call_of_the_base_is_named(ours: str) -> None:
    problem = Implements(caller="us", ours=f"{HERE}:{ours}", base=f"{HERE}:Engine").check()
    assert problem is not None
    assert problem.startswith("step: ")


def test_an_abstract_method_that_is_left_is_named() -> None:
    base = "collections.abc:Sized"
    problem = Implements(caller="us", ours=base, base=base).check()
    assert problem == "__len__ is abstract"


def test_a_class_that_moved_in_the_order_is_seen() -> None:
    assert Order(caller="us", owner=f"{HERE}:Ours", classes=("Ours", "Engine")).check() is None
    assert Order(caller="us", owner=f"{HERE}:Ours", classes=("Engine", "Ours")).check() is not None
    assert Order(caller="us", owner=f"{HERE}:Ours", classes=("Ours", "Gone")).check() is not None


def test_a_method_that_is_overridden_on_the_way_is_seen() -> None:
    def hook(owner: str) -> str | None:
        return Provides(
            caller="us", owner=f"{HERE}:{owner}", method="step", provider="Engine"
        ).check()

    assert hook("Engine") is None
    assert hook("Ours") == "it is Ours's"


def test_a_call_is_followed_through_methods_of_the_object() -> None:
    def hook(method: str) -> str | None:
        return Reaches(caller="us", owner=f"{HERE}:Ours", method=method, callee="save").check()

    assert hook("step") is None
    assert hook("renamed") == "it does not, nor do the 1 methods that it calls"


@pytest.mark.parametrize(
    ("expression", "read"), [("self.cache.allocate", True), ("self.gone", False)]
)
def test_what_is_not_read_any_more_is_seen(expression: str, read: bool) -> None:
    hook = Reads(caller="us", owner=f"{HERE}:Engine", method="_encode", expression=expression)
    assert (hook.check() is None) is read


def test_what_is_no_longer_given_by_name_is_seen() -> None:
    def hook(method: str) -> str | None:
        source = f"{HERE}:Factory.{method}"
        return CalledByName(caller="us", source=source, callee="Maker").check()

    assert hook("by_name") is None
    assert hook("by_position") == "it calls `Maker(1)`"


@pytest.mark.parametrize(
    ("ours", "problem"),
    [("Cache", None), ("SmallCache", "too many positional"), ("Factory", "has no allocate")],
)
def test_a_call_that_our_object_does_not_take_is_seen(ours: str, problem: str | None) -> None:
    found = Serves(
        caller="us",
        owner=f"{HERE}:Engine",
        attribute="cache",
        ours=f"{HERE}:{ours}",
        at_least=("allocate",),
    ).check()
    assert (found is None) is (problem is None)
    assert (problem or "") in (found or "")


def test_an_object_that_is_not_called_any_more_is_seen() -> None:
    found = Serves(
        caller="us",
        owner=f"{HERE}:Engine",
        attribute="cache",
        ours=f"{HERE}:Cache",
        at_least=("free",),
    ).check()
    assert found == "free is not called"

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.runners.second import OrderingSecondRunnerMixin, SecondRunnerMixin


class Runner:
    """A second model runner that notes what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.epd = self
        self.encoder_cache = SimpleNamespace(
            encoder_outputs={},
            mm_features={"a": [SimpleNamespace(identifier="x"), SimpleNamespace(identifier="y")]},
        )
        self.model_state: Any = None
        self.traced: list[tuple[str, dict[str, Any]]] = []

    def begin_step(self, metadata: object, encoder_cache: dict[str, Any]) -> None:
        assert encoder_cache is self.encoder_cache.encoder_outputs
        self.calls.append(("orders", metadata))

    def encoding(self, items: list[str]) -> Any:
        self.traced.append(("encoding", {"items": items}))
        return nullcontext()

    def trace(self, event: str, **fields: object) -> None:
        self.traced.append((event, fields))

    def load_model(self, *args: object) -> str:
        self.model_state = SimpleNamespace(execute_mm_encoder=self._encode)
        return "loaded"

    def _encode(self, inputs: dict[str, list[int]]) -> str:
        self.calls.append(inputs)
        return "encoded"

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> str:
        self.calls.append(("model", args, kwargs))
        return "output"


def mixed(mixin: type) -> Any:
    return type("Mixed", (mixin, Runner), {})()


def step(metadata: object, tokens: int = 0) -> Any:
    return SimpleNamespace(
        ec_connector_metadata=metadata,
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"a": tokens},
    )


@pytest.mark.parametrize("mixin", [SecondRunnerMixin, OrderingSecondRunnerMixin])
def test_the_tokens_of_a_step_are_traced_but_not_those_of_a_profile(mixin: type) -> None:
    runner = mixed(mixin)
    assert runner.execute_model(step("metadata", 3), "kept", flag=True) == "output"
    runner.execute_model(step("metadata", 0))
    runner.execute_model(step(None, 7))
    assert runner.traced == [("step", {"tokens": {"a": 3}})]
    assert ("model", ("kept",), {"flag": True}) in runner.calls


def test_the_items_that_its_encoder_computes_are_traced() -> None:
    runner = mixed(SecondRunnerMixin)
    assert runner.load_model() == "loaded"
    assert runner.model_state.execute_mm_encoder({}) == "encoded"
    assert runner.traced == []
    assert runner.model_state.execute_mm_encoder({"a": [1, 0]}) == "encoded"
    items = {"items": ["y", "x"]}
    assert runner.traced == [("encoding", items)]
    assert runner.calls == [{}, {"a": [1, 0]}]


@pytest.mark.parametrize("tokens", [0, 3])
def test_where_vllm_has_no_hook_orders_are_submitted_before_the_step(tokens: int) -> None:
    runner = mixed(OrderingSecondRunnerMixin)
    runner.execute_model(step("metadata", tokens))
    runner.execute_model(step(None, 3))
    assert [call[0] for call in runner.calls] == ["orders", "model", "model"]


def test_where_vllm_has_one_orders_are_left_to_it() -> None:
    runner = mixed(SecondRunnerMixin)
    runner.execute_model(step("metadata", 3))
    assert [call[0] for call in runner.calls] == ["model"]

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.runners.first import EncoderRunnerMixin, PDRunnerMixin
from epd_portable.runners.second import OrderingSecondRunnerMixin, SecondRunnerMixin


class Metadata(str):
    __slots__ = ("media",)

    def __new__(cls) -> Metadata:
        made = super().__new__(cls, "metadata")
        made.media: list[Any] = []
        return made


@dataclass
class Step:
    total_num_scheduled_tokens: int = 0
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    ec_connector_metadata: Metadata = field(default_factory=Metadata)


@dataclass
class Output:
    ec_connector_output: Any = None


class Noting:
    """Notes what a mixin tells the connector, and what a model runner is called for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.outputs: dict[str, Any] = {}
        self.epd = self
        self.report: object = None
        self.traced: list[tuple[str, dict[str, object]]] = []
        turns = SimpleNamespace(
            take_turn=lambda: self.calls.append("turn"), end_turn=lambda: self.calls.append("over")
        )
        self.encoder = SimpleNamespace(turns=turns)

    def begin_step(self, metadata: object, encoder_cache: dict[str, Any]) -> None:
        assert encoder_cache is self.outputs
        self.calls.append(("begin", metadata))

    def encoding(self, items: list[str]) -> Any:
        self.traced.append(("encoding", {"items": items}))
        return suppress(MemoryError)

    def trace(self, event: str, **fields: object) -> None:
        self.traced.append((event, fields))

    def end_step(self) -> object:
        self.calls.append("end")
        return self.report


class Runner(Noting):
    """A model runner whose outputs are shared, as vLLM's are."""

    shared = Output()

    def __init__(self) -> None:
        super().__init__()
        self.encoder_cache = self.outputs
        self.requests: dict[str, Any] = {}

    def sample_tokens(self, structure: object) -> object:
        self.calls.append(structure)
        return "tokens"

    def execute_model(self, scheduler_output: Step, extra: object = None) -> Output:
        self.calls.append(("model", extra))
        return self.shared

    def _execute_mm_encoder(self, scheduler_output: Step) -> list[str]:
        self.calls.append(scheduler_output.scheduled_encoder_inputs)
        return [
            f"{request_id}{input_id}"
            for request_id, input_ids in scheduler_output.scheduled_encoder_inputs.items()
            for input_id in input_ids
        ]


@dataclass
class Item:
    """An item as vLLM describes it, with its place in the prompt."""

    size: int

    @property
    def identifier(self) -> str:
        return ""

    @property
    def mm_position(self) -> Item:
        return self

    def get_num_embeds(self) -> int:
        return self.size


@dataclass
class Request:
    mm_features: list[Item]


class SecondRunner(Noting):
    def __init__(self) -> None:
        super().__init__()
        features = [SimpleNamespace(identifier=name) for name in "xy"]
        self.encoder_cache = SimpleNamespace(
            encoder_outputs=self.outputs, mm_features={"a": features}
        )
        self.model_state: Any = None

    def load_model(self, *args: object) -> str:
        self.model_state = SimpleNamespace(execute_mm_encoder=self._encode)
        return "loaded"

    def _encode(self, inputs: dict[str, list[int]]) -> str:
        self.calls.append(inputs)
        return "encoded"

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> str:
        self.calls.append(("model", args, kwargs))
        return "output"


def mixed(mixin: type, runner: type = Runner) -> Any:
    return type("Mixed", (mixin, runner), {})()


CASES = [(EncoderRunnerMixin, 0), (EncoderRunnerMixin, 3), (PDRunnerMixin, 0)]
"""Steps whose end vLLM does not ask the connector for."""


@pytest.mark.parametrize(("mixin", "tokens"), CASES)
def test_the_connector_hears_of_the_begin_and_the_end_of_a_step(mixin: type, tokens: int) -> None:
    runner = mixed(mixin)
    output = runner.execute_model(Step(total_num_scheduled_tokens=tokens), extra="kept")
    assert output is Runner.shared
    assert runner.calls == [("begin", "metadata"), ("model", "kept"), "end"]


@pytest.mark.parametrize(("mixin", "tokens"), CASES)
def test_a_report_is_attached_to_a_copy_of_the_output(mixin: type, tokens: int) -> None:
    runner = mixed(mixin)
    runner.report = "ended"
    output = runner.execute_model(Step(total_num_scheduled_tokens=tokens))
    assert output.ec_connector_output == "ended"
    assert Runner.shared.ec_connector_output is None


def test_a_step_that_computes_and_samples_takes_one_turn() -> None:
    runner = mixed(PDRunnerMixin)
    step = Step(total_num_scheduled_tokens=3)
    assert runner.execute_model(step, extra="kept") is Runner.shared
    computed = [("begin", "metadata"), "turn", ("model", "kept")]
    assert runner.calls == [*computed, "over"], "nothing is sampled"
    runner.calls.clear()
    runner.shared = None
    assert runner.execute_model(step, extra="kept") is None
    assert runner.sample_tokens("grammar") == "tokens"
    assert runner.calls == [*computed, "grammar", "over"]


def test_a_step_that_fails_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = mixed(PDRunnerMixin)
    monkeypatch.setattr(Runner, "execute_model", fail)
    with pytest.raises(MemoryError):
        runner.execute_model(Step(total_num_scheduled_tokens=3))
    assert runner.calls == [("begin", "metadata"), "turn", "over"]


@pytest.mark.parametrize("mixin", [EncoderRunnerMixin, PDRunnerMixin])
def test_the_encoder_runs_as_it_would_without_us(mixin: type) -> None:
    runner = mixed(mixin)
    runner.requests = {"a": Request([Item(60), Item(60)])}
    assert runner._execute_mm_encoder(Step()) == []
    assert runner._execute_mm_encoder(Step(scheduled_encoder_inputs={"a": [0, 1]})) == ["a0", "a1"]
    assert runner.calls == [{}, {"a": [0, 1]}]
    items = {"items": ["", ""]}
    assert runner.traced == [("encoding", items)]


@pytest.mark.parametrize("mixin", [EncoderRunnerMixin, PDRunnerMixin])
def test_step_continues_without_an_output_the_connector_allows(
    mixin: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = mixed(mixin)
    runner.requests = {"a": Request([Item(60)])}
    monkeypatch.setattr(Runner, "_execute_mm_encoder", fail)
    assert runner._execute_mm_encoder(Step(scheduled_encoder_inputs={"a": [0]})) == []


def fail(*_: object) -> None:
    raise MemoryError


@dataclass
class Media:
    request_id: str

    def put(self, features: list[Any]) -> None:
        features[0] = "with media"


@pytest.mark.parametrize("mixin", [PDRunnerMixin, SecondRunnerMixin])
def test_runner_has_media_before_its_step_encodes(mixin: type) -> None:
    features: list[Any] = ["bare"]
    runner = mixed(mixin, SecondRunner if mixin is SecondRunnerMixin else Runner)
    if mixin is SecondRunnerMixin:
        runner.encoder_cache.mm_features["a"] = features
    else:
        runner.requests["a"] = SimpleNamespace(mm_features=features)
    planned = Step(total_num_scheduled_tokens=3, num_scheduled_tokens={"a": 3})
    planned.ec_connector_metadata.media.append(Media("a"))
    runner.execute_model(planned)
    assert features == ["with media"]


def step(metadata: object, tokens: int = 0) -> Any:
    return SimpleNamespace(
        ec_connector_metadata=metadata,
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"a": tokens},
    )


@pytest.mark.parametrize("mixin", [SecondRunnerMixin, OrderingSecondRunnerMixin])
def test_tokens_of_step_are_traced_but_not_those_of_profile(mixin: type) -> None:
    runner = mixed(mixin, SecondRunner)
    assert runner.execute_model(step(Metadata(), 3), "kept", flag=True) == "output"
    runner.execute_model(step(Metadata(), 0))
    runner.execute_model(step(None, 7))
    assert runner.traced == [("step", {"tokens": {"a": 3}})]
    assert ("model", ("kept",), {"flag": True}) in runner.calls


def test_the_items_that_its_encoder_computes_are_traced() -> None:
    runner = mixed(SecondRunnerMixin, SecondRunner)
    assert runner.load_model() == "loaded"
    assert runner.model_state.execute_mm_encoder({}) == "encoded"
    assert runner.traced == []
    assert runner.model_state.execute_mm_encoder({"a": [1, 0]}) == "encoded"
    items = {"items": ["y", "x"]}
    assert runner.traced == [("encoding", items)]
    assert runner.calls == [{}, {"a": [1, 0]}]


@pytest.mark.parametrize("tokens", [0, 3])
def test_orders_are_submitted_before_the_step_without_vllms_hook(tokens: int) -> None:
    runner = mixed(OrderingSecondRunnerMixin, SecondRunner)
    runner.execute_model(step(Metadata(), tokens))
    runner.execute_model(step(None, 3))
    assert [call[0] for call in runner.calls] == ["begin", "model", "model"]


def test_orders_are_left_to_vllms_hook() -> None:
    runner = mixed(SecondRunnerMixin, SecondRunner)
    runner.execute_model(step(Metadata(), 3))
    assert [call[0] for call in runner.calls] == ["model"]

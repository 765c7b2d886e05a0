from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from epd_portable.runners.encoder import EncoderRunnerMixin
from epd_portable.runners.pd import PDRunnerMixin


@dataclass
class Step:
    total_num_scheduled_tokens: int = 0
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    ec_connector_metadata: str = "metadata"


@dataclass
class Output:
    ec_connector_output: Any = None


class Runner:
    """A model runner that notes what is called; its outputs are shared, as vLLM's are."""

    shared = Output()

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.encoder_cache: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}
        self.epd = self
        self.report: object = None

    def begin_step(self, metadata: object, encoder_cache: dict[str, Any]) -> None:
        assert encoder_cache is self.encoder_cache
        self.calls.append(("begin", metadata))

    def end_step(self) -> object:
        self.calls.append("end")
        return self.report

    def execute_model(self, scheduler_output: Step, extra: object = None) -> Output:
        self.calls.append(("model", extra))
        return self.shared

    def _execute_mm_encoder(self, scheduler_output: Step) -> str:
        return "outputs"


@pytest.fixture(params=[EncoderRunnerMixin, PDRunnerMixin])
def runner(request: pytest.FixtureRequest) -> Any:
    return type("Mixed", (request.param, Runner), {})()


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_hooks_are_called_around_every_step_also_without_tokens(
    runner: Any, tokens: int
) -> None:
    output = runner.execute_model(Step(total_num_scheduled_tokens=tokens), extra="kept")
    assert output is Runner.shared
    assert runner.calls == [("begin", "metadata"), ("model", "kept"), "end"]


def test_a_report_is_attached_to_a_copy_of_the_output(runner: Any) -> None:
    runner.report = "ended"
    output = runner.execute_model(Step())
    assert output.ec_connector_output == "ended"
    assert Runner.shared.ec_connector_output is None


def test_the_encoder_runs_as_it_would_without_us(runner: Any) -> None:
    assert runner._execute_mm_encoder(Step()) == "outputs"

"""What the first model runner of both kinds of instance tells the event trace."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epd_portable.runners.host import RunnerHost, StepOutput, TraceHook

    _Base = RunnerHost
else:
    _Base = object


class TracedRunner(_Base):
    """Traces the tokens of every step and the items that the encoder computes in it."""

    epd: TraceHook

    def execute_model(self, scheduler_output: StepOutput, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine."""
        if scheduler_output.total_num_scheduled_tokens:
            self.epd.trace("step", tokens=dict(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _execute_mm_encoder(self, scheduler_output: StepOutput) -> Any:
        inputs = scheduler_output.scheduled_encoder_inputs
        if not inputs:
            return super()._execute_mm_encoder(scheduler_output)
        items = [
            self.requests[request_id].mm_features[input_id].identifier
            for request_id, input_ids in inputs.items()
            for input_id in input_ids
        ]
        self.epd.trace("encode.begin", items=items)
        outputs = super()._execute_mm_encoder(scheduler_output)
        self.epd.trace("encode.end", items=items)
        return outputs


def with_report(output: Any, report: Any | None) -> Any:
    """Return what a step put out, with what the connector's worker side reports by it.

    Args:
        output: vLLM's ``ModelRunnerOutput``; one that is empty is shared between steps.
        report: vLLM's ``ECConnectorOutput``, or nothing.
    """
    if report is None:
        return output
    output = copy.copy(output)
    output.ec_connector_output = report
    return output

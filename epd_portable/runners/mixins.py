"""What both kinds of model runner do around a step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from epd_portable.log import trace

if TYPE_CHECKING:
    from epd_portable.runners.host import RunnerHost, StepOutput

    _Base = RunnerHost
else:
    _Base = object


class StepMixin(_Base):
    """Calls the connector's worker side in every step, and traces what the encoder computes.

    vLLM's V1 runner leaves the connector out of steps without tokens, and drops what the connector
    of an encode-only instance reports (0.26 to 0.33); here neither happens.
    """

    def execute_model(self, scheduler_output: StepOutput, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine between the connector's two hooks."""
        self.epd.begin_step(scheduler_output.ec_connector_metadata, self.encoder_cache)
        if scheduler_output.total_num_scheduled_tokens:
            trace("step", tokens=dict(scheduler_output.num_scheduled_tokens))
        output = super().execute_model(scheduler_output, *args, **kwargs)
        report = self.epd.end_step()
        if report is None:
            return output
        output = copy.copy(output)
        output.ec_connector_output = report
        return output

    def _execute_mm_encoder(self, scheduler_output: StepOutput) -> Any:
        inputs = scheduler_output.scheduled_encoder_inputs
        if not inputs:
            return super()._execute_mm_encoder(scheduler_output)
        items = [
            self.requests[request_id].mm_features[input_id].identifier
            for request_id, input_ids in inputs.items()
            for input_id in input_ids
        ]
        trace("encode.begin", items=items)
        outputs = super()._execute_mm_encoder(scheduler_output)
        trace("encode.end", items=items)
        return outputs

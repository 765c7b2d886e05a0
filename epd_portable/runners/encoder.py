"""The first model runner of an encode instance."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epd_portable.runners.traced import TracedRunner, with_report

if TYPE_CHECKING:
    from epd_portable.runners.host import EncodeHooks, RunnerHost, StepOutput

    _Base = RunnerHost
else:
    _Base = object


class _PartsRunner(_Base):
    """Encodes the items of a step a few at a time where more at once are no faster.

    vLLM encodes all of them before it saves the first output (0.26 to 0.33); so each leaves as soon
    as it is encoded.
    """

    epd: EncodeHooks

    def _execute_mm_encoder(self, scheduler_output: StepOutput) -> Any:
        parts = list(self._parts(scheduler_output.scheduled_encoder_inputs))
        if len(parts) < 2:
            return super()._execute_mm_encoder(scheduler_output)
        outputs: list[Any] = []
        for part in parts:
            some: Any = copy.copy(scheduler_output)
            some.scheduled_encoder_inputs = part
            outputs += super()._execute_mm_encoder(some)
        return outputs

    def _parts(self, inputs: Mapping[str, Sequence[int]]) -> Iterator[dict[str, list[int]]]:
        """Divide the items to encode, in their order, into those that are encoded together."""
        limit = self.epd.encode_together_embeds
        part: dict[str, list[int]] = {}
        size = 0
        for request_id, input_ids in inputs.items():
            features = self.requests[request_id].mm_features
            for input_id in input_ids:
                more = features[input_id].mm_position.get_num_embeds()
                if part and limit is not None and size + more > limit:
                    yield part
                    part, size = {}, 0
                part.setdefault(request_id, []).append(input_id)
                size += more
        if part:
            yield part


class EncoderRunnerMixin(TracedRunner, _PartsRunner):
    """Announces items before they are encoded, and reports the transfers that have ended.

    The encoder's outputs reach the `Sender` through vLLM's ``save_caches`` hook, right after each
    is computed. The step's orders go to it before, so that the consumer's grant comes while the
    encoder works. vLLM's V1 runner drops what the connector of an encode-only instance reports
    (0.26 to 0.33), so the report is attached to the step's output here.
    """

    epd: EncodeHooks

    def execute_model(self, scheduler_output: StepOutput, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without."""
        self.epd.submit_orders(scheduler_output.ec_connector_metadata, self.encoder_cache)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return with_report(output, self.epd.report_transfers())

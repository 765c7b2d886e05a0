"""vLLM's first model runner, whose mixins call the connector in every step.

vLLM's V1 runner leaves the connector out of steps without tokens, and drops what the connector of
an encode-only instance reports (0.26 to 0.33). What has ended is attached to the step's output
here, and workers learn of revoked grants in every step.
"""

from __future__ import annotations

import copy
from typing import Any

from epd_portable.runners.generators import mark_generators

_GPUModelRunner: Any = object
"""vLLM's, or the platform's subclass of it: the worker puts the mixins before it."""


class TracedRunner(_GPUModelRunner):
    """Traces the tokens of every step and the items that the encoder computes in it.

    Attributes:
        epd: The worker half of the connector (`epd_portable.vllm_plugin.ec_connector`); set by the
            worker before the first step.
    """

    epd: Any

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine."""
        for media in scheduler_output.ec_connector_metadata.media:
            media.put(self.requests[media.request_id].mm_features)
        if scheduler_output.total_num_scheduled_tokens:
            self.epd.trace("step", tokens=dict(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _execute_mm_encoder(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = scheduler_output.scheduled_encoder_inputs
        if not inputs:
            return super()._execute_mm_encoder(scheduler_output, *args, **kwargs)
        items = [
            self.requests[request_id].mm_features[input_id].identifier
            for request_id, input_ids in inputs.items()
            for input_id in input_ids
        ]
        with self.epd.encoding(items):
            return super()._execute_mm_encoder(scheduler_output, *args, **kwargs)
        return []  # There was no memory for them.


class EncoderRunnerMixin(TracedRunner):
    """An encode instance's: announces items before they are encoded, reports ended transfers.

    The encoder's outputs reach the `Sender` through vLLM's ``save_caches`` hook, right after each
    is computed. The step's orders go to it before, so that the consumer's grant comes while the
    encoder works.
    """

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without."""
        self.epd.begin_step(scheduler_output.ec_connector_metadata, self.encoder_cache)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return _with_report(output, self.epd.end_step())


class PDRunnerMixin(TracedRunner):
    """A PD instance's: places items that have arrived before a step computes with them.

    Every tensor-parallel rank reads the same slots, so one transfer serves all. Text before an item
    is computed while the item is on its way, so prompts are computed in parts.
    """

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without."""
        self.epd.begin_step(scheduler_output.ec_connector_metadata, self.encoder_cache)
        if scheduler_output.total_num_scheduled_tokens:
            self.epd.encoder.turns.take_turn()
            try:
                # Within it vLLM calls ``get_finished``.
                output = super().execute_model(scheduler_output, *args, **kwargs)
            except BaseException:
                self.epd.encoder.turns.end_turn()
                raise
            # Without an output vLLM calls `sample_tokens` next: that is the same step.
            if output is not None:
                self.epd.encoder.turns.end_turn()
            return output
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return _with_report(output, self.epd.end_step())

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the tokens of the step that was executed last."""
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            self.epd.encoder.turns.end_turn()

    def _update_states(self, *args: Any, **kwargs: Any) -> Any:
        # Makes the generators of new requests and the batch, before anything is drawn (0.26 to
        # 0.32); vLLM sets back those of requests that are computed in part.
        corrections = super()._update_states(*args, **kwargs)
        mark_generators(self)
        return corrections


def _with_report(output: Any, report: Any | None) -> Any:
    """Return a step's output with a report (vLLM's ``ECConnectorOutput``) attached.

    The output of an empty step is shared between steps, so a copy gets the report.
    """
    if report is None:
        return output
    output = copy.copy(output)
    output.ec_connector_output = report
    return output

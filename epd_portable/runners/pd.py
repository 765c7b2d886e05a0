"""The first model runner of a prefill+decode instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epd_portable.runners.generators import mark_generators
from epd_portable.runners.traced import TracedRunner, with_report

if TYPE_CHECKING:
    from epd_portable.runners.host import PDHooks, StepOutput


class PDRunnerMixin(TracedRunner):
    """Places items that have arrived into the encoder cache, before a step computes with them.

    vLLM's V1 runner leaves the connector out of steps without tokens (0.26 to 0.33); workers must
    hear of grants that were taken back in those too, and copies into a device begin in any step.
    Every tensor-parallel rank reads the same slots, so one transfer serves all.

    Text before an item is computed while the item is on its way, so prompts are computed in parts.
    """

    epd: PDHooks

    def execute_model(self, scheduler_output: StepOutput, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without."""
        self.epd.place_items(scheduler_output.ec_connector_metadata, self.encoder_cache)
        if scheduler_output.total_num_scheduled_tokens:
            with self.epd.turn():
                # Within it vLLM asks ``get_finished``.
                return super().execute_model(scheduler_output, *args, **kwargs)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        return with_report(output, self.epd.report_encoded())

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the tokens of the step that was executed last."""
        with self.epd.turn():
            return super().sample_tokens(*args, **kwargs)

    def _update_states(self, scheduler_output: StepOutput) -> Any:
        # Makes the generators of new requests and the batch, before anything is drawn (0.26 to
        # 0.32); vLLM sets back those of requests that are computed in part.
        corrections = super()._update_states(scheduler_output)
        mark_generators(self)
        return corrections

"""The model runner of an encode instance."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from epd_portable.runners.traced import TracedRunner

if TYPE_CHECKING:
    from epd_portable.runners.host import EncodeHooks, StepOutput


class EncoderRunnerMixin(TracedRunner):
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
        report = self.epd.report_transfers()
        if report is None:
            return output
        # vLLM shares one empty output between steps.
        output = copy.copy(output)
        output.ec_connector_output = report
        return output

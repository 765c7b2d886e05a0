"""The model runner of a prefill+decode instance."""

from __future__ import annotations

from epd_portable.runners.mixins import StepMixin


class PDRunnerMixin(StepMixin):
    """Places items that have arrived into the encoder cache before the step computes with them.

    Every tensor-parallel rank maps the same pool, so one transfer serves all ranks.
    """

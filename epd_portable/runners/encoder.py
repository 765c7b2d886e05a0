"""The model runner of an encode instance."""

from __future__ import annotations

from epd_portable.runners.mixins import StepMixin


class EncoderRunnerMixin(StepMixin):
    """Announces items before they are encoded and reports the transfers that have ended.

    The encoder's outputs reach the `Sender` through vLLM's ``save_caches`` hook, right after each
    is computed; here the step's orders go to it first, so that the consumer's grant comes while
    the encoder works.
    """

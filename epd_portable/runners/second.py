"""vLLM's second model runner, which calls the connector's hooks itself.

In every step, with tokens or without, it begins with ``start_load_caches`` or
``start_save_caches``, gives each new output to ``save_caches`` once all of the step are there, and
ends with ``get_finished`` (``gpu/ec_connector.py``, 0.28 to 0.33). What is left to do here is to
fill the event trace, and do what vLLM does not do in all versions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

_GPUModelRunner: Any = object
"""vLLM's, or the platform's subclass of it: the worker puts the mixins before it."""


class SecondRunnerMixin(_GPUModelRunner):
    """Traces the tokens of every step and the items that the encoder computes in it.

    Attributes:
        epd: As of `epd_portable.runners.first.TracedRunner`.
    """

    epd: Any

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, or of a profile, which has no metadata of ours."""
        metadata = scheduler_output.ec_connector_metadata
        if metadata is not None:
            for media in metadata.media:
                media.put(self.encoder_cache.mm_features[media.request_id])
            if scheduler_output.total_num_scheduled_tokens:
                self.epd.trace("step", tokens=dict(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load it, and watch its encoder."""
        loaded = super().load_model(*args, **kwargs)
        state = self.model_state
        encode = state.execute_mm_encoder

        def traced(inputs: dict[str, list[int]], *args: Any, **kwargs: Any) -> Any:
            if not inputs:
                return encode(inputs, *args, **kwargs)
            items = [
                self.encoder_cache.mm_features[request_id][input_id].identifier
                for request_id, input_ids in inputs.items()
                for input_id in input_ids
            ]
            with self.epd.encoding(items):
                return encode(inputs, *args, **kwargs)
            return None  # There was no memory for them.

        state.execute_mm_encoder = traced
        return loaded


class OrderingSecondRunnerMixin(SecondRunnerMixin):
    """Announces items before they are encoded, where vLLM has no hook for that (0.28 and 0.29)."""

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without, or of a profile."""
        metadata = scheduler_output.ec_connector_metadata
        if metadata is not None:
            self.epd.begin_step(metadata, self.encoder_cache.encoder_outputs)
        return super().execute_model(scheduler_output, *args, **kwargs)


class EncodeSecondRunnerMixin(SecondRunnerMixin):
    """Lets steps without tokens go on while the encoder computes.

    vLLM waits before each step until the device has read the inputs of the step before, which are
    overwritten (``input_tensor_semaphore``, 0.32 and 0.33). A step without tokens writes none, but
    would make the next wait until the encoder, queued before it, has computed.
    """

    _writes_inputs = True

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the engine, with tokens or without."""
        self._writes_inputs = scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output, *args, **kwargs)

    def input_tensor_semaphore(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Guard the buffers of inputs, in a step that writes them."""
        if not self._writes_inputs:
            return nullcontext()
        guard: AbstractContextManager[None] = super().input_tensor_semaphore(*args, **kwargs)
        return guard

"""The second model runner of an encode instance, where the platform's own is not vLLM's.

vLLM makes a runner without language model for such an instance (``MMEncoderModelRunner``, 0.29 to
0.33), on CUDA. vllm-ascend 0.30 makes a whole one, which does not start without the weights that an
encode instance leaves out: it warms up with them, and its block tables want a KV cache. Its
development branch has one over vLLM's (``NPUEncoderModelRunner``), with these block tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import ModelRunnerOutput, make_empty_encoder_model_runner_output

from epd_portable.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_GPUModelRunner: Any = object


class EncodeOnlyMixin(_GPUModelRunner):
    """Keeps the items of requests, and encodes them; ignores the rest of a step."""

    def get_kv_cache_spec(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return that there is no KV cache."""
        return {}

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Make none.

        Raises:
            EngineError: The encoder is to be adapted (LoRA), which is not modelled here.
        """
        if self.lora_config is not None:
            raise EngineError(
                "enable_lora on an encode instance with this platform's second model runner: "
                "leave it out, or set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.kv_cache_config = kv_cache_config
        self.kv_caches: list[Any] = []

    def capture_model(self, *args: Any, **kwargs: Any) -> int:
        """Return that captured graphs take no memory: there are none."""
        return 0

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = torch.empty(0, device=self.device)
        return nothing, nothing

    def _dummy_sampler_run(self, *args: Any, **kwargs: Any) -> None:
        """Sample nothing."""

    def _dummy_pooler_run(self, *args: Any, **kwargs: Any) -> None:
        """Pool nothing."""

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> ModelRunnerOutput:
        """Run one step of the engine."""
        cache = self.encoder_cache
        for request_id in scheduler_output.finished_req_ids:
            cache.remove_request(request_id)
        for mm_hash in scheduler_output.free_encoder_mm_hashes:
            cache.free_encoder_cache(mm_hash)
        for request in scheduler_output.scheduled_new_reqs:
            cache.add_request(request.req_id, request.mm_features)
        if not scheduler_output.total_num_scheduled_tokens:
            idle: ModelRunnerOutput = self.ec_connector.no_forward(scheduler_output)
            return idle
        with self.ec_connector.maybe_get_output(scheduler_output) as report:
            self.model_state.execute_mm_encoder(scheduler_output.scheduled_encoder_inputs)
        output = make_empty_encoder_model_runner_output(scheduler_output)
        return ModelRunnerOutput.with_ec_conn_output(output, report)

"""What the mixins need of the model runner that they are mixed into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class StepOutput(Protocol):
    """vLLM's ``SchedulerOutput``, as far as it is read here.

    Attributes:
        total_num_scheduled_tokens: Tokens of all requests in this step.
        num_scheduled_tokens: Tokens by request id.
        scheduled_encoder_inputs: Indices of the items to encode here, by request id.
        ec_connector_metadata: What the connector's scheduler half sends to its worker half.
    """

    @property
    def total_num_scheduled_tokens(self) -> int: ...  # noqa: D102 - above
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...  # noqa: D102 - above
    @property
    def scheduled_encoder_inputs(self) -> Mapping[str, Sequence[int]]: ...  # noqa: D102 - above
    @property
    def ec_connector_metadata(self) -> Any: ...  # noqa: D102 - above


class RunnerHost:
    """vLLM's V1 ``GPUModelRunner`` and its CPU and NPU subclasses (0.26 to 0.33).

    For the type checker only; at run time the mixins derive from ``object``.

    Attributes:
        epd: A `epd_portable.vllm_plugin.ec_connector.WorkerConnector`; set by the worker before the
            first step.
        encoder_cache: Encoder outputs ``(num_tokens, width)`` by ``mm_hash``.
        requests: Cached request states by request id, with ``mm_features`` and ``generator``.
        input_batch: vLLM's ``InputBatch``: ``req_ids`` by index, and by the same index
            ``generators``, of requests with a seed only.
    """

    epd: Any
    encoder_cache: dict[str, torch.Tensor]
    requests: Mapping[str, Any]
    input_batch: Any

    def execute_model(  # noqa: D102 - vLLM's
        self, scheduler_output: StepOutput, *args: Any, **kwargs: Any
    ) -> Any: ...
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102 - vLLM's
    def _execute_mm_encoder(self, scheduler_output: StepOutput) -> Any: ...
    def _update_states(self, scheduler_output: StepOutput) -> Any: ...


class SecondRunnerHost:
    """vLLM's second ``GPUModelRunner`` and its NPU subclass (0.28 to 0.33).

    For the type checker only; at run time the mixins derive from ``object``.

    Attributes:
        epd: A `epd_portable.vllm_plugin.ec_connector.WorkerConnector`; set by the worker before the
            first step.
        encoder_cache: vLLM's ``EncoderCache``: ``encoder_outputs`` ``(num_tokens, width)`` by
            ``mm_hash``, and ``mm_features`` by request id.
        model_state: Made by `load_model`; its ``execute_mm_encoder`` takes the indices of the items
            to encode by request id.
        ec_connector: vLLM's ``ActiveECConnector``.
        lora_config: ``None`` without adapters.
        kv_cache_config: Of the engine.
        kv_caches: One a layer.

    An encode instance's runner is vLLM's ``MMEncoderModelRunner`` where that is there; it has
    `input_tensor_semaphore` (0.32 and 0.33).
    """

    epd: Any
    encoder_cache: Any
    model_state: Any
    ec_connector: Any
    device: torch.device
    lora_config: Any
    kv_cache_config: Any
    kv_caches: list[Any]

    def load_model(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102 - vLLM's
    def execute_model(  # noqa: D102 - vLLM's
        self, scheduler_output: StepOutput, *args: Any, **kwargs: Any
    ) -> Any: ...
    def input_tensor_semaphore(self) -> Any: ...  # noqa: D102 - vLLM's

"""What the mixins need of the model runner that they are mixed into, and of the connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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


class WorkerHooks(Protocol):
    """The worker half of an instance's connector, as the mixins of its model runner call it."""

    def begin_step(self, metadata: Any, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Do what the scheduler half asks for, before the step computes.

        An encode instance begins the transfers that were ordered. In a step that computes nothing
        because something must end first, it rests until something has, but for some milliseconds
        at most. A PD instance makes items that have arrived entries of the encoder cache: in a step
        with tokens they are ready for work that is queued on the current stream afterwards.

        Args:
            metadata: ``ec_connector_metadata`` of the step.
            encoder_cache: The runner's outputs ``(num_tokens, width)`` by ``mm_hash``; is added to.
        """
        ...

    def end_step(self) -> Any | None:
        """Return what has ended (vLLM's ``ECConnectorOutput``), or ``None``.

        Called when all work of the step has been queued. An encode instance blocks until that of
        the step before is computed.
        """
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Compute while nothing is encoded in the background."""
        ...

    def encoding(self, items: Sequence[str]) -> AbstractContextManager[bool | None]:
        """Let the encoder compute some items, by ``mm_hash``.

        An encode instance that has no memory for them says so and goes on, and each is encoded by
        whoever needs it.

        Raises:
            EngineError: This instance is to encode nothing.
        """
        ...

    def trace(self, event: str, **fields: Any) -> None:
        """Record an event with the time at which the device comes to this point of its work."""
        ...


class RunnerHost:
    """vLLM's V1 ``GPUModelRunner`` and its CPU and NPU subclasses (0.26 to 0.33).

    For the type checker only; at run time the mixins derive from ``object``.

    Attributes:
        epd: Set by the worker before the first step.
        encoder_cache: Encoder outputs ``(num_tokens, width)`` by ``mm_hash``.
        requests: Cached request states by request id, with ``mm_features`` and ``generator``.
        input_batch: vLLM's ``InputBatch``: ``req_ids`` by index, and by the same index
            ``generators``, of requests with a seed only.
    """

    epd: WorkerHooks
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
        epd: Set by the worker before the first step.
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

    epd: WorkerHooks
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

"""The EC connector as vLLM sees it: a scheduler half and a worker half for either role.

Hooks by version are listed in `epd_portable.vllm_plugin.compat`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.v1.outputs import ECConnectorOutput

from epd_portable.config.instance import InstanceConfig
from epd_portable.connector.producer import TransferOrder
from epd_portable.errors import EngineError, ProtocolError
from epd_portable.platforms.traits import TRAITS
from epd_portable.runners.dispatcher import Dispatcher, EncodeItem
from epd_portable.runners.placer import Placement, Placer
from epd_portable.runners.prompt import PromptItem
from epd_portable.runners.receiver import Receiver
from epd_portable.runners.sender import Sender
from epd_portable.vllm_plugin import compat
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import encode_params, prefill_params, to_params

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from epd_portable.scheduling.encoder_cache import EncoderCacheManager

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(ECConnectorMetadata):
    """What the scheduler half sends to the worker half with each step.

    Attributes:
        orders: Encode instance: transfers whose items got room in this step.
        placements: PD instance: items that have arrived.
    """

    orders: list[TransferOrder] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)


class EPDConnector(ECConnectorBase):
    """Delegates to the collaborators of `epd_portable.runners`.

    Args:
        vllm_config: Of the engine; ``ec_connector_extra_config`` is an `InstanceConfig`.
        role: Scheduler or worker half.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        compat.check_supported(vllm_config)
        self._config = InstanceConfig.parse(
            vllm_config.ec_transfer_config.ec_connector_extra_config
        )
        self._fingerprint = compat.fingerprint(vllm_config)
        self._dispatcher: Dispatcher | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._placer: Placer | None = None

    # -- scheduler half, called by our scheduler subclass ----------------------------------------

    def attach(self, cache: EncoderCacheManager) -> None:
        """Start working with the scheduler's encoder cache."""
        if self.is_producer:
            self._dispatcher = Dispatcher(cache)
            return
        traits = TRAITS[self._config.platform]
        self._receiver = Receiver(
            self._config,
            fingerprint=self._fingerprint,
            cache=cache,
            alignment_bytes=traits.slot_alignment_bytes,
            copies=traits.needs_device_copy,
        )

    def request_arrived(self, request: Request) -> None:
        """A request was added; one without media is none of our business."""
        if not request.mm_features:
            return
        raw = compat.transfer_params(request)
        try:
            if self._dispatcher is not None and raw is not None:
                items = [
                    EncodeItem(mm_hash=feature.identifier, tensor=self._tensor(feature))
                    for feature in request.mm_features
                ]
                self._dispatcher.request_arrived(request.request_id, items, encode_params(raw))
            elif self._receiver is not None:
                params = prefill_params(raw) if raw is not None else None
                self._receiver.request_arrived(request, self._prompt_items(request), params)
        except ProtocolError as error:
            logger.error("request %s is served without transfer: %s", request.request_id, error)

    def before_schedule(self) -> None:
        """A step is about to be scheduled."""
        if self._receiver is not None:
            self._receiver.tick()

    def step_done(self) -> None:
        """The output of the oldest scheduled step has been taken in."""
        if self._receiver is not None:
            self._receiver.step_done()

    # -- scheduler half, called by vLLM ----------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Return ``False``: an item that has arrived is in the scheduler's encoder cache."""
        return False

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Tell whether the request's next token can be computed."""
        if self._receiver is None:
            return True
        return self._receiver.may_schedule(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """An item is encoded on this instance."""
        if self._receiver is not None:
            self._receiver.encoding_here(request.request_id, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the worker half must do in this step."""
        if self._dispatcher is not None:
            return StepMetadata(
                orders=self._dispatcher.take_orders(scheduler_output.num_scheduled_tokens)
            )
        assert self._receiver is not None, "the scheduler did not attach its encoder cache"
        return StepMetadata(
            placements=self._receiver.take_placements(scheduler_output.free_encoder_mm_hashes)
        )

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Take in the ids of transfers that ended."""
        if self._dispatcher is not None:
            self._dispatcher.transfers_ended(connector_output.finished_sending or ())

    def take_unavailable_requests(self) -> set[str]:
        """Return requests whose items cannot be had."""
        return self._receiver.take_unavailable() if self._receiver is not None else set()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Give up what the request awaited; never delays the freeing of its blocks."""
        if self._dispatcher is not None:
            self._dispatcher.request_finished(request.request_id)
        elif self._receiver is not None:
            outcome = self._receiver.request_finished(request.request_id)
            if outcome is not None:
                return False, to_params(outcome)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although it has no requests."""
        return self._dispatcher is not None and self._dispatcher.busy

    # -- worker half, called by our runner mixin -------------------------------------------------

    def submit_orders(
        self, metadata: StepMetadata, encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """See `epd_portable.runners.host.EncodeHooks`."""
        for order in metadata.orders:
            self._worker_sender().submit(order, encoder_cache.get(order.mm_hash))

    def report_transfers(self) -> ECConnectorOutput | None:
        """See `epd_portable.runners.host.EncodeHooks`."""
        ended = self._sender.take_ended() if self._sender is not None else None
        return ECConnectorOutput(finished_sending=ended) if ended else None

    def place_items(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """See `epd_portable.runners.host.PDHooks`."""
        if metadata.placements:
            self._worker_placer().place(metadata.placements, encoder_cache)

    # -- worker half, called by vLLM -------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Do nothing: `place_items` has placed what arrived, in steps without tokens too."""

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """An encoder output was computed."""
        if self._sender is not None:
            self._sender.output_ready(mm_hash, encoder_cache[mm_hash])

    def shutdown(self) -> None:
        """Stop threads, close sockets, remove the pool."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    # --------------------------------------------------------------------------------------------

    def _tensor(self, feature: Any) -> TensorSpec:
        width = compat.encoder_output_width(self._vllm_config, feature.modality)
        return TensorSpec(
            shape=(feature.mm_position.get_num_embeds(), width),
            dtype=compat.dtype_name(self._vllm_config),
        )

    def _prompt_items(self, request: Request) -> list[PromptItem]:
        return [
            PromptItem(
                input_id=index,
                mm_hash=feature.identifier,
                begin=feature.mm_position.offset,
                end=feature.mm_position.offset + feature.mm_position.length,
                num_embeds=feature.mm_position.get_num_embeds(),
                tensor=self._tensor(feature),
            )
            for index, feature in enumerate(request.mm_features)
        ]

    def _worker_sender(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self._config, self._fingerprint, self._platform())
        return self._sender

    def _worker_placer(self) -> Placer:
        if self._placer is None:
            platform = self._platform()
            self._placer = Placer(platform, platform.device(self._config.device_index))
        return self._placer

    def _platform(self) -> Any:
        from epd_portable.platforms import registry

        if self.role is not ECConnectorRole.WORKER:
            raise EngineError("the scheduler half has no device")
        return registry.get(self._config.platform)

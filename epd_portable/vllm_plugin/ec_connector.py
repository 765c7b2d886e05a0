"""The EC connector as vLLM sees it: a scheduler half and a worker half for either role.

Hooks by version are listed in `epd_portable.vllm_plugin.compat`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import RequestStatus

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.connector.producer import TransferOrder
from epd_portable.connector.stores.entry import namespace_of
from epd_portable.connector.stores.writer import open_writer
from epd_portable.connector.worker_endpoint import WorkerEndpoint
from epd_portable.envs import EPD_COMPUTE_SHARE
from epd_portable.errors import ProtocolError, UnsupportedError
from epd_portable.platforms.base import LimitsCompute
from epd_portable.platforms.traits import TRAITS
from epd_portable.runners.background import BackgroundEncoder
from epd_portable.runners.dispatcher import Dispatcher, EncodeItem
from epd_portable.runners.host_copies import HostCopies
from epd_portable.runners.metrics import PlacerMetrics, ReceiverMetrics, SenderMetrics
from epd_portable.runners.placer import Placer, WorkerOrders
from epd_portable.runners.receiver import Receiver
from epd_portable.runners.sender import Sender
from epd_portable.runners.stream_clock import StreamClock
from epd_portable.scheduling.answers import WithheldAnswers
from epd_portable.scheduling.encode_queue import EncodeQueue, StepLimits
from epd_portable.scheduling.encoder_cache import EncoderCacheManager
from epd_portable.scheduling.items import PromptItem
from epd_portable.scheduling.two_levels import HostOrders, HostReport, TwoLevelCache
from epd_portable.vllm_plugin import compat, exposition
from epd_portable.vllm_plugin.metadata import ItemMetadata
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.messages import LoadReport
from epd_portable.wire.params import encode_params, prefill_params, to_params

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from epd_portable.platforms.base import Platform

logger = logging.getLogger(__name__)

ParamsT = TypeVar("ParamsT")

_REST_S = 0.005
"""vLLM steps every millisecond while a request waits; a new one waits no longer than this."""
_LINGER_S = 2.0
"""vLLM kills an engine that has not ended 5 s after it was told to."""


@dataclass
class StepMetadata(ECConnectorMetadata):
    """What the scheduler half sends to the worker half with each step.

    Attributes:
        orders: Encode instance: transfers whose items got room in this step.
        step: Encode instance on a device: the number of a step that computes, from 1; 0 otherwise.
        rests: Encode instance: there is nothing to do until a transfer has ended, or a step is
            computed.
        copies: Encode instance: what becomes of the copies in host memory.
        receipts: PD instance: items that have arrived, grants that were taken back.
    """

    orders: list[TransferOrder] = field(default_factory=list)
    step: int = 0
    rests: bool = False
    copies: HostOrders = field(default_factory=HostOrders)
    receipts: WorkerOrders = field(default_factory=WorkerOrders)


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
        if not self._config.can_encode:
            compat.check_metadata()
        self._fingerprint = compat.fingerprint(vllm_config)
        self._namespace = namespace_of(self._config, lambda: compat.stored_as(vllm_config))
        exposition.publish()
        self._dispatcher: Dispatcher | None = None
        self._levels: TwoLevelCache | None = None
        self._queue: EncodeQueue | None = None
        self.answers: WithheldAnswers[Any] = WithheldAnswers()
        self._scheduled_step = self._queued_step = 0
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._copies: HostCopies | None = None
        self._placer: Placer | None = None
        self._background: BackgroundEncoder | None = None
        self._in_background = compat.encodes_in_background(vllm_config, self._config)
        self._end: WorkerEndpoint | None = None
        self._clock: StreamClock | None = None
        self._metadata: ItemMetadata | None = None
        self._by_hooks: bool = vllm_config.use_v2_model_runner
        """vLLM's second runner calls its hooks in every step; beside the first mixins call ours."""
        self._unsettled: Container[str] = frozenset()
        self._lock: AbstractContextManager[Any] = nullcontext()

    # -- scheduler half, called by our scheduler subclass ----------------------------------------

    def attach(
        self, cache_size: int, *, lookahead: int, load: Callable[[], LoadReport]
    ) -> EncoderCacheManager:
        """Return the encoder cache that the scheduler works with from now on.

        Args:
            cache_size: In embeddings.
            lookahead: Tokens beyond those that a step computes whose items it wants.
            load: Returns how busy the engine is.
        """
        self._metadata = ItemMetadata(self._vllm_config)
        if self.is_producer:
            self._levels = TwoLevelCache(
                cache_size,
                self._config.host_cache_bytes,
                lambda request, index: self._tensor(request.mm_features[index]).nbytes,
            )
            self._dispatcher = Dispatcher(
                self._levels,
                Secret.read(self._config.secret_file),
                self._config.instance,
                self._namespace,
            )
            return self._levels
        receiver = Receiver(
            self._config,
            fingerprint=self._fingerprint,
            cache_size=cache_size,
            lookahead=lookahead,
            encode_together=TRAITS[self._config.platform].encode_together_embeds or 0,
            load=load,
            metrics=ReceiverMetrics(),
            namespace=self._namespace,
        )
        self._receiver = receiver
        self._unsettled = receiver.cache.unsettled
        self._lock = receiver.lock
        receiver.listen()
        return receiver.cache

    def exclusive(self) -> AbstractContextManager[Any]:
        """Keep messages out while the scheduler works on requests or its encoder cache."""
        return self._lock

    def make_queue(self, limits: StepLimits) -> EncodeQueue:
        """Make the queue of an encode instance, and let it say which requests may start."""
        assert self._dispatcher is not None, "the scheduler did not attach its encoder cache"
        assert self._levels is not None
        self._queue = EncodeQueue(
            self._levels, limits, self._dispatcher.kept, remember_s=self._config.wait_timeout_s
        )
        return self._queue

    def consumers(self, request_id: str) -> frozenset[str]:
        """Return whom the items of an encode request are for."""
        assert self._dispatcher is not None, "the scheduler did not attach its encoder cache"
        return self._dispatcher.consumers(request_id)

    def request_arrived(self, request: Request) -> None:
        """A request was added; one without media is none of our business."""
        if not request.mm_features:
            return
        raw = compat.transfer_params(request)
        if self._dispatcher is not None and raw is not None:
            asked = self._read(encode_params, request, raw)
            if asked is not None:
                items = self._encode_items(request)
                self._dispatcher.request_arrived(request.request_id, items, asked)
        elif self._receiver is not None and getattr(request, "resumable", False):
            self._receiver.session_arrived(request)
        elif self._receiver is not None:
            expected = self._read(prefill_params, request, raw)
            self._receiver.request_arrived(request, self._prompt_items(request), expected)

    def before_schedule(self) -> None:
        """A step is about to be scheduled."""
        if self._receiver is not None:
            self._receiver.before_step()

    def rest(self, timeout_s: float) -> None:
        """See `Receiver.rest`."""
        if self._receiver is not None:
            self._receiver.rest(timeout_s)

    def take_woken(self) -> list[str]:
        """See `Receiver.take_woken`."""
        return self._receiver.take_woken() if self._receiver is not None else []

    def take_sleepers(self) -> list[str]:
        """See `Receiver.take_sleepers`."""
        return self._receiver.take_sleepers() if self._receiver is not None else []

    def step_done(self) -> None:
        """The output of the oldest scheduled step has been taken in."""
        if self._receiver is not None:
            self._receiver.step_done()

    # -- scheduler half, called by vLLM ----------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Return ``False``: an item that has arrived is in the scheduler's encoder cache."""
        return False

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Tell whether the request's next token can be computed, or its items be encoded."""
        if request.request_id not in self._unsettled:
            # Asked of every request in every step, and so for almost all while they decode.
            return self._queue is None or self._queue.may_start(request.request_id)
        assert self._receiver is not None
        running = request.status is RequestStatus.RUNNING
        return self._receiver.may_schedule(request.request_id, num_computed_tokens, running=running)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """An item is encoded on this instance."""
        if self._receiver is not None:
            self._receiver.encoding_here(request.request_id, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the worker half must do in this step."""
        if self._dispatcher is not None:
            assert self._levels is not None
            computes = scheduler_output.total_num_scheduled_tokens > 0
            waiting = self._queue is not None and not self._queue.is_empty
            return StepMetadata(
                orders=self._dispatcher.take_orders(scheduler_output.num_scheduled_tokens),
                copies=self._levels.take_orders(),
                step=self._next_step() if computes else 0,
                rests=not computes and (bool(self.answers) or (self._dispatcher.busy and waiting)),
            )
        assert self._receiver is not None, "the scheduler did not attach its encoder cache"
        receipts = self._receiver.take_orders(
            scheduler_output.free_encoder_mm_hashes,
            computes=scheduler_output.total_num_scheduled_tokens > 0,
        )
        return StepMetadata(receipts=receipts)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Take in the ids of transfers that ended, and which steps have been computed."""
        if self._dispatcher is not None:
            self._dispatcher.transfers_ended(connector_output.finished_sending or ())
            names = connector_output.finished_recving or ()
            for step in filter(str.isdecimal, names):
                self.answers.computed(int(step))
            assert self._levels is not None
            self._levels.take_report(HostReport.from_names(names))
        elif self._receiver is not None:
            self._receiver.encoded(connector_output.finished_recving or ())
            self._receiver.not_encoded(connector_output.finished_sending or ())

    def take_unavailable_requests(self) -> set[str]:
        """Return requests whose items cannot be obtained."""
        if self._queue is not None:
            return self._queue.take_hopeless()
        return self._receiver.take_unavailable() if self._receiver is not None else set()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Give up what the request awaited; never delays the freeing of its blocks."""
        if self._queue is not None:
            self._queue.withdraw(request.request_id)
        if self._dispatcher is not None:
            encoded = self._dispatcher.request_finished(request.request_id)
            return False, None if encoded is None else to_params(encoded)
        if self._receiver is not None:
            outcome = self._receiver.request_finished(
                request.request_id, request.num_computed_tokens
            )
            return False, None if outcome is None else to_params(outcome)
        return False, None

    # -- worker half, called by our worker and its runner's mixin --------------------------------

    @property
    def encode_together_embeds(self) -> int | None:
        """See `epd_portable.runners.host.EncodeHooks`."""
        return TRAITS[self._config.platform].encode_together_embeds

    def open_worker(self, device: torch.device, rank: int) -> int:
        """Open what the worker needs to send or receive; before the scheduler is made.

        Args:
            device: Of the worker.
            rank: Among the workers of the instance.

        Returns:
            Device memory, in bytes, that this takes.

        Raises:
            EngineError: The device does not compute in the model's dtype.
            UnsupportedError: The process cannot be kept to its share of the device.
        """
        from epd_portable.connector.copies import DeviceCopies
        from epd_portable.platforms import registry

        platform = registry.get(self._config.platform)
        compat.check_dtype(self._vllm_config, platform)
        _limit_compute(platform, device.index or 0)
        copies = DeviceCopies(platform, device.index or 0)
        if self.is_producer:
            store = open_writer(self._config, self._namespace) if rank == 0 else None
            self._sender = Sender(self._config, self._fingerprint, copies, SenderMetrics(), store)
            if self._config.host_cache_bytes:
                self._copies = HostCopies(copies)
            return 0
        self._clock = StreamClock(copies, "epd-computed")
        self._end = WorkerEndpoint(self._config, copies, rank)
        self._placer = Placer(copies, self._end, PlacerMetrics())
        return self._end.slab_bytes

    def encode_in_background(self, model: Any, device: torch.device) -> None:
        """Encode items of a PD instance beside its steps, where that is possible.

        Args:
            model: vLLM's, loaded.
            device: Of the worker.
        """
        if self._in_background:
            self._background = BackgroundEncoder(
                lambda item: compat.encode(model, item.modality, item.media, device),
                compat.encoder_modules(model),
            )

    def submit_orders(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """See `epd_portable.runners.host.EncodeHooks`."""
        assert self._sender is not None, "the worker did not open its end"
        if self._copies is not None:
            self._copies.carry_out(metadata.copies, encoder_cache)
        for order in metadata.orders:
            restored = order.mm_hash in metadata.copies.restored
            missing = self._copies is not None and self._copies.is_missing(order.mm_hash)
            output = encoder_cache.get(order.mm_hash)
            self._sender.submit(order, output, restored=restored, missing=missing)
        self._queued_step = metadata.step
        if metadata.rests:
            self._sender.rest(_REST_S)

    def report_transfers(self) -> ECConnectorOutput | None:
        """See `epd_portable.runners.host.EncodeHooks`."""
        ended, computed = self._ended()
        if not ended and not computed:
            return None
        return ECConnectorOutput(finished_sending=ended, finished_recving=computed)

    def trace(self, event: str, **fields: Any) -> None:
        """See `epd_portable.runners.host.TraceHook`."""
        clock = self._sender or self._clock
        assert clock is not None, "the worker did not open its end"
        clock.trace(event, **fields)

    def place_items(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """See `epd_portable.runners.host.PDHooks`."""
        assert self._placer is not None, "the worker did not open its end"
        self._placer.carry_out(metadata.receipts, encoder_cache)
        if self._background is not None:
            for encoding in metadata.receipts.encodings:
                self._background.submit(encoding)
            self._background.place(encoder_cache)

    def turn(self) -> AbstractContextManager[None]:
        """See `epd_portable.runners.host.PDHooks`."""
        return nullcontext() if self._background is None else self._background.turns.step()

    def report_encoded(self) -> ECConnectorOutput | None:
        """See `epd_portable.runners.host.PDHooks`."""
        failed, placed = self._take_encoded()
        if not (failed or placed):
            return None
        return ECConnectorOutput(finished_sending=failed, finished_recving=placed)

    # -- worker half, called by vLLM -------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """The step of a PD instance begins."""
        if self._by_hooks:
            self.place_items(self._step(), encoder_cache)

    def start_save_caches(
        self, *, encoder_cache: dict[str, torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        """The step of an encode instance begins (0.30 and later)."""
        if self._by_hooks:
            assert encoder_cache is not None, "vLLM gives it in all versions that call this"
            self.submit_orders(self._step(), encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """An encoder output was computed."""
        if self._sender is not None:
            self._sender.output_ready(mm_hash, encoder_cache[mm_hash])
        if self._copies is not None:
            self._copies.output_ready(mm_hash, encoder_cache[mm_hash])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return what ended by the end of a step.

        Of an encode instance the ids of transfers, and the last step that is computed. Of a PD
        instance items that were to be encoded in the background: those that could not be, and those
        that were.
        """
        if not self.is_producer:
            return self._take_encoded()
        return self._ended() if self._by_hooks else (None, None)

    def shutdown(self) -> None:
        """Stop threads, close sockets, remove the pool."""
        if self._sender is not None:
            self._sender.close(linger_s=_LINGER_S)
        receiving = (self._receiver, self._background, self._placer, self._clock, self._end)
        for part in (self._copies, *receiving):
            if part is not None:
                part.close()
        self._sender = self._copies = self._receiver = None
        self._background = self._placer = self._clock = self._end = None

    # --------------------------------------------------------------------------------------------

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _take_encoded(self) -> tuple[set[str] | None, set[str] | None]:
        if self._background is None:
            return None, None
        failed, placed = self._background.take_ended()
        return failed or None, placed or None

    def _next_step(self) -> int:
        """Return the number of a step that is computed later than it is queued; 0 elsewhere."""
        if TRAITS[self._config.platform].needs_device_copy:
            self._scheduled_step += 1
        return self._scheduled_step

    def _ended(self) -> tuple[set[str] | None, set[str] | None]:
        """Return transfers that ended; the last step that is computed, and what became of copies.

        vLLM has no field for the latter. Its field for what was received is free: nothing comes to
        an encode instance.
        """
        if self._sender is None:
            return None, None
        step, self._queued_step = self._queued_step, 0
        if step:
            self._sender.step_queued(step)
        computed = self._sender.take_computed()
        names = set() if computed is None else {str(computed)}
        if self._copies is not None:
            names |= self._copies.take_report().as_names()
        return self._sender.take_ended() or None, names or None

    def _tensor(self, feature: Any) -> TensorSpec:
        width = compat.encoder_output_width(self._vllm_config, feature.modality)
        return TensorSpec(
            shape=(feature.mm_position.get_num_embeds(), width),
            dtype=compat.dtype_name(self._vllm_config),
        )

    def _read(
        self,
        reader: Callable[[dict[str, Any]], ParamsT],
        request: Request,
        raw: dict[str, Any] | None,
    ) -> ParamsT | None:
        if raw is None:
            return None
        try:
            return reader(raw)
        except ProtocolError as error:
            logger.error("request %s is served without transfer: %s", request.request_id, error)
            return None

    def _encode_items(self, request: Request) -> list[EncodeItem]:
        assert self._metadata is not None
        return [
            EncodeItem(
                mm_hash=feature.identifier,
                tensor=self._tensor(feature),
                modality=feature.modality,
                metadata=self._metadata.of(feature),
            )
            for feature in request.mm_features
        ]

    def _prompt_items(self, request: Request) -> list[PromptItem]:
        assert self._metadata is not None
        # Of a prompt whose KV comes no item is encoded before a step is known to need it.
        beside = self._in_background and not compat.awaits_kv(request)
        return [
            PromptItem(
                input_id=index,
                mm_hash=feature.identifier,
                begin=feature.mm_position.offset,
                end=feature.mm_position.offset + feature.mm_position.length,
                num_embeds=feature.mm_position.get_num_embeds(),
                tensor=self._tensor(feature),
                modality=feature.modality,
                has_media=self._metadata.has_media(feature),
                media=feature.data if beside and feature.data else None,
            )
            for index, feature in enumerate(request.mm_features)
        ]


def _limit_compute(platform: Platform, index: int) -> None:
    """Keep this process to its share of its device, where it must do that itself."""
    share = EPD_COMPUTE_SHARE.get()
    if share is None:
        return
    if not isinstance(platform, LimitsCompute):
        raise UnsupportedError(
            f"EPD_COMPUTE_SHARE={share}: processes do not limit themselves on platform "
            f"{platform.name}; remove it"
        )
    units = platform.limit_compute(index, share)
    left = ", ".join(f"{count} {unit}" for unit, count in units.items())
    logger.info("this process computes with %s", left)

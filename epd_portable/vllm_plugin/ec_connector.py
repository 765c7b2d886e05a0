"""The EC connector that vLLM loads: one class for each role and half behind `EPDConnector`.

Hooks by version are listed in `epd_portable.vllm_plugin.compat`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorRole,
)
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import RequestStatus

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.encode.background import StepEncoder
from epd_portable.encode.dispatcher import Dispatcher
from epd_portable.encode.host_copies import HostCopies, alone
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.queue import EncodeQueue, StepLimits
from epd_portable.encode.sender import Sender
from epd_portable.encode.shared_encoder import SharedEncoder
from epd_portable.encode.store_writer import open_writer
from epd_portable.encode.two_levels import TwoLevelCache
from epd_portable.errors import EngineError
from epd_portable.items.metrics import ConsumerMetrics, SenderMetrics
from epd_portable.items.output_sample import OutputSampler, read_samples
from epd_portable.items.placer import Placer
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.items.table import ItemTable
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.cores import limit_compute
from epd_portable.transfer.stores.entry import namespace_of
from epd_portable.transfer.stream_clock import StreamClock
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.vllm_plugin import agreement, compat, exposition, overlap
from epd_portable.vllm_plugin.media_again import MediaOfWorkers
from epd_portable.vllm_plugin.reports import Kind, StepMetadata, from_names, to_names
from epd_portable.vllm_plugin.requests import (
    ItemMetadata,
    encoded_items,
    output_tensor,
    read_transfer_params,
    transfer_params,
)
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import EncodeParams, PrefillParams, is_encode_job, to_params

if TYPE_CHECKING:
    from typing import Self

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from epd_portable.platforms.base import MemoryInfo
    from epd_portable.transfer.copies import DeviceCopies

logger = logging.getLogger(__name__)

Ended = tuple[set[str] | None, set[str] | None]
"""Report of vLLM's connectors on a step: ``finished_sending``, ``finished_recving``."""

_REST_S = 0.005
"""vLLM steps every millisecond while a request waits; a new one waits no longer than this."""
_LINGER_S = 2.0
"""vLLM kills an engine that has not ended 5 s after SIGTERM."""


class EPDConnector(ECConnectorBase):
    """Makes the connector of the instance's role and the process's half.

    The hooks here do nothing: each class overrides those that concern it. All take arguments that
    newer versions of vLLM add.

    Args:
        vllm_config: Of the engine; ``ec_connector_extra_config`` is an `InstanceConfig`.
    """

    def __new__(
        cls, vllm_config: VllmConfig, role: ECConnectorRole, *args: Any, **kwargs: Any
    ) -> Self:
        """Return an object of the class for this role and half."""
        half = cls
        if cls is EPDConnector:
            half = _HALVES[vllm_config.ec_transfer_config.is_ec_producer, role]
        made: Self = super().__new__(half)
        return made

    def __init__(
        self, vllm_config: VllmConfig, role: ECConnectorRole, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, role, *args, **kwargs)
        self._config = InstanceConfig.parse(
            vllm_config.ec_transfer_config.ec_connector_extra_config
        )
        compat.check_supported(vllm_config, can_encode=self._config.can_encode)
        self._fingerprint = agreement.fingerprint(vllm_config)
        self._namespace = namespace_of(self._config, lambda: agreement.stored_as(vllm_config))
        self.overlap = overlap.overlap_of(vllm_config, self._config)
        self._opened = ExitStack()
        exposition.publish()

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Stop threads, close sockets, remove the pool."""
        self._opened.close()

    # Hooks of vLLM.

    def has_cache_item(self, identifier: str, *args: Any, **kwargs: Any) -> bool:
        """Return ``False``: an item that has arrived is in the scheduler's encoder cache."""
        return False

    def update_state_after_alloc(
        self, request: Request, index: int, *args: Any, **kwargs: Any
    ) -> None:
        """Note that an item is encoded on this instance."""

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> StepMetadata:
        """Return what the worker half must do in this step."""
        return StepMetadata()

    def start_load_caches(
        self, encoder_cache: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Begin a step of a PD instance."""

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, *args: Any, **kwargs: Any
    ) -> None:
        """Note that an encoder output was computed."""


class SchedulerConnector(EPDConnector):
    """The scheduler half: what our scheduler calls, in addition to vLLM's hooks."""

    @abstractmethod
    def attach(self, scheduler: Any) -> ItemTable:
        """Return the encoder cache that vLLM's scheduler, just made, works with from now on."""

    @abstractmethod
    def request_arrived(self, request: Request) -> None:
        """Note that a request was added to the scheduler."""


class EncodeScheduler(SchedulerConnector):
    """The scheduler half of an encode instance: a `Dispatcher` and its `EncodeQueue`.

    Attributes:
        computed_step: The last that is known to be computed, see `StepMetadata.step`.
        queue: Decides which requests may start.
    """

    queue: EncodeQueue
    _dispatcher: Dispatcher
    _cache: TwoLevelCache
    _step = 0
    computed_step = 0

    def attach(self, scheduler: Any) -> ItemTable:
        config = self._config

        def nbytes(request: Request, index: int) -> int:
            return output_tensor(self._vllm_config, request.mm_features[index]).nbytes

        self._cache = TwoLevelCache(
            scheduler.encoder_cache_manager.cache_size, config.host_cache_bytes, nbytes
        )
        self._dispatcher = Dispatcher(self._cache, Secret.read(config.secret_file))
        limits = StepLimits(
            embeddings=scheduler.max_num_encoder_input_tokens,
            together=TRAITS[config.platform].encode_together_embeds,
            tokens=scheduler.max_num_scheduled_tokens,
        )
        self.queue = EncodeQueue(
            self._cache,
            limits,
            self._dispatcher,
            remember_s=config.wait_timeout_s,
            preempt_after_s=config.wait_timeout_s / 10,
        )
        return self._cache

    def request_arrived(self, request: Request) -> None:
        """Queue a request that has items, and remember its requested transfers."""
        if not request.mm_features:
            return
        params = read_transfer_params(EncodeParams, request)
        if params is not None:
            items = encoded_items(self._vllm_config, request)
            self._dispatcher.request_arrived(request.request_id, items, params)
        consumer = self._dispatcher.consumer(request.request_id)
        self.queue.arrived(request, consumer, time.monotonic())

    def reset(self) -> None:
        """Let nothing that is on its way become an entry: the encoder cache was reset."""
        self._dispatcher.reset()

    def ensure_cache_available(
        self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the request's items may be encoded."""
        return self.queue.may_start(request.request_id)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> StepMetadata:
        computes = scheduler_output.total_num_scheduled_tokens > 0
        if computes and TRAITS[self._config.platform].needs_device_copy:
            self._step += 1  # It is computed later than it is queued.
        orders = self._dispatcher.take_orders(scheduler_output.num_scheduled_tokens)
        waits = self._step > self.computed_step or (
            self._dispatcher.busy and not self.queue.is_empty
        )
        return StepMetadata(
            orders=orders,
            preempted=self._dispatcher.preempt(self.queue.take_to_preempt()),
            copies=self._cache.take_orders(),
            step=self._step if computes else 0,
            rests=not computes and waits,
        )

    def update_connector_output(
        self, connector_output: ECConnectorOutput, *args: Any, **kwargs: Any
    ) -> None:
        """Take in what `EncodeWorker` reports."""
        sent = connector_output.finished_sending or ()
        self.queue.delivered(self._dispatcher.transfers_ended(sent))
        report = from_names(connector_output.finished_recving)
        for nbytes in report["space"]:
            self._grow(int(nbytes))
        for step in report["computed"]:
            self.computed_step = max(self.computed_step, int(step))
        self._cache.take_report(lost=report["copy lost"], missing=report["missing"])

    def take_unavailable_requests(self, *args: Any, **kwargs: Any) -> set[str]:
        """Return requests whose items can never be encoded."""
        return self.queue.take_too_large()

    def request_finished(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Drop what it waits for; never delays the freeing of its blocks."""
        self.queue.withdraw(request.request_id)
        self._dispatcher.request_finished(request.request_id)
        return False, None

    def _grow(self, nbytes: int) -> None:
        """Give the encoder cache as many embeddings as fit, of the widest that the model has."""
        before = self._cache.cache_size
        width = compat.widest_output(self._vllm_config)
        one = TensorSpec(shape=(1, width), dtype=compat.dtype_name(self._vllm_config))
        self._cache.grow(nbytes // one.nbytes)
        logger.info(
            "the encoder cache holds %d embeddings of %d bytes (vLLM's own: %d)",
            self._cache.cache_size,
            one.nbytes,
            before,
        )


class PDScheduler(SchedulerConnector):
    """The scheduler half of a PD instance.

    Attributes:
        shell: Brings items; the scheduler works under its lock.
    """

    shell: ItemShell
    requests: PrefillRequests
    encoder: SharedEncoder
    _dispatcher: Dispatcher

    def attach(self, scheduler: Any) -> ItemTable:
        self._metadata = ItemMetadata(self._vllm_config)
        traits = TRAITS[self._config.platform]
        self.shell = ItemShell(
            self._config,
            fingerprint=self._fingerprint,
            cache_size=scheduler.encoder_cache_manager.cache_size,
            encode_together=traits.encode_together_embeds,
            metrics=ConsumerMetrics(),
            namespace=self._namespace,
        )
        # What a drafter reads ahead (0.30 on; before, only EAGLE did, one token).
        lookahead = getattr(scheduler, "num_prefill_lookahead", int(scheduler.use_eagle))
        self.requests = PrefillRequests(
            self._config, self.shell, lookahead=lookahead, min_start_tokens=traits.min_start_tokens
        )
        self._opened.callback(self.shell.close)
        self._cache = self.shell.cache
        secret = Secret.read(self._config.secret_file)
        self._dispatcher = Dispatcher(self._cache, secret)
        self.encoder = SharedEncoder(self._dispatcher, self.requests, self._cache)
        self._media = MediaOfWorkers(scheduler.requests)
        return self._cache

    def reset(self) -> None:
        """Let nothing that is on its way become an entry: the encoder cache was reset."""
        self._dispatcher.reset()
        self.shell.reset()

    def job_arrived(self, request: Request) -> bool:
        """Take a request in if it is an encode job: vLLM's scheduler is not to see it then."""
        if not (request.mm_features and is_encode_job(transfer_params(request))):
            return False
        params = read_transfer_params(EncodeParams, request)
        if params is None:
            return False
        self._dispatcher.request_arrived(
            request.request_id, encoded_items(self._vllm_config, request), params
        )
        encodes = self._config.can_encode and request.lora_request is None
        items = self._metadata.prompt_items(request, with_media=encodes)
        self.encoder.arrived(request.request_id, items)
        return True

    def request_arrived(self, request: Request) -> None:
        """Expect the items of a request."""
        if not request.mm_features:
            return
        if getattr(request, "resumable", False):
            self.requests.part_arrived(request.request_id)
        else:
            params = read_transfer_params(PrefillParams, request)
            # Of a prompt whose KV comes no item is encoded before a step is known to need it.
            in_background = self.overlap != "none" and not compat.awaits_kv(request)
            items = self._metadata.prompt_items(request, with_media=in_background)
            self.requests.arrived(request.request_id, items, params)

    def ensure_cache_available(
        self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the request's next token can be computed."""
        if request.request_id not in self._cache.incomplete:
            return True  # Called for every request in every step: of almost all while they decode.
        running = request.status is RequestStatus.RUNNING
        return self.requests.may_schedule(request.request_id, num_computed_tokens, running=running)

    def update_state_after_alloc(
        self, request: Request, index: int, *args: Any, **kwargs: Any
    ) -> None:
        self.requests.encoded_here(request.request_id, request.mm_features[index].identifier)
        self._media.encodes(request.request_id, index)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> StepMetadata:
        computes = scheduler_output.total_num_scheduled_tokens > 0
        receipts = self.shell.orders.take_orders(
            scheduler_output.free_encoder_mm_hashes, computes=computes
        )
        return StepMetadata(
            orders=self.encoder.take_orders(),
            receipts=receipts,
            media=self._media.missing(scheduler_output.scheduled_new_reqs),
            samples=self.requests.sampled if computes else [],
            encodes=not computes and self._cache.encodes_in_background,
        )

    def update_connector_output(
        self, connector_output: ECConnectorOutput, *args: Any, **kwargs: Any
    ) -> None:
        """Take in what `PDWorker` reports."""
        self._dispatcher.transfers_ended(connector_output.finished_sending or ())
        report = from_names(connector_output.finished_recving)
        for each in report["encoded"] - report["not encoded"]:
            self._cache.encoded(each)
        for each in report["not encoded"]:
            self._cache.not_encoded(each)
        self.requests.note_samples(read_samples(report["sample"]))

    def take_unavailable_requests(self, *args: Any, **kwargs: Any) -> set[str]:
        """Return requests whose items cannot be obtained."""
        return self.requests.take_unavailable()

    def request_finished(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return where the request's items came from; never delays the freeing of its blocks."""
        self._media.forget(request.request_id)
        outcome = self.requests.finished(request.request_id, request.num_computed_tokens)
        return False, None if outcome is None else to_params(outcome)


class WorkerConnector(EPDConnector):
    """The worker half.

    Mixins of vLLM's first model runner call it (`epd_portable.runners.first`); the second runner
    calls vLLM's hooks in every step.
    """

    _clock: StreamClock

    def __init__(
        self, vllm_config: VllmConfig, role: ECConnectorRole, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, role, *args, **kwargs)
        self._by_hooks: bool = vllm_config.use_v2_model_runner

    def open_worker(self, device: torch.device, rank: int) -> int:
        """Open what the worker needs to send or receive; before the scheduler is made.

        Args:
            rank: Among the workers of the instance.

        Returns:
            Device memory, in bytes, that this takes.

        Raises:
            EngineError: The device does not compute in the model's dtype.
            UnsupportedError: The process cannot be kept to its share of the device.
        """
        from epd_portable.platforms import registry
        from epd_portable.transfer.copies import DeviceCopies

        platform = registry.get(self._config.platform)
        compat.check_dtype(self._vllm_config, platform)
        limit_compute(platform, device.index or 0)
        return self._open(DeviceCopies(platform, device.index or 0), rank)

    @abstractmethod
    def _open(self, copies: DeviceCopies, rank: int) -> int: ...

    @abstractmethod
    def begin_step(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Carry out the orders of the scheduler half, before the step computes.

        An encode instance begins the transfers that were ordered. In a step that computes nothing
        because something must end first, it rests until something has, but for some milliseconds
        at most. A PD instance makes items that have arrived entries of the encoder cache: in a step
        with tokens they are ready for work that is queued on the current stream afterwards.

        Args:
            metadata: ``ec_connector_metadata`` of the step.
            encoder_cache: The runner's outputs ``(num_tokens, width)`` by ``mm_hash``; is added to.
        """

    @abstractmethod
    def _take_ended(self) -> Ended: ...

    def end_step(self) -> ECConnectorOutput | None:
        """Return what has ended, or ``None``.

        Called when all work of the step has been queued. An encode instance blocks until that of
        the step before is computed.
        """
        sent, received = self._take_ended()
        if not (sent or received):
            return None
        return ECConnectorOutput(finished_sending=sent, finished_recving=received)

    def get_finished(self, finished_req_ids: set[str], *args: Any, **kwargs: Any) -> Ended:
        """Return what has ended by the end of a step; `reports` has the results."""
        return self._take_ended()

    @contextmanager
    def encoding(self, items: Sequence[str]) -> Iterator[None]:
        """Let the encoder compute some items, by ``mm_hash``.

        An encode instance that has no memory for them reports it and continues, and each is encoded
        by the instance that needs it.

        Raises:
            EngineError: This instance is to encode nothing.
        """
        self.trace("encode.begin", items=items)
        yield
        self.trace("encode.end", items=items)

    def trace(self, event: str, **fields: Any) -> None:
        """Record an event with the time at which the device comes to this point of its work."""
        self._clock.trace(event, **fields)

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


class EncodeWorker(WorkerConnector):
    """The worker half of an encode instance: a `Sender`, and perhaps `HostCopies`.

    Attributes:
        memory: Returns the device's memory; `memory_before` is that without this process.
        space_bytes: Size of the encoder cache; 0 once the scheduler knows it.
    """

    memory: Callable[[], MemoryInfo]
    memory_before: MemoryInfo
    space_bytes = 0

    _sender: Sender
    _copies: HostCopies | None = None
    _queued_step = 0

    def __init__(
        self, vllm_config: VllmConfig, role: ECConnectorRole, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, role, *args, **kwargs)
        self._missing: set[str] = set()
        """Items that the scheduler takes for entries, and that are not there."""
        self._unreported: set[str] = set()

    def _open(self, copies: DeviceCopies, rank: int) -> int:
        self.memory = partial(copies.platform.memory_info, copies.index)
        self.memory_before = self.memory()
        if self._config.host_cache_bytes:
            self._copies = HostCopies(copies)
            self._opened.callback(self._copies.close)
        store = open_writer(self._config, self._namespace) if rank == 0 else None
        self._sender = Sender(self._config, self._fingerprint, copies, SenderMetrics(), store)
        self._opened.callback(self._sender.close, linger_s=_LINGER_S)
        self._clock = self._sender.clock
        return 0

    def begin_step(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        copies = metadata.copies
        # The scheduler knows of what it drops; of what it has restored it is known below.
        self._missing.difference_update(copies.dropped, copies.restored)
        if self._copies is not None:
            self._note_missing(self._copies.carry_out(copies, encoder_cache))
        for order in metadata.orders:
            self._sender.submit(
                order,
                encoder_cache.get(order.mm_hash),
                restored=order.mm_hash in copies.restored,
                missing=order.mm_hash in self._missing,
            )
        if metadata.preempted:
            self._sender.preempt(metadata.preempted)
        self._queued_step = metadata.step
        if metadata.rests:
            self._sender.progress.rest(_REST_S)

    def reset(self) -> None:
        """Let nothing that is on its way become an entry; steps drop copies in host memory."""
        self._sender.reset()
        self._missing, self._unreported = set(), set()

    def _note_missing(self, items: Iterable[str]) -> None:
        self._missing.update(items)
        self._unreported.update(items)

    @contextmanager
    def encoding(self, items: Sequence[str]) -> Iterator[None]:
        try:
            with super().encoding(items):
                yield
        except torch.OutOfMemoryError:
            logger.exception("no memory to encode %s: left to who needs them", ", ".join(items))
            for mm_hash in items:
                self._sender.not_encoded(mm_hash)
            self._note_missing(items)

    def start_save_caches(
        self, *args: Any, encoder_cache: dict[str, torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Begin a step (0.30 and later)."""
        if self._by_hooks:
            assert encoder_cache is not None, "vLLM gives it in all versions that call this"
            self.begin_step(self._step_metadata(), encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, *args: Any, **kwargs: Any
    ) -> None:
        self._missing.discard(mm_hash)
        # A part that stays long would keep all that was computed with it, which is not counted.
        output = encoder_cache[mm_hash] = alone(encoder_cache[mm_hash])
        self._sender.output_ready(mm_hash, output)
        if self._copies is not None:
            self._copies.output_ready(mm_hash, output)

    def get_finished(self, finished_req_ids: set[str], *args: Any, **kwargs: Any) -> Ended:
        """See `WorkerConnector`; the first runner drops it, and its mixin calls `end_step`."""
        return self._take_ended() if self._by_hooks else (None, None)

    def _take_ended(self) -> Ended:
        step, self._queued_step = self._queued_step, 0
        progress = self._sender.progress
        if step:
            progress.step_queued(step)
        computed = progress.take_computed()
        report: dict[Kind, set[str]] = {} if computed is None else {"computed": {str(computed)}}
        if self.space_bytes:
            report["space"], self.space_bytes = {str(self.space_bytes)}, 0
        report["missing"], self._unreported = self._unreported, set()
        if self._copies is not None:
            report["copy lost"] = self._copies.take_lost()
        return progress.take_ended() or None, to_names(report) or None


class PDWorker(WorkerConnector):
    """The worker half of a PD instance: a `Placer`, an encoder, and a `Sender` on request.

    Attributes:
        encoder: Knows when steps compute.
    """

    _placer: Placer
    encoder: StepEncoder
    _sender: Sender | None = None

    def _open(self, copies: DeviceCopies, rank: int) -> int:
        self._copies, self._rank, self._sampler = copies, rank, OutputSampler(rank)
        endpoint = WorkerEndpoint(self._config, copies, rank)
        self._opened.callback(endpoint.close)
        self._placer = Placer(copies, endpoint)
        self._clock = self._placer.clock
        self._opened.callback(self._clock.close)
        return endpoint.slab_bytes

    def use_encoder(self, runner: Any) -> None:
        """Encode items next to the steps, where that is possible; else at their beginning."""
        self.encoder = overlap.make_encoder(
            self.overlap, runner, self._vllm_config, self._config, self._copies
        )
        self._opened.callback(self.encoder.close)

    def begin_step(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._sampler.begin_step(metadata.samples, encoder_cache)
        self._placer.carry_out(metadata.receipts, encoder_cache)
        for encoding in metadata.receipts.encodings:
            self.encoder.submit(encoding)
        self.encoder.place(encoder_cache, computes=metadata.receipts.computes)
        if metadata.orders and self._rank == 0:
            self._send(metadata.orders, encoder_cache)

    def reset(self) -> None:
        """Let nothing that is on its way become an entry: the encoder cache was reset."""
        self.encoder.reset()
        if self._sender is not None:
            self._sender.reset()

    def _send(self, orders: list[TransferOrder], encoder_cache: dict[str, torch.Tensor]) -> None:
        if self._sender is None:
            self._sender = Sender(self._config, self._fingerprint, self._copies, SenderMetrics())
            self._opened.callback(self._sender.close, linger_s=_LINGER_S)
        for order in orders:
            output = encoder_cache.get(order.mm_hash)
            if output is not None and not self._copies.platform.traits.needs_device_copy:
                output = output.clone()  # It may be a view of a slot, which a reset releases.
            self._sender.submit(order, output, missing=output is None)

    @contextmanager
    def encoding(self, items: Sequence[str]) -> Iterator[None]:
        if not self._config.can_encode:
            raise EngineError(
                f"a step of {self._config.instance} encodes {', '.join(items)}, but this instance "
                "holds no encoder: report it, with the engine's version"
            )
        self.encoder.wait()
        with super().encoding(items):
            yield

    def start_load_caches(
        self, encoder_cache: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        if self._by_hooks:
            self.begin_step(self._step_metadata(), encoder_cache)

    def _take_ended(self) -> Ended:
        failed, placed = self.encoder.take_ended()
        sent = self._sender.progress.take_ended() if self._sender is not None else set()
        samples = self._sampler.take()
        names = to_names({"encoded": placed, "not encoded": failed, "sample": samples})
        return sent or None, names or None


_HALVES: dict[tuple[bool, ECConnectorRole], type[EPDConnector]] = {
    (True, ECConnectorRole.SCHEDULER): EncodeScheduler,
    (True, ECConnectorRole.WORKER): EncodeWorker,
    (False, ECConnectorRole.SCHEDULER): PDScheduler,
    (False, ECConnectorRole.WORKER): PDWorker,
}

"""vLLM's scheduler with our connector's scheduler half, stepped as vLLM's engine core does."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import msgspec
import torch
from prometheus_client import CollectorRegistry

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.demo import MODEL_DIR
from epd_portable.errors import NoCommonPathError
from epd_portable.items.table import ItemRequest, State
from epd_portable.launch.plan.engine import CONNECTOR, SCHEDULER_CLS
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.transfer.registry import fenced_paths
from epd_portable.transfer.stores.loader import IDENTITY
from epd_portable.vllm_plugin.reports import to_names
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import Announce, AnyMessage
from epd_portable.wire.params import (
    CacheNews,
    EncodeParams,
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    to_params,
)
from tests.keyring import secret_file
from tests.kit.memory import Read, Violation, Work, Worker
from tests.kit.sizes import MAX_MODEL_LEN, PLACEHOLDER, Prompt, Sizes
from tests.kit.store import Shelf, key
from tests.unit.builders import Clock

ADDRESS = "tcp://pd:1"
OTHER = "tcp://other:1"


@dataclass
class Post:
    """Stands for `ConsumerEndpoint`, that is for sockets and shared memory."""

    fingerprint: str
    shelf: Shelf | None = None
    fence: LeaseFence = field(default_factory=LeaseFence)
    fenced_paths: frozenset[str] = fenced_paths()
    paths: dict[str, str] = field(default_factory=dict)
    """Path of each encoder; with others there is none in common."""
    inbox: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    outbox: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        received, self.inbox = self.inbox, []
        return received if self.shelf is None else received + self.shelf.loader.receive()

    def load(
        self, transfer: ExpectedTransfer, mm_hash: str, tensor: TensorSpec
    ) -> tuple[bytes, AnyMessage]:
        assert self.shelf is not None
        made = self.shelf.loader.load(transfer.transfer_id, transfer.store, mm_hash, tensor)
        return IDENTITY, made

    def send(self, identity: bytes, message: AnyMessage) -> None:
        if identity != IDENTITY:
            self.outbox.append((identity, message))
        elif self.shelf is not None:
            self.shelf.send(message)

    def choose(self, producer: PeerDescriptor) -> PathEndpoint:
        if self.shelf is not None and self.shelf.loader.is_its_own(producer):
            return producer.paths[0]
        path = self.paths.get(producer.instance)
        if path is None:
            raise NoCommonPathError(f"none to {producer.instance}")
        return PathEndpoint(path=path, address="here")

    def verify_transfer(self, announce: Announce) -> bool:
        return True

    def is_gone(self, producer: PeerDescriptor) -> bool:
        return producer.session in self.gone

    def close(self) -> None:
        """Do nothing: no resource is open."""


class Drafter:
    """vLLM's ``SpeculativeConfig``, as far as its scheduler asks: one of EAGLE's family."""

    num_speculative_tokens_per_batch_size = None
    disable_eagle_block_drop = False
    disable_lookahead_block_hashes = True

    def __init__(self, tokens: int) -> None:
        self.num_speculative_tokens = tokens
        self.max_num_new_slots_for_drafting = 0

    def use_eagle(self) -> bool:
        return True

    def use_multi_module_mtp(self) -> bool:
        return self.num_speculative_tokens > 1

    def use_eagle_block_drop(self) -> bool:
        return True

    needs_eagle_block_drop = use_eagle_block_drop

    def use_dspark(self) -> bool:
        return False

    use_dflash = uses_draft_model = use_dspark


@dataclass
class Budget:
    """vLLM's ``MultiModalBudget``, which would ask the model for sizes."""

    encoder_compute_budget: int
    encoder_cache_size: int


@functools.cache
def _base() -> tuple[Any, Any]:
    """Return vLLM's configuration of the demo model, and what all engines may share."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.structured_output import StructuredOutputManager

    instance = InstanceConfig(
        instance="prefill_decode-0",
        platform="cpu",
        control_address=ADDRESS,
        pool="epd-model",
        secret_file=secret_file(),
    )
    config = EngineArgs(
        model=str(MODEL_DIR),
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        enforce_eager=True,
        limit_mm_per_prompt={"video": 0},
        scheduler_cls=SCHEDULER_CLS,
        ec_transfer_config={
            **CONNECTOR,
            "ec_role": "ec_consumer",
            "ec_connector_extra_config": instance.model_dump(),
        },
    ).create_engine_config()
    return config, StructuredOutputManager(config)


def embed_bytes() -> int:
    """Return the bytes of one embedding."""
    return int(_base()[0].model_config.get_inputs_embeds_size()) * 4


def pool_bytes(sizes: Sizes) -> int:
    """Return the size of the receive pool: whole slots of its platform's alignment."""
    alignment = 512 if sizes.copies else 64
    return -(-sizes.pool * embed_bytes() // alignment) * alignment


def _config(sizes: Sizes) -> Any:
    config = copy.copy(_base()[0])
    for name in ("scheduler_config", "cache_config", "parallel_config", "ec_transfer_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    scheduling = config.scheduler_config
    scheduling.max_num_seqs = sizes.seats
    scheduling.max_num_batched_tokens = sizes.tokens
    scheduling.max_num_scheduled_tokens = None
    scheduling.policy = sizes.policy
    scheduling.async_scheduling = sizes.ahead
    scheduling.disable_chunked_mm_input = sizes.whole_items
    scheduling.scheduler_reserve_full_isl = sizes.reserves_all
    config.cache_config.enable_prefix_caching = sizes.prefix_caching
    config.cache_config.num_gpu_blocks = sizes.blocks
    # With several ranks items are encoded in steps, as on devices, and not beside them.
    config.parallel_config.world_size = 1 if sizes.beside else 2
    config.ec_transfer_config.ec_connector_extra_config = {
        **config.ec_transfer_config.ec_connector_extra_config,
        "platform": "cuda" if sizes.copies else "cpu",
        "pool_bytes": pool_bytes(sizes),
        "wait_timeout_s": sizes.wait_timeout_s,
        "lease_s": sizes.lease_s,
        "can_encode": sizes.can_encode,
    }
    if sizes.lookahead:
        config.speculative_config = Drafter(sizes.lookahead)
    return config


@contextmanager
def _seams(sizes: Sizes, clock: Clock, shelf: Shelf | None, made: dict[str, Any]) -> Iterator[None]:
    """Let the connector have the model's clock and post, and no thread of its own."""
    from vllm.v1.core.sched import scheduler as vllm_scheduler

    from epd_portable.items import shell as shells
    from epd_portable.items.metrics import ConsumerMetrics
    from epd_portable.vllm_plugin import agreement, ec_connector, exposition

    class ItemShell(shells.ItemShell):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made["registry"] = CollectorRegistry()
            kwargs |= {"clock": clock, "metrics": ConsumerMetrics(made["registry"])}
            super().__init__(*args, **kwargs)
            made["receiver"] = self

        def listen(self) -> None:
            """Messages are taken in when the model says so."""

    def open_post(*args: Any, fingerprint: str, **kwargs: Any) -> Post:
        made["post"] = Post(fingerprint, shelf)
        return made["post"]

    def budget(*args: Any) -> Budget:
        return Budget(max(sizes.encoder_tokens, *sizes.items.values()), sizes.cache)

    traits = {
        name: dataclasses.replace(each, min_start_tokens=sizes.min_start_tokens)
        for name, each in TRAITS.items()
    }
    patches = (
        (shells, "ConsumerEndpoint", open_post),
        (ec_connector, "ItemShell", ItemShell),
        (vllm_scheduler, "MultiModalBudget", budget),
        (exposition, "publish", lambda: None),
        (agreement, "fingerprint", lambda config: "same"),
        (ec_connector, "TRAITS", traits),
    )
    for where, name, value in patches:
        patch = mock.patch.object(where, name, value)
        patch.start()
    try:
        yield
    finally:
        mock.patch.stopall()


@dataclass
class Running:
    """A request from its arrival to its end."""

    request: Any
    prompt: Prompt
    ended: str = ""

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)


class Engine:
    """An engine core's turns: it schedules, executes, and takes in what came out.

    Args:
        sizes: Of the instance.
        rng: Decides what is left open: how late the worker is, which drafts are accepted.
        clock: Everybody's.
        worker: Makes the worker, given where requests' items are.
        note: Hears what happens, for the trace.
        shelf: The store, if there is one.
    """

    def __init__(
        self,
        sizes: Sizes,
        rng: Random,
        clock: Clock,
        worker: Worker,
        note: Callable[..., None],
        shelf: Shelf | None = None,
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from epd_portable.vllm_plugin.scheduler import make_scheduler

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(sizes.block, sha256)
        self._sampling = functools.cache(
            lambda answer: SamplingParams(max_tokens=answer, ignore_eos=True)
        )
        self._sizes, self._rng, self._clock, self._worker = sizes, rng, clock, worker
        self._seen = worker.seen
        self._note = note
        made: dict[str, Any] = {}
        with _seams(sizes, clock, shelf, made):
            self.scheduler = make_scheduler(
                vllm_config=_config(sizes),
                kv_cache_config=KVCacheConfig(
                    num_blocks=sizes.blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[
                        KVCacheGroupSpec(
                            ["layer"],
                            FullAttentionSpec(
                                block_size=sizes.block,
                                num_kv_heads=1,
                                head_size=8,
                                dtype=torch.float32,
                            ),
                        )
                    ],
                ),
                structured_output_manager=_base()[1],
                block_size=sizes.block,
                log_stats=sizes.stats,
            )
        if sizes.second:
            self.scheduler.use_v2_model_runner = True
        self.post: Post = made["post"]
        self._shell, self._registry = made["receiver"], made["registry"]
        self._flying: deque[Work] = deque()
        self._last_counts: dict[str, int] = {}
        """Tokens of the last step, by request."""
        self._unloaded = ""
        """Request whose KV was not loaded, as the next step reports."""
        self.unfinished: dict[str, Running] = {}
        self.jobs: set[str] = set()
        """Encode jobs for others that have not ended."""
        self.ended: dict[str, Running] = {}
        self.told: set[str] | None = None
        """Entries of the encoder cache, as reported to the front."""
        self._untold: set[str] = set()
        """Entries that were there before the first request of the front."""
        self.requested: list[str] = []
        """Transfers on demand that it has asked for; the world takes them."""
        self.prompt_tokens = self.tokens = self.steps = 0
        self.recomputed: set[str] = set()
        """Requests that were preempted or rolled back, or waited and lost a prefix."""
        self._reached: dict[ItemRequest, int] = {}
        self._paused: set[bool] = set()
        """Running (``True``) or waiting requests that a pause holds up."""
        self._resumed_s = 0.0
        self._expired: set[ItemRequest] = set()

    # -- what happens to it ------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        transfers: dict[str, str],
        on_demand: Collection[str] = (),
        stored: Collection[str] = (),
    ) -> None:
        """Add a request; ``transfers`` are those of its items, by name.

        ``on_demand`` are transfers, and ``stored`` those that the store is to bring.
        """
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        expected = tuple(
            ExpectedTransfer(
                transfer_id=transfer_id,
                item_uuid=name,
                media=prompt.wishes[name].media,
                on_demand=transfer_id in on_demand,
                store=key(name) if transfer_id in stored else "",
            )
            for name, transfer_id in transfers.items()
        )
        sampling = copy.copy(self._sampling(prompt.answer))
        if expected:
            if self.told is None:
                self.told, self._untold = set(), self._entries()
            params = to_params(PrefillParams(transfers=expected))
            sampling.extra_args = {"ec_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt.tokens),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self._clock.now,
            priority=prompt.priority,
            block_hasher=self._hasher,
            mm_features=[
                MultiModalFeatureSpec(
                    data=_data(prompt.wishes[name].media),
                    modality="image",
                    identifier=name,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for name, offset, length in prompt.places
            ],
        )
        self.unfinished[request_id] = Running(request, prompt)
        self.scheduler.add_request(request)

    def add_job(self, job: str, name: str, size: int) -> None:
        """Ask for an item that is encoded for another instance."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        transfer = EncodeTransfer(
            transfer_id=f"to-other-{job}",
            item_uuid=name,
            consumer=OTHER,
            proof=Secret.read(secret_file()).sign_transfer(f"to-other-{job}", name, OTHER),
        )
        sampling = copy.copy(self._sampling(1))
        params = to_params(EncodeParams(transfers=(transfer,)))
        sampling.extra_args = {"ec_transfer_params": params}
        request = Request(
            request_id=job,
            prompt_token_ids=[PLACEHOLDER] * size,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self._clock.now,
            mm_features=[
                MultiModalFeatureSpec(
                    data=_data(True),
                    modality="image",
                    identifier=name,
                    mm_position=PlaceholderRange(offset=0, length=size),
                )
            ],
        )
        self.jobs.add(job)
        self.scheduler.add_request(request)

    def abort_job(self, job: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(job, RequestStatus.FINISHED_ABORTED)
        self.jobs.discard(job)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._end(request_id, "abort")

    def reset_encoder_cache(self) -> None:
        """Reset as the engine core does: workers forget after the steps that they have."""
        self.scheduler.reset_encoder_cache()
        self._execute_all()
        self._worker.forget()

    def pause(self, mode: str) -> None:
        """Pause as the engine core does; ``mode`` is ``abort``, ``wait`` or ``keep``."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        if mode == "abort":
            gone = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            answered = {each.request_id for each in gone}
            if silent := (self.unfinished.keys() | self.jobs) - answered:
                raise Violation(f"a pause ends {sorted(silent)} without a response")
            self.jobs.clear()
            for request_id in list(self.unfinished):
                self._end(request_id, "abort")
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        self._paused = {False, True} if mode == "keep" else {False}

    def resume(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._paused, self._resumed_s = set(), self._clock.now

    def is_paused(self) -> bool:
        """Return whether a pause is complete: vLLM's engine core takes no more steps."""
        if self.scheduler.has_requests():
            return False
        while self._flying:
            self._update(self._flying.popleft(), may_invalidate=False)
        return not self.scheduler.has_requests()

    def reset_prefix_cache(self, *, running: bool) -> None:
        if running:
            self.recomputed |= {each.request_id for each in self.scheduler.running}
        self.scheduler.reset_prefix_cache(reset_running_requests=running)

    def invalidate(self, request_id: str) -> None:
        """The next step reports that the first block of a request's KV was not loaded."""
        self._unloaded = request_id

    def take_in(self) -> None:
        """Messages are taken in, as between any two of the engine's doings."""
        with self._shell.lock:
            self._shell.take_in()
        self._check_deadlines()

    # -- turns -------------------------------------------------------------------------------------

    def turn(self, meanwhile: Callable[[], None], *, may_invalidate: bool) -> None:
        """Schedule a step; take in the output of the oldest if two are scheduled.

        Args:
            meanwhile: What happens while workers execute.
            may_invalidate: KV that a request has read turns out not to be there.
        """
        rng, scheduler = self._rng, self.scheduler
        before = {each.request_id: each.num_preemptions for each in scheduler.running}
        is_busy = bool(self._last_counts and scheduler.running)
        planned = scheduler.schedule()
        self._check_starts(planned, before, is_busy=is_busy)
        self.steps += 1
        for request_id, count in before.items():
            running = self.unfinished.get(request_id)
            if running is not None and running.request.num_preemptions > count:
                self.recomputed.add(request_id)
                self._seen["requests preempted"] += 1
                self._note("preempted", request_id)
        for each in self._shell.cache.requests.values():
            if not each.running and each.num_computed_tokens < self._reached.get(each, 0):
                self.recomputed.add(each.request_id)
            self._reached[each] = each.num_computed_tokens
        work = self._work(planned)
        self._flying.append(work)
        if rng.random() < 0.4:
            self._execute_all()
        ahead = self._sizes.ahead and len(self._flying) < 2
        if ahead and planned.total_num_scheduled_tokens and rng.random() < 0.85:
            return
        meanwhile()
        self._update(self._flying.popleft(), may_invalidate)

    def _check_starts(self, planned: Any, running: Collection[str], *, is_busy: bool) -> None:
        """No request is started for a few tokens before a missing item while others compute."""
        self._last_counts = planned.num_scheduled_tokens
        held_back = self.scheduler.ec_connector.requests.held_back
        self._seen["starts held back"] += len(held_back)
        if held_back and not is_busy:
            raise Violation(f"{sorted(held_back)} are held back, and nobody computes")
        for request_id in planned.num_scheduled_tokens.keys() - running if is_busy else ():
            end = self.unfinished[request_id].request.num_computed_tokens
            begin = end - planned.num_scheduled_tokens[request_id]
            places = self.unfinished[request_id].prompt.places
            name, offset, _ = next((each for each in places if sum(each[1:]) > begin), ("", 0, 0))
            is_short = begin < end <= offset < begin + self._sizes.min_start_tokens
            if is_short and name not in self._entries() and not self._is_local(name):
                raise Violation(f"{request_id} is started for a few tokens before {name}")

    def _is_local(self, name: str) -> bool:
        return self.scheduler.encoder_cache_manager.items[name].state is State.LOCAL

    def _work(self, planned: Any) -> Work:
        reads, counts = [], planned.num_scheduled_tokens
        ahead = self._sizes.lookahead
        for request_id, count in counts.items():
            running = self.unfinished[request_id]
            self.tokens += count
            end = running.request.num_computed_tokens
            begin = end - count
            # Or tokens of the answer again, after a preemption.
            if begin < len(running.prompt.tokens) or running.request.is_prefill_chunk:
                self.prompt_tokens += count
            for name, offset, length in running.prompt.places:
                if offset < end and begin < offset + length:
                    reads.append(Read(request_id, name))
                elif ahead and offset < end + ahead and begin + ahead < offset + length:
                    reads.append(Read(request_id, name, by_drafter=True))
        encoded = [
            self.unfinished[request_id].prompt.places[index][0]
            for request_id, indices in planned.scheduled_encoder_inputs.items()
            for index in indices
        ]
        for new in planned.scheduled_new_reqs:
            self._note_hit(new.num_computed_tokens, self.unfinished[new.req_id].prompt)
        receipts = planned.ec_connector_metadata.receipts
        told = {
            "places": [each.mm_hash for each in receipts.placements],
            "forgets": list(planned.free_encoder_mm_hashes),
            "encodes": encoded,
            "encodes beside": [each.mm_hash for each in receipts.encodings],
        }
        if counts or any(told.values()):
            computed = {
                each: f"{self.unfinished[each].request.num_computed_tokens - count}+{count}"
                for each, count in counts.items()
            }
            self._note("step", computed, {what: names for what, names in told.items() if names})
        samples = {each for each in counts if not self.unfinished[each].request.is_prefill_chunk}
        return Work(planned, encoded, reads, samples)

    def _note_hit(self, hit: int, prompt: Prompt) -> None:
        """Count what kinds of prefix hits there are."""
        if not hit or not prompt.places:
            return
        ends = {offset + length for _, offset, length in prompt.places}
        if hit <= prompt.places[0][1]:
            kind = "before all items"
        elif hit >= max(ends):
            kind = "behind all items"
        elif any(offset < hit < offset + length for _, offset, length in prompt.places):
            kind = "inside an item"
        else:
            kind = "between items"
        self._seen[f"prefix hits that end {kind}"] += 1

    def _execute_all(self) -> None:
        for work in self._flying:
            if not work.is_done:
                self._worker.execute(work)

    def _update(self, work: Work, may_invalidate: bool) -> None:
        from vllm.v1.outputs import ECConnectorOutput, KVConnectorOutput, ModelRunnerOutput

        if not work.is_done:
            self._worker.execute(work)
        names = list(work.planned.num_scheduled_tokens)
        invalid = self._invalid_blocks(work) if may_invalidate else set()
        if self._unloaded in work.planned.num_scheduled_tokens:
            blocks = self.scheduler.kv_cache_manager.get_block_ids(self._unloaded)
            invalid, self._unloaded = {blocks[0][0]}, ""
        sent = self._worker.take_sent()
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._tokens(work, name) for name in names],
            ec_connector_output=ECConnectorOutput(
                finished_sending=sent or None,
                finished_recving=to_names({"encoded": work.placed, "not encoded": work.failed}),
            )
            if work.failed or work.placed or sent
            else None,
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid) if invalid else None,
        )
        before = {
            each: self.unfinished[each].request.num_computed_tokens for each in self.unfinished
        }
        if work.placed or work.failed:
            self._note("encoded beside", work.placed, "failed", work.failed)
        made = self.scheduler.update_from_output(work.planned, output)
        for outputs in made.values():
            for each in outputs.outputs:
                if each.request_id in self.jobs:
                    self.jobs.remove(each.request_id)
                    self._note("job ended", each.request_id)
                elif not each.request_id:
                    self._hear(msgspec.convert(each.ec_transfer_params, CacheNews))
                elif each.finish_reason is not None:
                    self._end(each.request_id, str(each.finish_reason))
        here = self._entries()
        if self.told is not None and not self.told <= here <= self.told | self._untold:
            raise Violation(f"{here} are entries, and a front was told of {self.told}")
        if invalid:
            for each, running in self.unfinished.items():
                if running.request.num_computed_tokens < before[each]:
                    self.recomputed.add(each)
                    self._seen["requests rolled back"] += 1
                    self._note("rolled back", each, running.request.num_computed_tokens)
        if self._sizes.lookahead and not self._sizes.ahead:
            self._draft(names)

    def _entries(self) -> set[str]:
        items = self.scheduler.encoder_cache_manager.items
        return {name for name, item in items.items() if item.is_here}

    def _hear(self, news: CacheNews) -> None:
        assert self.told is not None
        for name, is_here in news.entries.items():
            (self.told.add if is_here else self.told.discard)(name)
        self.requested += news.requested

    def _tokens(self, work: Work, name: str) -> list[int]:
        if name not in work.samples:
            return []
        drafted = len(work.planned.scheduled_spec_decode_tokens.get(name, ()))
        accepted = self._rng.randint(0, drafted)
        self._seen["drafts refused"] += drafted - accepted
        return [self._rng.randint(0, 5) for _ in range(1 + accepted)]

    def _draft(self, names: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        drafts = [[1] * self._sizes.lookahead for _ in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _invalid_blocks(self, work: Work) -> set[int]:
        """Return a block of a request whose KV was not loaded after all.

        None that other requests use as well, and none of a request that samples in a step that is
        scheduled: vLLM counts tokens wrongly then.
        """
        manager = self.scheduler.kv_cache_manager
        flying = {each for other in self._flying for each in other.samples}
        for name, count in work.planned.num_scheduled_tokens.items():
            running = self.unfinished.get(name)
            if running is None or name in flying or running.request not in self.scheduler.running:
                continue
            if self._sizes.ahead and name in work.samples:
                continue
            blocks = (running.request.num_computed_tokens - count) // self._sizes.block
            if blocks > 0:
                block = manager.get_block_ids(name)[0][self._rng.randrange(blocks)]
                if manager.block_pool.blocks[block].ref_cnt == 1:
                    return {block}
        return set()

    def _end(self, request_id: str, reason: str) -> None:
        running = self.unfinished.pop(request_id)
        running.ended = reason
        self.ended[request_id] = running
        self._note("ended", request_id, reason)

    # -- what it is like ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether a request, job or transfer has not ended, or a step has output left."""
        waits = self.unfinished or self.jobs or self._worker.is_sending
        return bool(waits or self._flying)

    @property
    def is_encoding(self) -> bool:
        """Return whether items are encoded next to steps, or that has not been reported."""
        items = self.scheduler.encoder_cache_manager.items.values()
        return any(each.state is State.ENCODING for each in items)

    def could_start(self, running: Running) -> bool:
        """Tell whether a request has a seat and KV memory, or could have both."""
        scheduler = self.scheduler
        if not self.has_tokens_left:
            return False
        if running.request in scheduler.running:
            return True
        need = -(-(running.prompt.size + 2 * self._sizes.lookahead + 2) // self._sizes.block) + 1
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return len(scheduler.running) < self._sizes.seats and free >= need

    @property
    def has_tokens_left(self) -> bool:
        """Return whether a step holds an item next to all that decode, if it must hold it whole."""
        spec = self._sizes.lookahead
        spare = self._sizes.tokens - len(self.scheduler.running) * (1 + spec)
        whole = self._sizes.whole_items * (1 + spec + max(self._sizes.items.values()))
        return spare >= 2 + spec + whole

    @property
    def under_way(self) -> set[str]:
        """Requests in steps whose output is to come."""
        return {each for work in self._flying for each in work.planned.num_scheduled_tokens}

    def hit(self, running: Running) -> int:
        """Return the tokens of a request that waits which the prefix cache holds."""
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(running.request)[1])

    def check_room(self) -> None:
        """All room of the encoder cache can be had, and no request is left in it."""
        cache = self.scheduler.encoder_cache_manager
        if left := cache.requests.keys() - self.unfinished.keys() - self.jobs:
            raise Violation(f"{sorted(left)} have ended, and are left")
        if cache.num_freeable_slots != cache.cache_size:
            raise Violation(
                f"{cache.cache_size - cache.num_freeable_slots} of {cache.cache_size} embeddings "
                "of the encoder cache are lost"
            )

    def check_stalls(self) -> None:
        """No wait had to be ended that nothing else would have ended."""
        if self.metric("epd_pd_stalls_total"):
            raise Violation("requests made no progress until the deadline of all claims")

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the instance."""
        value = self._registry.get_sample_value(name, labels)
        assert value is not None, f"unknown metric: {name} {labels}"
        return float(value)

    def _check_deadlines(self) -> None:
        """No request expires early, nor while a pause holds it up."""
        requests = self._shell.cache.requests.values()
        for each in [each for each in requests if each.expired and each not in self._expired]:
            self._expired.add(each)
            due_s = max(each.arrived_s, self._resumed_s) + self._sizes.wait_timeout_s
            if self._clock.now < due_s or each.running in self._paused:
                raise Violation(f"{each.request_id} expires before its deadline")

    def check_slots(self) -> None:
        """No slot of the receive pool is out."""
        used = self.metric("epd_pd_pool_used_bytes")
        if used:
            raise Violation(f"{used} of {pool_bytes(self._sizes)} bytes of the pool are lost")

    def close(self) -> None:
        self.scheduler.shutdown()


@functools.cache
def _data(media: bool) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem

    fields = {"image_grid_thw": torch.tensor([[1, 8, 8]])}
    if media:
        fields["pixel_values"] = torch.zeros(1, 1, 1)
    elements = {
        key: MultiModalFieldConfig.batched(
            "image", keep_on_cpu=key == "image_grid_thw"
        ).build_elems(key, value)[0]
        for key, value in fields.items()
    }
    return MultiModalKwargsItem(elements)

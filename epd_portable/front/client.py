"""The engine client that knows the split: vLLM's requests to several engines, and their outputs.

`SplitClient` is to vLLM's ``AsyncLLM`` what a client of one engine is. A request goes to one
prefill+decode engine and each of its items, at the same moment, to an encode engine; the connector
below brings the item from one to the other. Pixels go to the engine that encodes them. Items that
the first one holds go to no encoder, unless it has lost them meanwhile and requests them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import msgspec
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient

from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.choice import ChoiceSection, with_file
from epd_portable.config.front import MAX_ENCODERS, AdmissionSection, FrontSection
from epd_portable.config.instance import EncodePriority
from epd_portable.config.roles import ENCODES, TAKES_ITEMS, TAKES_KV
from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.front import headers
from epd_portable.front.calls import WeightChanges, call_elsewhere, calls_of_all
from epd_portable.front.engines import Engines, FrontEngine
from epd_portable.front.exchange import GracefulHTTPError, admit, current
from epd_portable.front.metrics import FrontMetrics
from epd_portable.front.prefill import PrefillJob, Prefills
from epd_portable.front.request import (
    FrontItem,
    FullError,
    ItemJobs,
    OpenRequest,
    StoppedError,
    UnavailableError,
    new_transfer,
    selection_of,
)
from epd_portable.front.spans import Spans
from epd_portable.placement.admission import AdmissionControl
from epd_portable.placement.assignment import (
    MAX_PD_ATTEMPTS,
    THRESHOLDS,
    Assignment,
    By,
    EncodeFailure,
    RetryBudget,
    assign_items,
    or_own,
)
from epd_portable.placement.instances import EngineSettings, Instance, WentDownError, while_up
from epd_portable.placement.profiles.policy import Policy
from epd_portable.responses import BODY_TIMEOUT_S
from epd_portable.transfer.stores.lookup import StoreLookup
from epd_portable.transfer.stores.metrics import StoreMetrics
from epd_portable.vllm_plugin.requests import KV, ItemMetadata, take_params
from epd_portable.vllm_plugin.video_parts import VideoParts
from epd_portable.wire.params import (
    FIELD,
    CacheNews,
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    to_params,
)

logger = logging.getLogger(__name__)

_DRAIN_STEP_S = 0.05
_ENDS_WITHIN_S = 5.0
"""Requests whose engines have been ended."""


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the launcher beyond vLLM's own arguments.

    Attributes:
        sockets: Unix socket of each API server, for engines.
        can_encode: Engines that generate hold the vision tower.
        body_timeout_s: Longest time in which a request's body must have come.
        front: The key ``front``; of ``max_bodies_bytes`` the part of one API server.
    """

    engines: list[EngineSettings]
    sockets: list[str]
    secret_file: str
    trusted_network: bool = False
    encode_priority: EncodePriority = "balanced"
    can_encode: bool = True
    wait_timeout_s: float = 30.0
    body_timeout_s: float = BODY_TIMEOUT_S
    front: FrontSection = msgspec.field(default_factory=FrontSection)
    store: StoreSection | None = None

    @classmethod
    def read(cls, text: str) -> FrontSettings:
        """Return settings from JSON."""
        return msgspec.json.decode(
            text, type=cls, dec_hook=lambda kind, value: cast(Any, kind).model_validate(value)
        )


class SplitClient(AsyncMPClient):
    """See the module; its constructor connects to nothing.

    Attributes:
        fail: Ends a request with an error at vLLM's server, and its siblings.
        words: Returns the tokens of a text; ``None`` without a tokenizer.
        gateway_keys: Of trusted gateways; ``None`` for none.
        is_draining: It takes no new request.
    """

    def __init__(self, config: VllmConfig, settings: FrontSettings, index: int = 0) -> None:
        self.vllm_config = config
        self.settings = settings
        self.secret = Secret.read(settings.secret_file)
        self.resources = SimpleNamespace(engine_dead=False)
        self.engines_running = False
        self.fail: Callable[[str, BaseException], None] = lambda request_id, error: None
        self.words: Callable[[str], list[int]] | None = None
        paths = [Path(each) for each in settings.sockets]
        front = settings.front
        self._policy = _policy_of(front.choice)
        self.gateway_keys = None
        if front.gateway_keys_file is not None:
            self.gateway_keys = ApiKeys(front.gateway_keys_file, "front.gateway_keys_file")
        self.engines = Engines(
            settings.engines,
            paths,
            index,
            config,
            outputs=self._take_outputs,
            caches=self._policy.cache_sizes if self._policy else None,
            failed=self._fail_job,
            secret=self.secret,
        )
        self.engine_ranks_managed = [each.index for each in self.engines.by_name.values()]
        self._pool = self.engines.pool
        self._servers = len(settings.sockets)
        self._can_encode = settings.can_encode
        self._is_elastic = settings.can_encode and front.elastic_encode
        self._metadata = ItemMetadata(config)
        self._encoders, self._parts = 0, VideoParts(config, 0)
        self._count_encoders()
        self._pool.watch(self._count_encoders)
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._open: dict[str, OpenRequest] = {}
        self._at_engines: dict[str, OpenRequest] = {}  # by the id of its present try
        self.metrics = FrontMetrics(self._pool)
        self._store: StoreLookup | None = None
        if settings.store is not None:
            counts = StoreMetrics("front", self.metrics.registry)
            self._store = StoreLookup(settings.store, self.secret, counts)
        self._admission: AdmissionControl | None = None
        if front.admission != AdmissionSection():
            self._admission = AdmissionControl(
                front.admission,
                self._pool,
                self.metrics.admission,
                servers=self._servers,
            )
        self.is_draining = False
        self._retries = RetryBudget()
        self._weights = WeightChanges()
        traces = config.observability_config.otlp_traces_endpoint
        self._spans = Spans() if traces else None
        self._jobs = ItemJobs(
            settings,
            self.engines,
            self.metrics,
            self._retries,
            job_s=_job_s(settings, self._policy),
            adapts_encoders=getattr(config.lora_config, "enable_tower_connector_lora", False),
            spans=self._spans,
        )
        self._prefills = Prefills(self._jobs, choose=self._choose_prefill, send=self._try)

    # What vLLM's AsyncLLM calls.

    def drain(self, timeout: float | None = None) -> None:
        """Take no new request, let open ones end, and then every engine.

        Requests that are still open then end with an error. Not on the loop's thread with a
        ``timeout``.

        Args:
            timeout: Longest time for the requests; ``None`` waits for nothing.
        """
        self.is_draining = True
        if timeout:
            self._wait_ended(timeout)
        self.engines.close()
        if timeout:
            self._wait_ended(_ENDS_WITHIN_S)
            time.sleep(_DRAIN_STEP_S)  # Until vLLM has passed the last of them on.

    def _wait_ended(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while (self._open or not self._outputs.empty()) and time.monotonic() < end:
            time.sleep(_DRAIN_STEP_S)

    def shutdown(self, timeout: float | None = None, *args: Any, **kwargs: Any) -> None:
        """Do as `drain`, and close what is left."""
        self.drain(timeout)
        self.resources.engine_dead = True
        if self._store is not None:
            self._store.close()

    async def get_output_async(self, *args: Any, **kwargs: Any) -> EngineCoreOutputs:
        """Return what one of the engines has put out."""
        return await self._outputs.get()

    async def call_utility_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call every engine that is up; return the result of the first that serves requests."""
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every engine that is up; return the results of those that serve requests.

        In several calls where engines need one another: see `calls_of_all`.
        """
        found: list[Any] = []
        if any(each.follower is not None for each in self.engines.by_name.values()):
            call_elsewhere(method, *args)  # Refused before it reaches the others.
        self._jobs.resets += 1
        if method == "reset_encoder_cache":
            # Engines report what they have lost with their next outputs only.
            for each in self.engines.by_name.values():
                each.holds.clear()
        for duty, name, given in calls_of_all(method, *args):
            engines = [
                each for each in self.engines.by_name.values() if duty in (None, each.encodes_only)
            ]
            results = await asyncio.gather(*(each.call(name, *given) for each in engines))
            pairs = zip(engines, results, strict=True)
            found = [each for engine, said in pairs for each in said if engine.generates] or found
        self._jobs.resets += 1
        if self._weights.note(method):
            await self.engines.seen("compare")
        if found:
            return found
        raise UnavailableError("no engine that generates is up")

    def get_kv_event_sources(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Return where engines that are up publish KV events, by engine; since vLLM 0.31."""
        return {
            each.index: source
            for each in self.engines.by_name.values()
            if each.client is not None
            for source in each.client.get_kv_event_sources(*args, **kwargs).values()
        }

    async def add_request_async(
        self, request: EngineCoreRequest, *args: Any, **kwargs: Any
    ) -> None:
        """Have a request served; its outputs come as those of one engine.

        Raises:
            GracefulHTTPError: No engine can, or they have too much.
        """
        try:
            await self._begin(request)
        except BaseException as error:
            if isinstance(error, GracefulHTTPError):
                current().refuse(error)
            self.fail(request.request_id, error)
            raise

    async def _begin(self, request: EngineCoreRequest) -> None:
        if request.resumable:
            raise GracefulHTTPError(
                "streaming-input sessions are not served: send the request as a whole",
                HTTPStatus.BAD_REQUEST,
            )
        if self.is_draining:
            raise StoppedError
        one = OpenRequest(self._parts.divide(request) if self._parts.most > 1 else request)
        one.exchange.names.update(dict.fromkeys(each.item_uuid for each in one.items))
        one.selection = selection_of(self._pool, self._policy, one)
        if (hints := one.exchange.hints) is not None:
            one.selection = headers.follow(one.selection, hints)
        self._open[request.request_id] = one
        try:
            if self._admission is not None:
                one.ticket = await admit(self._admission, request)
            engine = self._choose_engine(one, None)
        except BaseException:
            self._open.pop(request.request_id, None)
            self._leave(one)
            raise
        if request.request_id not in self._open:
            self._leave(one)  # Its client has disconnected.
            return
        self._retries.count_request()
        self._pool.work.prompt_came(engine.instance.role, one.tokens)
        one.task = asyncio.create_task(self._serve(one, engine))
        one.task.add_done_callback(lambda _: self._leave(one))
        if self._spans is not None:
            self._spans.begin(one)

    def _leave(self, one: OpenRequest) -> None:
        if self._admission is not None:
            self._admission.leave(one.ticket)

    async def abort_requests_async(self, request_ids: list[str], *args: Any, **kwargs: Any) -> None:
        """End requests, wherever they are."""
        self.give_up(request_ids)

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Do the same at once."""
        for request_id in request_ids:
            one = self._open.pop(request_id, None)
            if one is not None and one.task is not None:
                one.task.cancel()

    def _count_encoders(self, *_: Instance) -> None:
        count = len(self._pool.of_duty("encode"))
        if count != self._encoders:
            self._encoders, self._parts = count, VideoParts(self.vllm_config, count)

    # Requests.

    def _choose_engine(self, one: OpenRequest, before: FrontEngine | None) -> FrontEngine:
        """Return the engine that is to generate: the one before, if it is up. Refuse if full."""
        chosen = before.instance if before is not None and before.instance.health.usable else None
        chosen = chosen or one.selection.choose_engine()
        if chosen is None:
            raise UnavailableError("no engine that generates is up")
        encoders = [each for each in self.engines.by_name.values() if each.encodes_only]
        room = any(each.instance.health.usable and not each.is_full for each in encoders)
        if one.core.mm_features and not self._can_encode and not room:
            if self._pool.usable("encode"):
                raise FullError
            if not self._may_leave_out(one):
                raise UnavailableError("no encode engine is up")
        one.tokens = one.selection.note_engine(chosen)
        return self.engines.by_name[chosen.name]

    def _choose_prefill(self, job: OpenRequest, exclude: Collection[str]) -> FrontEngine | None:
        engines = self.engines.by_name
        full = {each.name for each in engines.values() if each.follower and each.is_full}
        for each in engines.values():
            if each.instance.role in TAKES_KV:
                full |= each.incompatible
        chosen = job.selection.choose_prefill([*exclude, *full])
        if chosen is None:
            return None
        job.tokens = job.selection.note_prompt(chosen)
        self._pool.work.prompt_came(chosen.role, job.tokens)
        return engines[chosen.name]

    def _may_leave_out(self, one: OpenRequest) -> bool:
        """Return whether a request is served without items that no engine can encode."""
        able = self._can_encode or self.words is None or isinstance(one, PrefillJob)
        return self.settings.front.partial_results and not able

    def _leave_out(self, one: OpenRequest) -> None:
        if one.missing and self.words is not None:
            one.leave_out(self.words)

    async def _serve(self, one: OpenRequest, engine: FrontEngine) -> None:
        """Have a request served, by one engine after another until one has begun."""
        request_id = one.core.request_id
        try:
            if self._store is not None:
                items = [each for each in one.items if each.item_uuid not in engine.holds]
                with engine.instance.in_flight():
                    one.stored = await self._store.find_items(items, engine.namespace)
            attempts = MAX_PD_ATTEMPTS
            for attempt in itertools.count():
                resets = self._jobs.resets
                engine_id = f"{request_id}-{attempt}" if attempt else request_id
                one.kv = None
                if engine.instance.role in TAKES_KV and not await self._prefills.compute(
                    one, engine_id
                ):
                    return self._put_end(one, engine, FinishReason.ABORT)
                await self._try(one, engine, engine_id)
                if not one.again:
                    return
                if one.refused:
                    raise GracefulHTTPError(one.refused, HTTPStatus.BAD_REQUEST)
                logger.warning("request %s is sent again: %s", request_id, one.again)
                self.metrics.retries.inc()
                if one.missing and self._may_leave_out(one):
                    self._leave_out(one)
                    attempts += 1
                elif resets == self._jobs.resets and not self._retries.spend():
                    break
                if attempt + 1 >= attempts:
                    break
                engine = self._choose_engine(one, engine)
            raise UnavailableError(one.again)
        except GracefulHTTPError as error:
            current().refuse(error)
            self.fail(request_id, error)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            self.fail(request_id, error)
        finally:
            self._open.pop(request_id, None)

    async def _try(self, one: OpenRequest, engine: FrontEngine, engine_id: str) -> None:
        """Send a request to an engine and its items to encoders; return when that is over.

        Each try has an id of its own: vLLM may handle the abort of an earlier one late.
        """
        one.again = ""
        one.decided.clear()
        ways = self._assign(one, engine)
        if self._may_leave_out(one):
            one.missing |= {each.item.item_uuid for each in ways if each.by == "local"}
            self.metrics.items.labels("left_out").inc(len(one.missing))
            ways = [each for each in ways if each.item.item_uuid not in one.missing]
            self._leave_out(one)
        if engine_id == one.core.request_id:
            self._count(ways, engine)
        client = engine.client
        if client is None:
            one.again = f"engine {engine.name} is down"
            return
        # An engine that encodes does so for what it no longer holds.
        by_transfer = {"encoder", "stored"}
        if engine.instance.role not in ENCODES:
            by_transfer.add("held")
        brought = [each for each in ways if each.by in by_transfer]
        here_s = sum(self._jobs.expected_s(each.item) for each in ways if each.by == "local_first")
        transfers = {
            each.item.item_uuid: new_transfer(each.item, engine.instance.control, self.secret)
            for each in brought
        }
        stored = [each.item.item_uuid for each in ways if each.by == "stored"]
        stores = {name: one.stored[name].key for name in stored}
        one.requested = {each.transfer_id: asyncio.Event() for each in transfers.values()}
        self._jobs.requested |= one.requested
        one.held = {each.item.item_uuid for each in ways if each.by == "held"}
        one.awaited = {each.item.item_uuid for each in brought if each.by == "encoder"}
        self._at_engines[engine_id] = one
        for each in brought:
            if each.encoder is not None:
                expected_s = self._jobs.expected_s(each.item, each.encoder)
                one.reserve(each.item.item_uuid, each.encoder, expected_s)
        try:
            with while_up(engine.instance.in_flight()) as use:
                use.owe_response(one.tokens)
                await engine.add(self._for_engine(one, engine_id, transfers, stores))
                if here_s or not one.awaited:
                    use.compute()
                computing = engine.instance.computing(one.tokens)
                with engine.instance.encoding(here_s), computing, one.kv_held():
                    async with anyio.create_task_group() as items:
                        for each in brought:
                            transfer = transfers[each.item.item_uuid]
                            items.start_soon(self._jobs.deliver, one, each, transfer, use)
                        await one.decided.wait()
                        if self._admission is not None:
                            self._admission.encoded(one.ticket)
                        use.compute()
                        wait_s = one.job_grace_s if one.begun else 0
                        items.cancel_scope.deadline = anyio.current_time() + wait_s
                if not one.again:
                    self.metrics.items.labels("not_needed").inc(len(one.awaited | one.held))
                    await one.ended.wait()
                    if not here_s:
                        use.note_response()
        except WentDownError as error:
            if not one.begun:
                one.again = f"engine {engine.name} {error}"
            elif not one.ended.is_set():
                if one.exchange.begun:
                    self._put_end(one, engine)
                else:
                    one.again = f"engine {engine.name} {error}"
                    raise UnavailableError(one.again) from error
        finally:
            one.release(*one.reserved)
            del self._at_engines[engine_id]
            for transfer_id in one.requested:
                del self._jobs.requested[transfer_id]
            if not one.ended.is_set():
                await engine.abort(client, engine_id)

    def _assign(self, one: OpenRequest, engine: FrontEngine) -> list[Assignment[FrontItem]]:
        """Return which engine brings each item to the engine that generates."""
        if one.kv is not None:
            return []
        if engine.instance.role not in TAKES_ITEMS:
            return [Assignment(item=each, by="local_first") for each in one.items]
        own = engine.instance if engine.instance.role in ENCODES else None

        def choose(item: FrontItem, exclude: Collection[str]) -> Instance | None:
            return self._jobs.choose_encoder(one, item, exclude, engine.name)

        settled: dict[str, By] = {}
        for name in (each.item_uuid for each in one.items):
            if name in one.here:
                settled[name] = "local_first"
            elif name in engine.holds:
                settled[name] = "held"
            elif engine.follower is None and name in one.stored and one.stored[name].usable:
                settled[name] = "stored"
        if self._can_encode:
            for name in one.selection.stay(one.items, engine.instance):
                if settled.get(name) != "stored":
                    settled[name] = "local_first"
        threshold = None
        if self._is_elastic and one.selection.is_elastic and own is None:
            threshold = THRESHOLDS[self.settings.encode_priority].get(engine.busy)
        return assign_items(
            one.items,
            engine.instance,
            choose if own is None else or_own(own, choose),
            self._pool.encode_times,
            settled=settled,
            threshold=threshold,
        )

    def _count(self, ways: Iterable[Assignment[FrontItem]], engine: FrontEngine) -> None:
        for each in ways:
            if each.by in ("held", "stored"):
                continue
            self._pool.work.item_came(each.item, self._pool.encode_times.of(each.item))
            if each.by != "encoder":
                self.metrics.items.labels(each.by).inc()
            if each.is_elastic:
                self.metrics.elastic.labels(engine.busy).inc()

    def _for_engine(
        self,
        one: OpenRequest,
        engine_id: str,
        transfers: dict[str, EncodeTransfer],
        stores: dict[str, str],
    ) -> EngineCoreRequest:
        """Return a request as the engine that generates gets it: without what encoders get."""
        core = one.core
        sent = copy.copy(core)
        sent.request_id = engine_id
        if sent.sampling_params is None:
            return sent
        expected = {}
        features = []
        for feature in core.mm_features or ():
            bare = None
            if (transfer := transfers.get(feature.identifier)) is not None:
                bare = self._metadata.without_media(feature)
                expected[feature.identifier] = ExpectedTransfer(
                    transfer_id=transfer.transfer_id,
                    item_uuid=transfer.item_uuid,
                    modality=transfer.modality,
                    media=bare is None,
                    on_demand=feature.identifier in one.held,
                    store=stores.get(feature.identifier, ""),
                )
            features.append(bare or feature)
        sent.mm_features = features or None
        sent.sampling_params = copy.copy(sent.sampling_params)
        # Values of clients are dropped: they could name memory of others.
        extra = {**(sent.sampling_params.extra_args or {})}
        extra.pop(FIELD, None)
        if not isinstance(one, PrefillJob):
            extra.pop(KV, None)
        if one.kv is not None:
            extra[KV] = one.kv.params
        samples = one.exchange.samples is not None
        if expected or samples:
            params = PrefillParams(transfers=tuple(expected.values()), sample=samples)
            extra[FIELD] = to_params(params)
        sent.sampling_params.extra_args = extra or None
        return sent

    # Outputs.

    def _take_outputs(self, engine: FrontEngine, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = engine.index
        if (stats := outputs.scheduler_stats) is not None:
            engine.running = stats.num_running_reqs
            if self._policy is not None and self._policy.wants_loads:
                engine.report(stats)
        outputs.outputs = [each for each in outputs.outputs if self._take_output(engine, each)]
        if engine.follower is None:  # vLLM counts by the engines of the start.
            self._outputs.put_nowait(outputs)

    def _fail_job(self, job: str, failure: EncodeFailure) -> None:
        self._jobs.fail(job, failure)
        if (one := self._at_engines.get(job)) is not None:
            one.again = failure.reason
            one.decide()

    def _take_news(self, engine: FrontEngine, news: CacheNews) -> None:
        for mm_hash, is_here in news.entries.items():
            engine.holds.discard(mm_hash)
            if is_here:
                engine.holds.add(mm_hash)
        for transfer_id in news.requested:
            if requested := self._jobs.requested.get(transfer_id):
                requested.set()
        for request_id, reason in news.refused.items():
            if one := self._at_engines.get(request_id):
                one.refused = reason
        for mm_hash, sample in news.samples.items():
            for one in self._open.values():
                if one.exchange.samples is not None and mm_hash in one.exchange.names:
                    one.exchange.samples[mm_hash] = engine.name, sample

    def _take_output(self, engine: FrontEngine, output: EngineCoreOutput) -> bool:
        """Return whether an output is a part of a response."""
        if not output.request_id:
            self._take_news(engine, msgspec.convert(take_params(output), CacheNews))
        self._jobs.take_output(output)
        one = self._at_engines.get(output.request_id)
        if one is None or one.again:
            return False  # It was given up, or is sent again.
        if output.finish_reason is FinishReason.ERROR and not one.begun:
            one.again = one.refused or "the engine could not compute it"
            items = {each.identifier for each in one.core.mm_features or ()}
            if self._can_encode and not items <= one.here:
                one.here |= items
                one.refused = ""  # An item that its engine encodes may be larger.
            one.decide()
            return False
        if isinstance(one, PrefillJob):
            one.note_items(take_params(output))
            one.take_output(output)
            return False
        one.exchange.tokens += len(output.new_token_ids)
        if output.new_token_ids or output.finished:
            one.begun = True
            one.decide()
        if output.finished:
            one.ended.set()
            one.exchange.engine = engine.name
            one.note_items(take_params(copy.copy(output)))
        output.request_id = one.core.request_id
        if not self.settings.front.item_outcomes:
            take_params(output)
        return True

    def _put_end(
        self, one: OpenRequest, engine: FrontEngine, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        end = EngineCoreOutput(one.core.request_id, [], finish_reason=reason)
        self._outputs.put_nowait(EngineCoreOutputs(engine_index=engine.index, outputs=[end]))


def _policy_of(choice: ChoiceSection | None) -> Policy | None:
    if choice is None:
        return None
    policy = Policy(with_file(choice))
    for note in policy.notes:
        logger.warning("front.choice: %s", note)
    return policy


def _job_s(settings: FrontSettings, policy: Policy | None) -> float | None:
    """Return the longest time of an encode job: that of a decider, as far as retries fit."""
    if policy is None or policy.encode_timeout_s is None:
        return None
    longest_s = settings.wait_timeout_s / MAX_ENCODERS
    if policy.encode_timeout_s > longest_s:
        wanted = f"{policy.encode_timeout_s:g} s"
        logger.warning("of encoderTimeout, %s, an encode job gets %g s", wanted, longest_s)
    return min(policy.encode_timeout_s, longest_s)

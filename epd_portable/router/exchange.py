"""One client request across the instances: plan → encode jobs and request at once → relay.

`Exchange.serve` is the whole story of a request. What fails on the way is a `FailureKind` in a
`RequestPhase`, and the table in `epd_portable.placement.fallbacks` says what is done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from epd_portable.config.roles import ENCODES, TAKES_ITEMS, TAKES_KV
from epd_portable.config.secret import Secret
from epd_portable.connector.stores.lookup import StoredItem
from epd_portable.log import say_failure, trace
from epd_portable.placement.assignment import (
    EncodeFailure,
    assign_items,
    expected_transfer,
    new_transfer,
    or_own,
)
from epd_portable.placement.fallbacks import (
    JOB_GRACE_S,
    RequestFailure,
    RequestPhase,
    RequestTries,
    RetryBudget,
    final_error,
)
from epd_portable.placement.instances import EndpointPool, Instance, WentDownError, while_up
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import Call, size
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.contents.media import MediaItem
from epd_portable.router.encode_jobs import Attempt, Delivery, EncodeJobs
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.hops import HopSelection
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.observability.record import Leg
from epd_portable.router.prefill import choose_prefill, for_prefill, kv_of, with_kv
from epd_portable.router.relay import Relay, phase_of
from epd_portable.router.selector import EndpointSelector, Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.router.stored import LearningLookup
from epd_portable.wire.outcomes import FailureKind, Fallback
from epd_portable.wire.params import EncodedItem, PrefillParams

logger = logging.getLogger(__name__)
_log_failure = say_failure(logger, "delivery of an item failed")


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request from its first try to its last; ``call`` is what the next one asks."""

    call: Call
    out: ClientExchange
    selection: Selection
    stored: Mapping[str, StoredItem]
    tries: RequestTries


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """Every choice for one try of a request.

    Attributes:
        deliveries: Of the items that encoders or the store bring; it encodes the others by itself.
        here_s: How long it will take for those that it encodes by choice.
        prefill: Who computes the prompt before, and gets the items; ``None``: it does so itself.
    """

    pd: Instance
    deliveries: tuple[Delivery, ...] = ()
    here_s: float = 0.0
    prefill: RequestPlan | None = None


class Exchange:
    """Sends calls to instances and brings the answers back."""

    def __init__(
        self,
        settings: RouterSettings,
        instances: EndpointPool,
        selector: EndpointSelector,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        secret: Secret,
        store: LearningLookup | None,
    ) -> None:
        self.relay = Relay(settings, upstream, metrics)
        self._settings = settings
        self._instances = instances
        self._selector = selector
        self._control = control
        self._metrics = metrics
        self._secret = secret
        self._store = store
        self._retries = RetryBudget()
        self._encode_jobs = EncodeJobs(settings, upstream, control, self._retries, store)
        self._tasks: set[asyncio.Task[None]] = set()
        self._without_metadata: set[str] = set()
        """Modalities that encoders cannot describe, with this model."""
        self._without_kv: set[str] = set()
        """Endpoints at which engines say nothing of KV."""
        elastic = settings.local_encode and settings.media == "concurrent"
        self._elastic_threshold = (
            settings.elastic_threshold if elastic and settings.elastic_encode else None
        )

    async def close(self) -> None:
        """Cancel encode jobs that outlived their requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, call: Call, out: ClientExchange) -> None:
        """Answer a call; to cancel it aborts the work at the instances.

        Raises:
            RequestError: There will be no answer, or no more of one that has begun; says why.
        """
        record = out.record
        record.note_items(call.items)
        self._retries.count_request()
        selection = self._selector.start_selection(call, out.for_instances, out.explanation)
        if out.named is not None:
            selection = HopSelection(out.named, selection)
        tries = RequestTries(
            self._retries,
            metadata_only=call.takes_metadata and any(map(self._goes_as_metadata, call.items)),
            local_encode=self._settings.local_encode,
            partial_results=call.takes_metadata and self._settings.partial_results,
        )
        stored = await self._store.find_items(call.items) if self._store is not None else {}
        state = RequestState(
            call=call,
            out=out,
            selection=selection,
            stored=stored,
            tries=tries,
        )
        while True:
            try:
                plan = self._plan(state)
                prefilled = await self._prefilled(state, plan)
                if prefilled is not None:
                    with record.leg("answer", plan.pd.name) as leg:
                        await self._try(state, plan, prefilled, leg, self.relay.forward)
                return
            except RequestFailure as failed:
                if record.gone:
                    # Both came at once, and this one was heard of.
                    return
                possible = tries.possible(failed, selection.choose_pd, selection.choose_prefill)
                fallback = record.fall_back(failed.phase, failed.kind, possible)
                logger.warning("request %s: %s (%s)", out.request_id, failed, fallback)
                if tries.go_on(failed, fallback):
                    self._change_call(state, failed, fallback)
                elif failed.reply is not None and fallback == "error":
                    return out.send_reply(failed.reply)
                else:
                    raise final_error(failed, fallback) from failed

    def _change_call(self, state: RequestState, failed: RequestFailure, fallback: Fallback) -> None:
        """Let the next try go with the original media, or without items that cannot be had."""
        out = state.out
        if fallback == "original_media":
            renamed = state.call.renamed()
            out.record.rename(state.call.items, renamed.items)
            state.call = renamed
        elif fallback == "left_out":
            for item in state.call.items:
                if item.item_uuid in failed.items:
                    out.record.end_item(item, "left_out")
            state.call = state.call.without(failed.items)
            out.left_out += len(failed.items)

    # Who does what of it.

    def _plan(self, state: RequestState) -> RequestPlan:
        """Choose who answers, who prefills, and who brings every item.

        Raises:
            RequestFailure: There is no PD instance; or items go as metadata only, and one has no
                encoder.
        """
        selection, tries = state.selection, state.tries
        pd = tries.choose_pd(selection.choose_pd)
        if pd is None:
            states = "; ".join(
                f"{each.name}: {each.reason or each.state}"
                for each in self._instances.of_duty("answer")[:8]
            )
            message = f"no prefill+decode instance can serve ({states or 'none is there'})"
            raise RequestFailure(FailureKind.UNAVAILABLE, RequestPhase.ANSWER, message)
        if pd.role not in TAKES_KV or not state.call.fields:
            return self._plan_items(state, pd)
        prefill, place = choose_prefill(state.call, selection, pd, tries, self._without_kv)
        self._metrics.prefills.labels(place).inc()
        if place == "unavailable":
            state.out.record.fall_back(RequestPhase.PREFILL, FailureKind.UNAVAILABLE)
        if prefill is None:
            return self._plan_items(state, pd)
        return RequestPlan(pd=pd, prefill=self._plan_items(state, prefill))

    def _plan_items(self, state: RequestState, pd: Instance) -> RequestPlan:
        """Choose who brings every item to an instance.

        Raises:
            RequestFailure: Items go as metadata only, and one has no encoder.
        """
        call, record = state.call, state.out.record
        if pd.role not in TAKES_ITEMS:
            for item in call.items:
                record.end_item(item, "local_first")
            return RequestPlan(pd=pd)
        as_metadata = {
            item.item_uuid
            for item in call.items
            if state.tries.metadata_only and self._goes_as_metadata(item)
        }
        stored = {
            name: entry
            for name, entry in state.stored.items()
            if entry.serves(metadata_only=name in as_metadata)
        }
        others = [item for item in call.items if item.item_uuid not in stored]
        to_encode = {each.item_uuid for each in state.selection.items_to_encode(others, pd)}
        times, here_s = self._encode_jobs.times, 0.0
        deliveries: list[Delivery] = []
        loop = asyncio.get_running_loop()
        selection, own = state.selection, pd if pd.role in ENCODES else None
        by_size = selection.is_elastic
        if not record.legs:
            for item in others:
                self._instances.work.item_came(item, times.of(item))
        for each in assign_items(
            call.items,
            pd,
            or_own(own, selection.choose_encoder)
            if own is not None and by_size
            else selection.choose_encoder,
            times,
            stored=stored,
            left_here={item.item_uuid for item in others} - to_encode,
            elastic_threshold=self._elastic_threshold if by_size and own is None else None,
            any_encoders=bool(self._instances.of_duty("encode")),
            own=own,
        ):
            item, name = each.item, each.item.item_uuid
            if each.by == "local" or each.by == "local_first":
                if name in as_metadata & to_encode and each.encoder is None:
                    message = "no encoder is healthy; try again later"
                    raise RequestFailure(
                        FailureKind.MISSING, RequestPhase.ANSWER, message, items=[name]
                    )
                record.end_item(item, each.by)
                if each.by == "local":
                    record.fall_back(RequestPhase.ENCODE, FailureKind.UNAVAILABLE)
                else:
                    here_s += times.of(item)
                if each.elastic:
                    self._metrics.elastic.labels(each.elastic).inc()
                continue
            transfer = new_transfer(item, pd.control, self._secret)
            deliveries.append(
                Delivery(
                    index=len(deliveries),
                    item=item,
                    transfer=transfer,
                    encoder=each.encoder,
                    body=call.for_encoder(item, transfer),
                    stored=each.stored,
                    metadata=loop.create_future() if name in as_metadata else None,
                )
            )
        return RequestPlan(pd=pd, deliveries=tuple(deliveries), here_s=here_s)

    def _goes_as_metadata(self, item: MediaItem) -> bool:
        """Return whether an item is tried without its media first."""
        if self._settings.media != "metadata":
            return False
        return not self._settings.local_encode or item.modality not in self._without_metadata

    # One try.

    async def _prefilled(self, state: RequestState, plan: RequestPlan) -> Call | None:
        """Have the prompt computed, if the plan says so, and return what then is to be answered.

        Nothing is, if the request was refused.

        Raises:
            RequestFailure: There is no KV.
        """
        if plan.prefill is None:
            return state.call
        pd, answered = plan.prefill.pd, None

        async def forward(attempt: Attempt, body: Segments) -> int:
            nonlocal answered
            reply = await self.relay.whole_reply(attempt, body)
            if reply.status >= 400:
                attempt.out.send_reply(reply)
            else:
                answered = with_kv(state.call, kv_of(reply, attempt.call, pd, self._without_kv))
            return reply.status

        try:
            with state.out.record.leg("prefill", pd.name) as leg:
                await self._try(state, plan.prefill, for_prefill(state.call), leg, forward)
        except RequestFailure as failed:
            state.tries.prefills.append(pd.name)
            if failed.kind not in ("lost", "unreachable", "error", "timeout"):
                raise
            raise RequestFailure(failed.kind, RequestPhase.PREFILL, str(failed)) from failed
        return answered

    async def _try(
        self,
        state: RequestState,
        plan: RequestPlan,
        call: Call,
        leg: Leg,
        forward: Callable[[Attempt, Segments], Awaitable[int]],
    ) -> None:
        """Start the encode jobs and the request, and have the answer passed on.

        Raises:
            RequestFailure: There is no answer, or only a part of it.
        """
        pd, out = plan.pd, state.out
        transfers = [each.transfer.transfer_id for each in plan.deliveries]
        try:
            with (
                while_up(pd.working()) as use,
                self._control.expect(transfers) as inbox,
                contextlib.ExitStack() as held,
            ):
                attempt = Attempt(
                    call=call,
                    out=out,
                    use=use,
                    deliveries=plan.deliveries,
                    headers=leg.headers(out.for_instances),
                    inbox=inbox,
                    selection=state.selection,
                    held=held,
                    awaited=len(plan.deliveries),
                )
                tokens = state.selection.note_request(pd, () if plan.prefill else call.items)
                use.owe_answer(tokens)
                if not any(leg.failed for leg in out.record.legs):
                    self._instances.work.prompt_came(pd.role, tokens)
                    if not plan.prefill:
                        self._metrics.prefill_tokens.inc(tokens)
                if tokens and not plan.prefill:
                    held.enter_context(pd.computing(tokens))
                if plan.here_s:
                    held.enter_context(pd.encoding(plan.here_s))
                if plan.prefill:
                    # Its KV is read until the answer begins.
                    held.enter_context(plan.prefill.pd.held())
                if plan.here_s or not plan.deliveries:
                    use.compute()
                tasks = self._start_encode_jobs(attempt)
                try:
                    metadata = await self._await_metadata(attempt)
                    body = call.for_pd(self._params(attempt, metadata), metadata or None)
                    trace(
                        "pd_request",
                        request_id=out.request_id,
                        instance=pd.name,
                        nbytes=size(body),
                    )
                    status = await forward(attempt, body)
                    if status >= 400:
                        self._give_up(attempt, tasks)
                    elif not plan.here_s:
                        use.note_answered()
                except BaseException:
                    self._give_up(attempt, tasks)
                    raise
                if waiting := [task for task in tasks if not task.done()]:
                    # Of encoders that do not answer soon, though nothing waits for them.
                    loop = asyncio.get_running_loop()
                    loop.call_later(JOB_GRACE_S, lambda: [task.cancel() for task in waiting])
        except WentDownError as error:
            message = f"instance {pd.name} {error}"
            raise RequestFailure(FailureKind.LOST, phase_of(out), message) from error

    def _start_encode_jobs(self, attempt: Attempt) -> list[asyncio.Task[None]]:
        tasks = []
        for delivery in attempt.deliveries:
            task = asyncio.create_task(self._encode_jobs.deliver(delivery, attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(_log_failure)
            tasks.append(task)
        return tasks

    def _give_up(self, attempt: Attempt, tasks: Iterable[asyncio.Task[None]]) -> None:
        """End the calls to encoders, and tell the PD instance that its items are not wanted."""
        attempt.over.set()
        for task in tasks:
            task.cancel()
        ids = [each.transfer.transfer_id for each in attempt.deliveries]
        self._control.not_wanted(attempt.pd.name, ids)

    async def _await_metadata(self, attempt: Attempt) -> dict[str, EncodedItem]:
        """Wait until encoders have said what the items are; by the names that these have here.

        Raises:
            RequestFailure: Of some item it cannot be obtained.
        """
        metadata: dict[str, EncodedItem] = {}
        for delivery in attempt.deliveries:
            if delivery.metadata is None:
                continue
            answer = await delivery.metadata
            kind, message = FailureKind.MISSING, ""
            if isinstance(answer, EncodeFailure):
                if answer.kind is FailureKind.REFUSED:
                    kind, message = answer.kind, answer.reason
                else:
                    message = f"{answer.reason}; try again later"
            elif not answer.metadata:
                if answer.metadata is not None:
                    self._send_media_of(answer.modality)
                name = delivery.encoder.name if delivery.encoder else "the store"
                message = f"{name} knows no metadata of an item; try again later"
            else:
                metadata[delivery.item.item_uuid] = answer
                continue
            items = [delivery.item.item_uuid]
            raise RequestFailure(kind, RequestPhase.ANSWER, message, items=items)
        return metadata

    def _send_media_of(self, modality: str) -> None:
        """Send no item of a modality as metadata any more."""
        if modality not in self._without_metadata:
            self._without_metadata.add(modality)
            logger.warning(
                "items of modality %r cannot be described by metadata with this model and version "
                "of vLLM: prefill+decode instances get media, as with transfer.media concurrent",
                modality,
            )

    def _params(
        self, attempt: Attempt, metadata: Mapping[str, EncodedItem]
    ) -> PrefillParams | None:
        """Return what the PD instance may expect."""
        if not attempt.deliveries:
            return None
        transfers = tuple(
            expected_transfer(
                each.transfer,
                each.encoder.name if each.encoder else "",
                metadata.get(each.item.item_uuid),
                each.stored.key if each.stored else "",
            )
            for each in attempt.deliveries
        )
        return PrefillParams(transfers=transfers, reply_to=self._control.identity)

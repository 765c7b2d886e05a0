"""One client request across the instances: read → plan → encode jobs and request at once → relay.

`Exchange.serve` is the whole story of a request. What fails on the way is a `FailureKind` in a
`RequestPhase`, and the table in `epd_portable.delivery.fallbacks` says what is done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping

import msgspec

from epd_portable.config.secret import Secret
from epd_portable.delivery.fallbacks import (
    RequestFailure,
    RequestPhase,
    RetryBudget,
)
from epd_portable.delivery.instances import EndpointPool, Instance, WentDownError, while_up
from epd_portable.delivery.replies import Reply, unavailable
from epd_portable.errors import RequestError
from epd_portable.log import say_failure, trace
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import Call, size
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.delivery import (
    Attempt,
    Deliverer,
    EncodeFailure,
    Forwarder,
    RequestPlan,
    connection_failure,
    end_soon,
    expected_transfer,
)
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.hops import HopSelection
from epd_portable.router.http.events import EVENTS, WholeEvents, failed_stream, first_event
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.http.upstream_connection import InstanceAnswer, UpstreamError
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.planner import Planner, RequestState
from epd_portable.router.prefill import (
    MAX_PREFILLS,
    Prefill,
    as_prefill_failure,
    for_prefill,
)
from epd_portable.router.selector import EndpointSelector, Selection
from epd_portable.router.settings import RouterSettings
from epd_portable.router.store import StoreLookup
from epd_portable.wire.messages import NackCode
from epd_portable.wire.outcomes import FailureKind, Fallback
from epd_portable.wire.params import EncodedItem, PrefillOutcome, PrefillParams

logger = logging.getLogger(__name__)
_said = say_failure(logger, "delivery of an item failed")

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""
ANSWER_HEADERS = ("content-type", "retry-after", "endpoint-load-metrics")
"""Headers of an instance's answer that clients get."""
_CONNECTION_LOST = (FailureKind.LOST, FailureKind.UNREACHABLE)
_OUTCOME = b'"ec_transfer_params"'
_MAX_HELD_BYTES = 1 << 20
"""The longest part of an answer that is buffered until the rest of it is there."""


class Exchange:
    """Sends calls to instances and brings the answers back.

    Args:
        settings: Of the router.
        instances: Instances to choose from.
        selector: Chooses instances for a request and its items.
        upstream: HTTP connections to instances.
        control: Channels to PD instances, for messages about items.
        metrics: Metrics of the router.
        secret: Signs transfers.
        store: Is looked up before encoders are chosen.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: EndpointPool,
        selector: EndpointSelector,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        secret: Secret,
        store: StoreLookup,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._selector = selector
        self._upstream = upstream
        self._control = control
        self._metrics = metrics
        self._retries = RetryBudget()
        self._store = store
        self._deliverer = Deliverer(settings, upstream, control, self._retries, store)
        self._jobs: set[asyncio.Task[None]] = set()
        self._planner = Planner(settings, instances, self._deliverer.times, metrics, secret)

    async def close(self) -> None:
        """Cancel encode jobs that outlived their requests; ask the store no more."""
        self._store.close()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def serve(
        self, call: Call, out: ClientExchange, forwarder: Forwarder | None = None
    ) -> None:
        """Answer a call; to cancel it aborts the work at the instances.

        Args:
            call: The request.
            out: Takes the answer.
            forwarder: Carries request and answer; this exchange if there is no other.

        Raises:
            RequestError: There will be no answer, or no more of one that has begun; says why.
        """
        record = out.record
        record.has(call.items)
        self._retries.count_request()
        forwarder = forwarder or self
        headers = out.for_instances
        selection = self._selector.start_selection(call, headers, out.explanation)
        if out.named is not None:
            selection = HopSelection(out.named, call, self._instances, selection)
        as_metadata = any(map(self._planner.goes_as_metadata, call.items))
        state = RequestState(
            call=call,
            selection=selection,
            record=record,
            stored=await self._store.find(call.items),
            metadata_only=call.takes_metadata and as_metadata,
        )
        asked = ""
        while True:
            try:
                plan = self._planner.plan(forwarder, state)
                asked = plan.pd.name
                prefilled = await self._prefilled(state, plan, headers, out)
                if prefilled is not None:
                    with record.leg("answer", asked) as leg:
                        sent = leg.headers(headers)
                        await self._try(forwarder, prefilled, plan, selection, sent, out)
                return
            except RequestFailure as failed:
                if out.gone:
                    # Both came at once, and this one was heard of.
                    return
                possible = self._possible(failed, state, asked)
                fallback = record.fall_back(failed.phase, failed.kind, possible)
                logger.warning("request %s: %s (%s)", headers["x-request-id"], failed, fallback)
                if not self._go_on(fallback, failed, state, asked, out):
                    await self._end(failed, fallback, out)
                    return

    def _go_on(
        self,
        fallback: Fallback,
        failed: RequestFailure,
        state: RequestState,
        asked: str,
        out: ClientExchange,
    ) -> bool:
        """Prepare the next try, and return whether there is one."""
        if failed.phase is RequestPhase.PREFILL:
            # The instance that failed is noted where it was asked.
            if fallback == "local":
                state.prefills += [""] * MAX_PREFILLS
        elif fallback == "retried":
            state.tried.append(asked)
            state.lost = failed.kind in _CONNECTION_LOST
        elif fallback == "original_media":
            renamed = state.call.renamed()
            state.record.rename(state.call.items, renamed.items)
            state.call, state.metadata_only = renamed, False
        elif fallback == "left_out":
            for item in state.call.items:
                if item.item_uuid in failed.items:
                    state.record.end_item(item, "left_out")
            state.call = state.call.without(failed.items)
            out.left_out += len(failed.items)
        else:
            return False
        return True

    async def _prefilled(
        self,
        state: RequestState,
        plan: RequestPlan,
        headers: Mapping[str, str],
        out: ClientExchange,
    ) -> Call | None:
        """Have the prompt computed, if the plan says so, and return what then is to be answered.

        Nothing is, if the request was refused.

        Raises:
            RequestFailure: There is no KV.
        """
        call = state.call
        if plan.prefill is None:
            return call
        stage = Prefill(
            call, self._ask, self.explain, self.without_outcome, self._planner.without_kv
        )
        name = plan.prefill.pd.name
        try:
            with out.record.leg("prefill", name) as leg:
                sent = leg.headers(headers)
                await self._try(stage, for_prefill(call), plan.prefill, state.selection, sent, out)
        except RequestFailure as failed:
            state.prefills.append(name)
            raise as_prefill_failure(failed) from failed
        if stage.refusal is not None:
            out.whole(stage.refusal)
            return None
        return stage.call

    async def _try(
        self,
        forwarder: Forwarder,
        call: Call,
        plan: RequestPlan,
        selection: Selection,
        headers: Mapping[str, str],
        out: ClientExchange,
    ) -> None:
        """Start the encode jobs and the request, and have the answer passed on.

        Raises:
            RequestFailure: There is no answer, or only a part of it.
        """
        pd = plan.pd
        transfers = [each.transfer.transfer_id for each in plan.deliveries]
        try:
            with (
                while_up(pd.working()) as use,
                self._control.expect(transfers) as inbox,
                contextlib.ExitStack() as held,
            ):
                awaited = len(plan.deliveries)
                one = Attempt(
                    use,
                    plan.deliveries,
                    headers,
                    inbox,
                    selection,
                    out.encoded,
                    out.record,
                    held,
                    awaited=awaited,
                )
                tokens = selection.note_request(pd, () if plan.prefill else call.items)
                if tokens and not plan.prefill:
                    held.enter_context(pd.computing(tokens))
                if plan.here_s:
                    held.enter_context(pd.encoding(plan.here_s))
                if plan.prefill:
                    # Its KV is read until the answer begins.
                    held.enter_context(plan.prefill.pd.held())
                if plan.here_s or not awaited:
                    use.compute()
                jobs = self._start_jobs(one)
                try:
                    metadata = await self._await_metadata(one)
                    body = call.for_pd(self._params(plan, metadata), metadata or None)
                    trace(
                        "pd_request",
                        request_id=headers["x-request-id"],
                        instance=pd.name,
                        nbytes=size(body),
                    )
                    status = await forwarder.forward(call, one, body, out)
                    if status >= 400:
                        self._give_up(one, jobs)
                except BaseException:
                    self._give_up(one, jobs)
                    raise
                end_soon(jobs)
        except WentDownError as error:
            message = f"instance {pd.name} {error}"
            raise RequestFailure(FailureKind.LOST, phase_of(out), message) from error

    def _start_jobs(self, one: Attempt) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        jobs = []
        for index, delivery in enumerate(one.deliveries):
            if delivery.encoder is not None:
                one.held.enter_context(delivery.encoder.held())
            if delivery.metadata_only:
                one.metadata[delivery.transfer.transfer_id] = loop.create_future()
            job = loop.create_task(self._deliverer.deliver(delivery, index, one))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
            job.add_done_callback(_said)
            jobs.append(job)
        return jobs

    def _give_up(self, one: Attempt, jobs: Iterable[asyncio.Task[None]]) -> None:
        """End the calls to encoders, and tell the PD instance that nobody asks for the items."""
        one.over.set()
        for job in jobs:
            job.cancel()
        if one.deliveries:
            ids = [each.transfer.transfer_id for each in one.deliveries]
            self._control.not_wanted(one.pd.name, ids)

    # The request to the PD instance, and what its answers say.

    async def _await_metadata(self, one: Attempt) -> dict[str, EncodedItem]:
        """Wait until encoders have said what the items are; by the names that these have here.

        Raises:
            RequestFailure: Of some item it cannot be obtained.
        """
        metadata: dict[str, EncodedItem] = {}
        for delivery in one.deliveries:
            if not delivery.metadata_only:
                continue
            answer = await one.metadata[delivery.transfer.transfer_id]
            missing = [delivery.item.item_uuid]
            if isinstance(answer, EncodeFailure):
                refused = answer.kind is FailureKind.REFUSED
                kind = FailureKind.REFUSED if refused else FailureKind.MISSING
                remedy = "" if refused else "; try again later"
                message = f"{answer.reason}{remedy}"
                raise RequestFailure(kind, RequestPhase.ANSWER, message, items=missing)
            if answer.metadata == {} and answer.modality not in self._planner.without_metadata:
                self._planner.without_metadata.add(answer.modality)
                logger.warning(
                    "items of modality %r cannot be described by metadata with this model and "
                    "version of vLLM: prefill+decode instances get media, as with transfer.media "
                    "concurrent",
                    answer.modality,
                )
            if not answer.metadata:
                name = delivery.encoder.name if delivery.encoder else "the store"
                message = f"{name} knows no metadata of an item; try again later"
                raise RequestFailure(
                    FailureKind.MISSING, RequestPhase.ANSWER, message, items=missing
                )
            metadata[delivery.item.item_uuid] = answer
        return metadata

    def _params(
        self, plan: RequestPlan, metadata: Mapping[str, EncodedItem]
    ) -> PrefillParams | None:
        """Return what the PD instance may expect."""
        if not plan.deliveries:
            return None
        transfers = tuple(
            expected_transfer(
                each.transfer,
                each.encoder,
                metadata.get(each.item.item_uuid),
                each.stored.key if each.stored else "",
            )
            for each in plan.deliveries
        )
        return PrefillParams(transfers=transfers, reply_to=self._control.identity)

    # As a forwarder.

    def choose(self, selection: Selection, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer a request; see `Forwarder`."""
        return selection.choose_pd(tried)

    async def forward(self, call: Call, one: Attempt, body: Segments, out: ClientExchange) -> int:
        """Send a request and relay the answer; see `Forwarder`."""
        answer = await self._ask(one.pd, call, body, one.headers)
        try:
            return await self._relay(call, answer, one, out)
        finally:
            answer.close()

    async def _ask(
        self, pd: Instance, call: Call, body: Segments, headers: Mapping[str, str]
    ) -> InstanceAnswer:
        try:
            return await self._upstream.request(
                call.method,
                f"{pd.url}{call.path}?{call.query}" if call.query else pd.url + call.path,
                body=body,
                headers=headers,
                connect_s=self._settings.connect_timeout_s,
                silent_s=self._settings.idle_timeout_s,
            )
        except UpstreamError as error:
            raise connection_failure(pd, error, RequestPhase.ANSWER) from error

    async def _relay(
        self, call: Call, answer: InstanceAnswer, one: Attempt, out: ClientExchange
    ) -> int:
        """Pass an answer on, once it is known to be no 5xx; return the status that it has.

        Raises:
            RequestFailure: It is one, or it ended too early.
        """
        pd = one.pd
        given = answer.headers
        headers = {name: given[name] for name in ANSWER_HEADERS if name in given}
        succeeded = answer.status < 400
        events = WholeEvents(out)
        try:
            if succeeded and headers.get("content-type", "").startswith(EVENTS):
                first = await first_event(answer)
                reply = failed_stream(first)
                if reply is None:
                    _begin(one, answer.status, headers, out)
                    if first and not events.take(first):
                        await out.writable()
                    await answer.pass_on(pd.hearing(events.take), out.writable)
                    events.end_answer()
                    return answer.status
            else:
                body = await answer.read(_MAX_HELD_BYTES if succeeded and not call.items else None)
                if not answer.over:
                    if "content-length" in given:
                        headers["content-length"] = given["content-length"]
                    _begin(one, answer.status, headers, out)
                    if not out.write(body):
                        await out.writable()
                    await answer.pass_on(pd.hearing(out.write), out.writable)
                    out.end_answer()
                    return answer.status
                reply = Reply(answer.status, headers, body)
        except UpstreamError as error:
            if events.is_complete:  # It was lost after its last word.
                events.end_answer()
                return answer.status
            raise connection_failure(pd, error, phase_of(out)) from error
        one.note_answer_began()
        if reply.status >= 500:
            pd.failed(FailureKind.ERROR)
            await self.explain(one)
            raise RequestFailure(
                FailureKind.ERROR,
                RequestPhase.ANSWER,
                f"instance {pd.name} answered {reply.status}: {reply.body[:200]!r}",
                reply,
            )
        pd.answered()
        out.whole(self.without_outcome(reply) if call.items else reply)
        return reply.status

    async def explain(self, one: Attempt) -> None:
        """Raise the reason why a PD instance failed, if it comes over the control channel.

        Raises:
            RequestFailure: It has come.
        """
        if one.deliveries and not one.inbox.nacks:
            await one.inbox.wait(self._settings.nack_grace_s)
        for nack in one.inbox.nacks:
            if nack.code is NackCode.TOO_LARGE:
                raise RequestFailure(FailureKind.TOO_LARGE, RequestPhase.ANSWER, nack.detail)
        if one.inbox.nacks:
            refused = {nack.transfer_id for nack in one.inbox.nacks}
            missing = [
                each.item.item_uuid
                for each in one.deliveries
                if each.transfer.transfer_id in refused
            ]
            detail = one.inbox.nacks[0].detail
            raise RequestFailure(FailureKind.MISSING, RequestPhase.ANSWER, detail, items=missing)

    def without_outcome(self, reply: Reply) -> Reply:
        """Count where the items came from; clients get it only where the settings say so."""
        if _OUTCOME not in reply.body:
            return reply
        try:
            fields = msgspec.json.decode(reply.body, type=dict[str, msgspec.Raw])
            outcome = msgspec.json.decode(
                fields.pop("ec_transfer_params", msgspec.Raw(b"null")), type=PrefillOutcome | None
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("an answer's ec_transfer_params cannot be read: %r", str(error))
            return reply
        if outcome is not None:
            self._metrics.had(outcome)
        if self._settings.item_outcomes:
            return reply
        return Reply(reply.status, reply.headers, msgspec.json.encode(fields))

    def _possible(
        self, failed: RequestFailure, state: RequestState, asked: str
    ) -> tuple[Fallback, ...]:
        """Return the fallbacks that depend on more than why and when it failed."""
        if state.metadata_only and self._settings.local_encode:
            media: tuple[Fallback, ...] = ("original_media",)
        elif failed.items and state.call.takes_metadata and self._settings.partial_results:
            media = ("left_out",)
        else:
            media = ()
        again: tuple[Fallback, ...] = ()
        if (
            failed.phase is RequestPhase.PREFILL
            and len(state.prefills) < MAX_PREFILLS
            and state.selection.choose_prefill(state.prefills) is not None
            and self._retries.spend()
        ):
            again = ("retried",)
        tried = [*state.tried, asked]
        if failed.phase is RequestPhase.ANSWER and len(tried) < MAX_PD_ATTEMPTS:
            lost = failed.kind in _CONNECTION_LOST
            failing = failed.kind is FailureKind.ERROR
            # An instance's own error says more than that there is no other instance.
            other = failing and state.selection.choose_pd(tried) is not None
            if (lost or other) and self._retries.spend():
                again = ("retried",)
        return (*media, *again)

    async def _end(self, failed: RequestFailure, fallback: Fallback, out: ClientExchange) -> None:
        """Tell the client of a failure that nothing can be done about.

        Raises:
            RequestError: Unless the instance's own answer says it.
        """
        if fallback == "error":
            assert failed.reply is not None
            out.whole(failed.reply)
        elif fallback == "incomplete":
            message = f"{failed}: the answer is incomplete; send the request again"
            raise RequestError(message, status=502, code="instance_lost")
        elif fallback == "timeout":
            raise RequestError(
                f"{failed}: the request is given up; ask for fewer tokens or raise that limit",
                status=504,
                code="timeout",
            )
        elif fallback == "refused" and failed.kind is FailureKind.TOO_LARGE:
            raise RequestError(str(failed), status=413, code="item_too_large")
        elif fallback == "refused":
            raise RequestError(str(failed), status=400, code="item_refused")
        elif failed.kind is FailureKind.MISSING:
            raise unavailable(str(failed))
        else:
            raise unavailable(f"{failed}; try again later")


def phase_of(out: ClientExchange) -> RequestPhase:
    """Return how far a request is that an instance has: what counts is what the client has."""
    return RequestPhase.STREAM if out.begun else RequestPhase.ANSWER


def _begin(one: Attempt, status: int, headers: Mapping[str, str], out: ClientExchange) -> None:
    """Begin an answer that is passed on as it comes."""
    one.note_answer_began()
    one.pd.answered()
    out.begin_answer(status, headers)

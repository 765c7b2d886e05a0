"""One client request across the instances: read → plan → encode jobs and request at once → relay.

`Exchange.serve` is the whole story of a request. What goes wrong on the way is a `Trouble` at a
`Point`, and the table in `ladder` says what is done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from epd_portable.config.secret import Secret
from epd_portable.errors import RequestError
from epd_portable.log import say_failure, trace
from epd_portable.router.body import Call, size
from epd_portable.router.control import ControlChannels
from epd_portable.router.cut_text import Segments
from epd_portable.router.delivery import (
    Attempt,
    Deliverer,
    Delivery,
    EncodeFailure,
    expected_transfer,
    new_transfer,
)
from epd_portable.router.elastic import sooner_here
from epd_portable.router.instances import Fleet, Instance, WentDownError, while_up
from epd_portable.router.ladder import Failed, Point, RetryBudget, Trouble, descend
from epd_portable.router.media import MediaItem
from epd_portable.router.metrics import Metrics, Rung
from epd_portable.router.replies import JSON, Reply, unavailable
from epd_portable.router.settings import RouterSettings
from epd_portable.router.upstream import Upstream
from epd_portable.router.upstream_connection import Fault, InstanceAnswer, UpstreamError
from epd_portable.wire.messages import NackCode
from epd_portable.wire.params import EncodedItem, PrefillOutcome, PrefillParams

logger = logging.getLogger(__name__)
_said = say_failure(logger, "delivery of an item failed")

MAX_PD_ATTEMPTS = 2
"""Times that one request is sent: one that kills its instance must not walk over them all."""
JOB_GRACE_S = 2.0
"""Encode jobs may still be answered for this long after the PD instance has finished."""
ANSWER_HEADERS = ("content-type", "retry-after", "endpoint-load-metrics")
"""Headers of an instance's answer that clients get."""
EVENTS = "text/event-stream"
"""Content type of answers that come event by event."""
_ERROR_EVENT = b'data: {"error"'
_OUTCOME = b'"ec_transfer_params"'
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MAX_HELD_BYTES = 1 << 20
"""The longest part of an event that is held back until the rest of it is there, and of another
answer."""


class Outgoing(Protocol):
    """Where an answer goes.

    Attributes:
        begun: Whether its status and headers are sent.
        gone: Nobody waits for it any more.
    """

    begun: bool
    gone: bool

    def whole(self, reply: Reply) -> None:
        """Send a whole answer."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers of an answer that comes in pieces."""

    def write(self, data: bytes) -> bool:
        """Send a piece; tell whether the client takes more at once."""

    async def writable(self) -> None:
        """Return when the client takes more."""

    def end(self) -> None:
        """Send the end."""


class Carrier(Protocol):
    """Brings requests to PD instances and their answers to clients; `Exchange` is one itself."""

    def choose(self, key: str, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer a request; ``None`` if there is none.

        Args:
            key: Of the request.
            tried: Names of instances that must not get it.
        """

    async def carry(self, call: Call, one: Attempt, body: Segments, out: Outgoing) -> int:
        """Send a request, pass the answer on to its end, and return the answer's status.

        Calls `Attempt.begin` as soon as the instance has begun to answer.

        Args:
            call: The request.
            one: Says who answers, and with which headers the request goes.
            body: Of the request.
            out: Takes the answer.

        Raises:
            Failed: There is no answer, or only a part of it.
            RequestError: The same, and nothing can be done about it.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """Every choice for one try of a request.

    Attributes:
        pd: Who answers.
        deliveries: Of the items that encoders bring; the others it encodes by itself.
        here_s: How long it will take for those that it encodes by choice.
    """

    pd: Instance
    deliveries: tuple[Delivery, ...] = ()
    here_s: float = 0.0


class Exchange:
    """Sends calls to instances and brings the answers back.

    Args:
        settings: Of the router.
        instances: Who is there.
        upstream: Connections to them.
        control: Channels to PD instances, for what concerns items.
        metrics: Count what happens.
        secret: Vouches for transfers.
    """

    def __init__(
        self,
        settings: RouterSettings,
        instances: Fleet,
        upstream: Upstream,
        control: ControlChannels,
        metrics: Metrics,
        secret: Secret,
    ) -> None:
        self._settings = settings
        self._instances = instances
        self._upstream = upstream
        self._control = control
        self._metrics = metrics
        self._secret = secret
        self._retries = RetryBudget()
        self._deliverer = Deliverer(settings, instances, upstream, control, metrics, self._retries)
        self._jobs: set[asyncio.Task[None]] = set()
        self._without_metadata: set[str] = set()
        self._elastic = (
            settings.elastic_encode and settings.local_encode and settings.media == "concurrent"
        )

    async def close(self) -> None:
        """Cancel encode jobs that outlived their requests."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def serve(
        self,
        call: Call,
        headers: Mapping[str, str],
        out: Outgoing,
        carrier: Carrier | None = None,
    ) -> None:
        """Answer a call; to cancel it aborts the work at the instances.

        Args:
            call: The request.
            headers: To send along to every instance; ``x-request-id`` is among them.
            out: Takes the answer.
            carrier: Carries request and answer; this exchange if there is no other.

        Raises:
            RequestError: There will be no answer, or no more of one that has begun; says why.
        """
        for item in call.items:
            self._metrics.modalities.labels(item.modality).inc()
        self._retries.request()
        carrier = carrier or self
        bare = call.takes_metadata and any(self._goes_bare(item) for item in call.items)
        tried: list[str] = []
        asked = ""
        lost = False
        while True:
            try:
                plan = self._plan(carrier, call, headers, tried, bare=bare, same=lost)
                asked = plan.pd.name
                await self._try(carrier, call, plan, headers, out)
                return
            except Failed as failed:
                if out.gone:
                    # Both came at once, and this one was heard of.
                    return
                possible = self._possible(failed, headers, [*tried, asked], bare=bare)
                rung = descend(failed.trouble, failed.point, possible, self._metrics)
                logger.warning("request %s: %s (%s)", headers["x-request-id"], failed, rung)
                if rung == "pd_again":
                    tried.append(asked)
                    lost = failed.trouble is Trouble.PD_LOST
                elif rung == "original_media":
                    call, bare = call.renamed(), False
                else:
                    await self._end(failed, rung, out)
                    return

    def _plan(
        self,
        carrier: Carrier,
        call: Call,
        headers: Mapping[str, str],
        tried: Collection[str],
        *,
        bare: bool,
        same: bool,
    ) -> RequestPlan:
        """Choose who answers, and an encoder for every item.

        Args:
            carrier: Chooses who answers.
            call: The request.
            headers: Of the request.
            tried: PD instances that failed it.
            bare: Encoders' metadata go in place of media, where the model allows it.
            same: With no other PD instance, one that failed may be asked again: its connection
                broke, and it may be well.

        Raises:
            Failed: There is no PD instance; or ``bare``, and an item has no encoder.
        """
        key = headers["x-request-id"]
        pd = carrier.choose(key, tried)
        if pd is None and same:
            pd = carrier.choose(key, ())
        if pd is None:
            raise Failed(Trouble.NO_PD, Point.ASKED, self._why_no_pd())
        encoders = self._instances.encoders(item.mm_hash for item in call.items)
        here, here_s = self._encoded_here(call.items, encoders, pd)
        deliveries: list[Delivery] = []
        for item, encoder in zip(call.items[here:], encoders[here:], strict=True):
            goes_bare = bare and self._goes_bare(item)
            if encoder is None and goes_bare:
                raise Failed(Trouble.NO_ENCODER, Point.ASKED, "no encoder is healthy")
            if encoder is None:
                self._metrics.item("no_encoder")
                descend(Trouble.NO_ENCODER, Point.ENCODING, (), self._metrics)
                continue
            transfer = new_transfer(item, pd, self._secret)
            job = call.for_encoder(item, transfer)
            deliveries.append(
                Delivery(item=item, transfer=transfer, encoder=encoder, body=job, bare=goes_bare)
            )
        return RequestPlan(pd=pd, deliveries=tuple(deliveries), here_s=here_s)

    def _encoded_here(
        self, items: Sequence[MediaItem], encoders: Sequence[Instance | None], pd: Instance
    ) -> tuple[int, float]:
        """Return how many of the first items the PD instance encodes by choice, and their time."""
        asked = [encoder for encoder in encoders if encoder is not None]
        if not self._elastic or not items or len(asked) < len(items):
            return 0, 0.0
        times = self._deliverer.times
        threshold = self._settings.elastic_threshold
        count, reason = sooner_here(items, asked, pd, times, threshold=threshold)
        for _ in range(count):
            self._metrics.item("sooner_here")
            self._metrics.elastic.labels(reason).inc()
        return count, sum(map(times.of, items[:count]))

    async def _try(
        self,
        carrier: Carrier,
        call: Call,
        plan: RequestPlan,
        headers: Mapping[str, str],
        out: Outgoing,
    ) -> None:
        """Start the encode jobs and the request, and have the answer passed on.

        Raises:
            Failed: There is no answer, or only a part of it.
        """
        pd = plan.pd
        transfers = [each.transfer.transfer_id for each in plan.deliveries]
        try:
            with (
                while_up(pd.working()),
                self._control.expect(transfers) as inbox,
                contextlib.ExitStack() as working,
                contextlib.ExitStack() as held,
            ):
                one = Attempt(pd, plan.deliveries, headers, inbox, held, working=working)
                held.enter_context(pd.encoding(plan.here_s))
                one.awaited = len(plan.deliveries)
                if plan.here_s or not one.awaited:
                    one.has_all()
                jobs = self._start_jobs(one)
                try:
                    told = await self._told(one)
                    body = call.for_pd(self._params(plan, told), told or None)
                    trace(
                        "pd_request",
                        request_id=headers["x-request-id"],
                        instance=pd.name,
                        nbytes=size(body),
                    )
                    status = await carrier.carry(call, one, body, out)
                    if status >= 400:
                        self._give_up(one, jobs)
                except BaseException:
                    self._give_up(one, jobs)
                    raise
                _end_soon(jobs)
        except WentDownError as error:
            point = Point.ANSWERING if out.begun else Point.ASKED
            raise Failed(Trouble.PD_LOST, point, f"instance {pd.name} {error}") from error

    def _start_jobs(self, one: Attempt) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        jobs = []
        for index, delivery in enumerate(one.deliveries):
            one.held.enter_context(delivery.encoder.held())
            if delivery.bare:
                one.told[delivery.transfer.transfer_id] = loop.create_future()
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

    async def _told(self, one: Attempt) -> dict[str, EncodedItem]:
        """Wait until encoders have said what the items are; by the names that these have here.

        Raises:
            Failed: Of some item it cannot be had.
        """
        told: dict[str, EncodedItem] = {}
        for delivery in one.deliveries:
            if not delivery.bare:
                continue
            answer = await one.told[delivery.transfer.transfer_id]
            if isinstance(answer, EncodeFailure):
                refused = answer.trouble is Trouble.ITEM_REFUSED
                trouble = Trouble.ITEM_REFUSED if refused else Trouble.NO_METADATA
                raise Failed(trouble, Point.ASKED, answer.reason)
            if answer.metadata == {} and answer.modality not in self._without_metadata:
                self._without_metadata.add(answer.modality)
                logger.warning(
                    "items of modality %r cannot be described by metadata with this model and "
                    "version of vLLM: prefill+decode instances get media, as with transfer.media "
                    "concurrent",
                    answer.modality,
                )
            if not answer.metadata:
                name = delivery.encoder.name
                raise Failed(
                    Trouble.NO_METADATA, Point.ASKED, f"{name} knows no metadata of an item"
                )
            told[delivery.item.mm_hash] = answer
        return told

    def _params(self, plan: RequestPlan, told: Mapping[str, EncodedItem]) -> PrefillParams | None:
        """Return what the PD instance may expect."""
        if not plan.deliveries:
            return None
        transfers = tuple(
            expected_transfer(each.transfer, each.encoder, told.get(each.item.mm_hash))
            for each in plan.deliveries
        )
        return PrefillParams(transfers=transfers, reply_to=self._control.identity)

    # As a carrier.

    def choose(self, key: str, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer a request; see `Carrier`."""
        return self._instances.prefill_decode(key, exclude=tried)

    async def carry(self, call: Call, one: Attempt, body: Segments, out: Outgoing) -> int:
        """Send a request and relay the answer; see `Carrier`."""
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
            raise _failed(pd, error, Point.ASKED) from error

    async def _relay(
        self,
        call: Call,
        answer: InstanceAnswer,
        one: Attempt,
        out: Outgoing,
    ) -> int:
        """Pass an answer on, once it is known to be no 5xx; return the status that it has.

        Raises:
            Failed: It is one, or it ended too early.
        """
        pd = one.pd
        given = answer.headers
        headers = {name: given[name] for name in ANSWER_HEADERS if name in given}
        succeeded = answer.status < 400
        try:
            if succeeded and headers.get("content-type", "").startswith(EVENTS):
                first = await _first_event(answer)
                reply = _failed_stream(first)
                if reply is None:
                    _begin(one, answer.status, headers, out)
                    events = _WholeEvents(out)
                    if first and not events.take(first):
                        await out.writable()
                    await answer.pass_on(events.take, out.writable)
                    events.end()
                    return answer.status
            else:
                body = await answer.read(_MAX_HELD_BYTES if succeeded and not call.items else None)
                if not answer.over:
                    if "content-length" in given:
                        headers["content-length"] = given["content-length"]
                    _begin(one, answer.status, headers, out)
                    if not out.write(body):
                        await out.writable()
                    await answer.pass_on(out.write, out.writable)
                    out.end()
                    return answer.status
                reply = Reply(answer.status, headers, body)
        except UpstreamError as error:
            raise _failed(pd, error, Point.ANSWERING) from error
        one.begin()
        if reply.status >= 500:
            pd.failed("error")
            await self.explain(one)
            raise Failed(
                Trouble.PD_FAILED,
                Point.ASKED,
                f"instance {pd.name} answered {reply.status}: {reply.body[:200]!r}",
                reply,
            )
        pd.answered()
        out.whole(self.without_outcome(reply) if call.items else reply)
        return reply.status

    async def explain(self, one: Attempt) -> None:
        """Raise the reason why a PD instance failed, if it comes over the control channel.

        Raises:
            Failed: It has come.
        """
        if one.deliveries and not one.inbox.nacks:
            await one.inbox.wait(self._settings.nack_grace_s)
        for nack in one.inbox.nacks:
            if nack.code is NackCode.TOO_LARGE:
                raise Failed(Trouble.PD_TOO_LARGE, Point.ASKED, nack.detail)
        if one.inbox.nacks:
            raise Failed(Trouble.PD_UNAVAILABLE, Point.ASKED, one.inbox.nacks[0].detail)

    def without_outcome(self, reply: Reply) -> Reply:
        """Count how the items were had; clients are told only where the settings say so."""
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
        for item in outcome.items if outcome is not None else ():
            self._metrics.sources.labels(item.source, item.path).inc()
        if self._settings.item_outcomes:
            return reply
        return Reply(reply.status, reply.headers, msgspec.json.encode(fields))

    def _possible(
        self, failed: Failed, headers: Mapping[str, str], tried: Collection[str], *, bare: bool
    ) -> tuple[Rung, ...]:
        """Return the rungs that depend on more than what went wrong and when."""
        if bare and self._settings.local_encode:
            media: tuple[Rung, ...] = ("original_media",)
        else:
            media = ()
        again: tuple[Rung, ...] = ()
        if failed.point is Point.ASKED and len(tried) < MAX_PD_ATTEMPTS:
            lost = failed.trouble is Trouble.PD_LOST
            failing = failed.trouble is Trouble.PD_FAILED
            key = headers["x-request-id"]
            # An instance's own error says more than that there is no other instance.
            other = failing and self._instances.prefill_decode(key, exclude=tried) is not None
            if (lost or other) and self._retries.take():
                again = ("pd_again",)
        return (*media, *again)

    async def _end(self, failed: Failed, rung: Rung, out: Outgoing) -> None:
        """Tell the client of a failure that nothing can be done about.

        Raises:
            RequestError: Unless the instance's own answer says it.
        """
        if rung == "passed_on":
            assert failed.reply is not None
            out.whole(failed.reply)
        elif rung == "broken_off":
            message = f"{failed}: the answer is incomplete; send the request again"
            raise RequestError(message, status=502, code="instance_lost")
        elif rung == "timeout":
            raise RequestError(
                f"{failed}: the request is given up; ask for fewer tokens or raise that limit",
                status=504,
                code="timeout",
            )
        elif rung == "refused" and failed.trouble is Trouble.PD_TOO_LARGE:
            raise RequestError(str(failed), status=413, code="item_too_large")
        elif rung == "refused":
            raise RequestError(str(failed), status=400, code="item_refused")
        elif failed.trouble is Trouble.PD_UNAVAILABLE:
            raise unavailable(str(failed))
        else:
            raise unavailable(f"{failed}; try again later")

    def _goes_bare(self, item: MediaItem) -> bool:
        """Tell whether an item is tried without its media first."""
        if self._settings.media != "metadata":
            return False
        return not self._settings.local_encode or item.modality not in self._without_metadata

    def _why_no_pd(self) -> str:
        states = "; ".join(
            f"{each.name}: {each.reason or each.state}"
            for each in self._instances.of_role("prefill-decode")[:8]
        )
        return f"no prefill+decode instance can serve ({states or 'none is there'})"


def silent(pd: Instance, point: Point) -> Failed:
    """Return the failure by a PD instance from which nothing came any more."""
    message = f"instance {pd.name} was silent for longer than router.idle_timeout_s"
    return Failed(Trouble.PD_SILENT, point, message)


def _failed(pd: Instance, error: UpstreamError, point: Point) -> Failed:
    """Return what an error of the connection is to the request."""
    pd.failed(error.fault)
    if error.fault is Fault.SILENT:
        return silent(pd, point)
    return Failed(Trouble.PD_LOST, point, f"instance {pd.name} was lost: {error}")


async def _first_event(answer: InstanceAnswer) -> bytes:
    """Return the beginning of a stream, until it is clear whether it is an error."""
    first = await answer.piece()
    while first and first.startswith(_ERROR_EVENT[: len(first)]) and not _whole_events(first):
        more = await answer.piece()
        if not more:
            break
        first += more
    return first


def _begin(one: Attempt, status: int, headers: Mapping[str, str], out: Outgoing) -> None:
    """Begin an answer that is passed on as it comes."""
    one.begin()
    one.pd.answered()
    out.begin(status, headers)


class _WholeEvents:
    """Passes whole events on as they come: what ends within one is none to the client."""

    def __init__(self, out: Outgoing) -> None:
        self._out = out
        self._held = b""

    def take(self, data: bytes) -> bool:
        """Take a piece of the stream; tell whether the client takes more at once."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_EVENT_ENDS) and len(data) < _MAX_HELD_BYTES:
            end = _whole_events(data)
            data, self._held = data[:end], data[end:]
        return not data or self._out.write(data)

    def end(self) -> None:
        """Send what is left, and the end."""
        if self._held:
            self._out.write(self._held)
        self._out.end()


def _whole_events(data: bytes) -> int:
    """Return how many of these bytes are whole events."""
    return max(place + len(end) if (place := data.rfind(end)) >= 0 else 0 for end in _EVENT_ENDS)


class _EngineError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EngineError


def _failed_stream(first: bytes) -> Reply | None:
    """Return the answer to a streamed request that failed before its first token."""
    if not first.startswith(_ERROR_EVENT):
        return None
    event = first.partition(b"\n")[0].rstrip().removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = 500
    return Reply(status if 400 <= status <= 599 else 500, JSON, event)


def _end_soon(jobs: Iterable[asyncio.Task[None]]) -> None:
    """Cancel jobs whose encoders do not answer soon, though nobody waits for them."""
    waiting = [job for job in jobs if not job.done()]
    if not waiting:
        return
    timer = asyncio.get_running_loop().call_later(
        JOB_GRACE_S, lambda: [job.cancel() for job in waiting]
    )
    left = len(waiting)

    def ended(_: asyncio.Task[None]) -> None:
        nonlocal left
        left -= 1
        if not left:
            timer.cancel()

    for job in waiting:
        job.add_done_callback(ended)

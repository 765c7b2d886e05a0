"""Requests to the instances that answer or prefill, and their answers to clients."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from epd_portable.placement.fallbacks import RequestFailure, RequestPhase
from epd_portable.placement.instances import Instance
from epd_portable.placement.replies import JSON, Reply
from epd_portable.router.client_exchange import EVENTS, ClientExchange
from epd_portable.router.contents.cut_text import Segments, decode_if_valid
from epd_portable.router.encode_jobs import Attempt
from epd_portable.router.http.upstream import InstanceAnswer, Upstream, UpstreamError
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.messages import NackCode
from epd_portable.wire.outcomes import FailureKind
from epd_portable.wire.params import PrefillOutcome

logger = logging.getLogger(__name__)

ANSWER_HEADERS = ("content-type", "retry-after", "endpoint-load-metrics")
"""Headers of an instance's answer that clients get."""
MAX_HELD_BYTES = 1 << 20
"""The longest part of an answer, or of an event, that is kept until the rest of it is there."""
_OUTCOME = b'"ec_transfer_params"'
_ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
"""How streams begin that failed before their first token; Anthropic's interface names events."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LAST_EVENTS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
"""How the last event of a stream begins, in either interface."""


@dataclass(slots=True)
class Relay:
    """Brings requests to PD instances and their answers to clients."""

    settings: RouterSettings
    upstream: Upstream
    metrics: Metrics

    async def forward(self, attempt: Attempt, body: Segments) -> int:
        """Send a request, pass the answer on to its end, and return the answer's status.

        Calls `Attempt.note_answer_began` as soon as the instance has begun to answer.

        Raises:
            RequestFailure: There is no answer, or only a part of it.
            RequestError: The same, and nothing can be done about it.
        """
        answer = await self.send(attempt, body)
        try:
            return await self._pass_on(answer, attempt)
        finally:
            answer.close()

    async def send(self, attempt: Attempt, body: Segments) -> InstanceAnswer:
        """Send a request, and return the answer as soon as its headers are there.

        Raises:
            RequestFailure: There is none.
        """
        call, pd = attempt.call, attempt.pd
        try:
            return await self.upstream.request(
                call.method,
                f"{pd.url}{call.path}?{call.query}" if call.query else pd.url + call.path,
                body=body,
                headers=attempt.headers,
                connect_s=self.settings.connect_timeout_s,
                silent_s=self.settings.idle_timeout_s,
            )
        except UpstreamError as error:
            raise connection_failure(pd, error, RequestPhase.ANSWER) from error

    async def whole_reply(self, attempt: Attempt, body: Segments) -> Reply:
        """Send a request, and return all of its answer, of which no client has anything yet.

        Raises:
            RequestFailure: There is none, or it is a 5xx.
        """
        answer = await self.send(attempt, body)
        try:
            whole = await answer.read()
        except UpstreamError as error:
            raise connection_failure(attempt.pd, error, RequestPhase.ANSWER) from error
        finally:
            answer.close()
        kind = answer.headers.get("content-type", JSON["content-type"])
        reply = Reply(answer.status, {"content-type": kind}, whole)
        await self.check_reply(reply, attempt)
        return self.without_outcome(reply)

    async def _pass_on(self, answer: InstanceAnswer, attempt: Attempt) -> int:
        """Pass an answer on, once it is known to be no 5xx; return the status that it has.

        Raises:
            RequestFailure: It is one, or it ended too early.
        """
        call, pd, out = attempt.call, attempt.pd, attempt.out
        given = answer.headers
        headers = {name: given[name] for name in ANSWER_HEADERS if name in given}
        succeeded = answer.status < 400
        is_stream = succeeded and headers.get("content-type", "").startswith(EVENTS)
        events = WholeEvents(out)
        reply: Reply | None
        try:
            if is_stream:
                first = await first_event(answer)
                reply = failed_stream(first)
                take, end = events.take_piece, events.end_answer
            else:
                first = await answer.read(MAX_HELD_BYTES if succeeded and not call.items else None)
                reply = Reply(answer.status, headers, first) if answer.over else None
                take, end = out.write, out.end_answer
            if reply is None:
                if not is_stream and "content-length" in given:
                    headers["content-length"] = given["content-length"]
                attempt.note_answer_began()
                pd.answered()
                out.begin_answer(answer.status, headers)
                if first and not take(first):
                    await out.writable()
                await answer.pass_on(pd.hearing(take), out.writable)
                end()
                return answer.status
        except UpstreamError as error:
            if events.is_complete:  # It was lost after its last word.
                events.end_answer()
                return answer.status
            raise connection_failure(pd, error, phase_of(out)) from error
        await self.check_reply(reply, attempt)
        out.send_reply(self.without_outcome(reply) if call.items else reply)
        return reply.status

    async def check_reply(self, reply: Reply, attempt: Attempt) -> None:
        """Take in a whole answer of an instance.

        Raises:
            RequestFailure: It is a 5xx.
        """
        pd = attempt.pd
        attempt.note_answer_began()
        if reply.status < 500:
            pd.answered()
            return
        pd.failed(FailureKind.ERROR)
        await self.explain(attempt)
        message = f"instance {pd.name} answered {reply.status}: {reply.body[:200]!r}"
        raise RequestFailure(FailureKind.ERROR, RequestPhase.ANSWER, message, reply)

    async def explain(self, attempt: Attempt) -> None:
        """Raise the reason why a PD instance failed, if it comes over the control channel.

        Raises:
            RequestFailure: It has come.
        """
        nacks = attempt.inbox.nacks
        if attempt.deliveries and not nacks:
            await attempt.inbox.wait(self.settings.nack_grace_s)
        for nack in nacks:
            if nack.code is NackCode.TOO_LARGE:
                raise RequestFailure(FailureKind.TOO_LARGE, RequestPhase.ANSWER, nack.detail)
        if nacks:
            refused = {nack.transfer_id for nack in nacks}
            missing = [
                each.item.item_uuid
                for each in attempt.deliveries
                if each.transfer.transfer_id in refused
            ]
            detail = nacks[0].detail
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
            self.metrics.had(outcome)
        if self.settings.item_outcomes:
            return reply
        return Reply(reply.status, reply.headers, msgspec.json.encode(fields))


def silent(pd: Instance, phase: RequestPhase) -> RequestFailure:
    """Return the failure by a PD instance from which nothing came any more."""
    message = f"instance {pd.name} was silent for longer than router.idle_timeout_s"
    return RequestFailure(FailureKind.TIMEOUT, phase, message)


def connection_failure(pd: Instance, error: UpstreamError, phase: RequestPhase) -> RequestFailure:
    """Return what an error of the connection is to the request."""
    pd.failed(error.kind)
    if error.kind is FailureKind.UNAVAILABLE:
        return RequestFailure(error.kind, phase, str(error))
    if error.kind is FailureKind.TIMEOUT:
        return silent(pd, phase)
    # What is no HTTP is as good as no connection.
    kind = error.kind if error.kind is FailureKind.UNREACHABLE else FailureKind.LOST
    return RequestFailure(kind, phase, f"instance {pd.name} was lost: {error}")


def phase_of(out: ClientExchange) -> RequestPhase:
    """Return how far a request is that an instance has: what counts is what the client has."""
    return RequestPhase.STREAM if out.begun else RequestPhase.ANSWER


# Answers that come event by event.


class WholeEvents:
    """Passes whole events on as they come: what ends within one is none to the client."""

    def __init__(self, out: ClientExchange) -> None:
        self._out = out
        self._held = b""
        self._passed = b""

    @property
    def is_complete(self) -> bool:
        """Whether the last event that passed says that none comes after it."""
        passed = self._passed.rstrip()
        begin = max(passed.rfind(b"\n\n"), passed.rfind(b"\r\n\r\n"))
        return passed[begin + 1 :].lstrip().startswith(_LAST_EVENTS)

    def take_piece(self, data: bytes) -> bool:
        """Take a piece of the stream; return whether the client takes more at once."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_EVENT_ENDS) and len(data) < MAX_HELD_BYTES:
            end = _whole_events(data)
            data, self._held = data[:end], data[end:]
        if not data:
            return True
        self._passed = data
        return self._out.write(data)

    def end_answer(self) -> None:
        """Send what is left, and the end."""
        if self._held:
            self._out.write(self._held)
        self._out.end_answer()


async def first_event(answer: InstanceAnswer) -> bytes:
    """Return the beginning of a stream, with a whole event: a client gets nothing before that."""
    first = await answer.piece()
    while first and not _whole_events(first) and len(first) < MAX_HELD_BYTES:
        more = await answer.piece()
        if not more:
            break
        first += more
    return first


def _whole_events(data: bytes) -> int:
    """Return how many of these bytes are whole events."""
    return max(place + len(end) if (place := data.rfind(end)) >= 0 else 0 for end in _EVENT_ENDS)


class _EngineError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EngineError


def failed_stream(first: bytes) -> Reply | None:
    """Return the answer to a streamed request that failed before its first token."""
    if not first.startswith(_ERROR_EVENTS):
        return None
    lines = first.removeprefix(b"event: error\n")
    event = lines.partition(b"\n")[0].rstrip().removeprefix(b"data: ")
    failed = decode_if_valid(event, _ErrorEvent)
    status = failed.error.code if failed else 500
    return Reply(status if 400 <= status <= 599 else 500, JSON, event)

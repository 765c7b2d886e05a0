"""Envoy's consultation about one request, which is a client's request to the router.

To the router, Envoy is a server like any other: a `Consultation` is the `IncomingRequest` of a
client, and the `Forwarder` that takes it to an instance.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc.aio

from epd_portable import log
from epd_portable.errors import RequestError
from epd_portable.media.addresses import Network
from epd_portable.placement.fallbacks import RequestFailure, RequestPhase
from epd_portable.placement.instances import Instance
from epd_portable.placement.replies import Reply, error_reply
from epd_portable.router import envoy, ext_proc
from epd_portable.router.client_exchange import ClientGoneError, IncomingRequest
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.encode_jobs import Attempt
from epd_portable.router.ext_proc import (
    ProcessingRequest,
    ProcessingResponse,
    header_mutation,
    metadata_value,
)
from epd_portable.router.relay import ANSWER_HEADERS, Forwarder, silent
from epd_portable.router.selector import Selection
from epd_portable.router.server import Router
from epd_portable.wire.outcomes import FailureKind, Fallback

logger = logging.getLogger("epd_portable.router")
_said = log.say_failure(logger, "a request failed")

PICKED = "x-epd-picked"
"""Header by which a second try is recognized; that of another request cannot be guessed."""
FROM_INSTANCE = "x-envoy-upstream-service-time"
"""Envoy's header on answers that are not its own."""
KEPT_FROM_ANSWERS = frozenset({*ANSWER_HEADERS, "content-length", "transfer-encoding", "date"})
AGAIN_WITHIN_S = 1.0
"""An instance went down: Envoy notices as soon, if at all, and tries another one."""
PIECE_BYTES = 60 * 1024

_KEPT_FROM_CLIENTS = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "x-forwarded-proto")
)


@dataclass(slots=True)
class Picker:
    """Answers Envoy.

    Attributes:
        networks: Of gateways that may ask without a certificate.
        under_way: Consultations whose requests have been sent, by `PICKED`.
    """

    router: Router
    endpoints: envoy.Endpoints
    networks: Sequence[Network] = ()
    under_way: dict[str, Consultation] = field(default_factory=dict, init=False)

    def service(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server serves."""
        service, method = ext_proc.METHOD
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(service, {method: handler})

    async def _process(
        self, messages: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        # Answers tell the token by which instances know this deployment.
        if not self._may_ask(context):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "connect to the picker's UNIX socket, show a certificate of its --gateway-ca, or "
                "ask from a network of its router.envoy",
            )
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get(envoy.STAGE) != "again":
            await Consultation(self, context, int(metadata.get(envoy.PORT, 0))).hold(messages)
            return
        async for message in messages:
            headers = _headers(message.request_headers)
            consultation = self.under_way.get(headers.get(PICKED, ""))
            if consultation is None:
                await context.write(_immediate(503, {}, b""))
            else:
                consultation.again.put_nowait(context)

    def _may_ask(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        kind, _, peer = context.peer().partition(":")
        if kind == "unix" or context.peer_identities():
            return True
        # gRPC writes ipv4:10.0.0.1:80, and ipv6:%5B::1%5D:80.
        address = ipaddress.ip_address(unquote(peer).rpartition(":")[0].strip("[]"))
        return any(address in network for network in self.networks)


class Consultation(IncomingRequest, Forwarder):
    """One client's request, from its headers to the end of its answer.

    Args:
        context: Envoy's stream about the request.

    Attributes:
        again: Envoy's stream about a second try.
    """

    def __init__(
        self, picker: Picker, context: grpc.aio.ServicerContext[Any, Any], port: int
    ) -> None:
        self.again: asyncio.Queue[grpc.aio.ServicerContext[Any, Any]] = asyncio.Queue()
        self._picker = picker
        self._relay = picker.router.exchange.relay
        self._context = context
        self.port = port
        self._key = uuid.uuid4().hex
        self._asked: Mapping[str, str] = {}
        self._subset: Sequence[str] | None = None
        self._whole_body = True
        self._has_body = False
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._next: Instance | None = None
        self._named: Mapping[str, Instance] = {}
        self._sent = False
        self._answer: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self._answer_pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._answer_streams = False
        self._answer_ends = False
        self._served = ""
        self._carried = False
        self._whole_answer = False
        self._status = 0
        self._added: Mapping[str, str] = {}
        self._written = b""
        self._ended = False
        self._gone: Callable[[], None] | None = None
        self._over = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    # What Envoy says.

    async def hold(self, messages: AsyncIterator[Any]) -> None:
        """Read what Envoy says until it has nothing more to say."""
        try:
            async for message in messages:
                # The part that it is about has the lowest number.
                for field, part in message.ListFields()[:1]:
                    await self._take(field.name, part, message)
        finally:
            self._over.set()
            self._pieces.put_nowait((b"", False))
            self._answer_pieces.put_nowait((b"", True))
            # The end of an answer is awaited by `forward`.
            if self._gone is not None and not self._answer.done():
                self._gone()
            self._picker.under_way.pop(self._key, None)

    async def _take(self, name: str, part: Any, message: Any) -> None:
        match name:
            case "request_headers":
                mode = message.protocol_config
                self._whole_body = mode.request_body_mode != ext_proc.FULL_DUPLEX_STREAMED
                self._answer_streams = mode.response_body_mode == ext_proc.FULL_DUPLEX_STREAMED
                subset = metadata_value(message, envoy.SUBSET_NAMESPACE, envoy.SUBSET)
                self._subset = None if subset is None else [*subset]
                self._begin(part)
            case "request_body":
                self._pieces.put_nowait((part.body, not part.end_of_stream))
            case "request_trailers":
                self._pieces.put_nowait((b"", False))
            case "response_headers" if not self._sent:
                await self._refuse_body(int(_headers(part)[":status"]))
            case "response_headers":
                self._answer_ends = part.end_of_stream
                self._served = metadata_value(message, envoy.NAMESPACE, envoy.SERVED) or ""
                self._answer.set_result(_headers(part))
            case "response_body":
                self._answer_pieces.put_nowait((part.body, part.end_of_stream))
            case "response_trailers":
                await self._context.write(ProcessingResponse(response_trailers={}))

    async def _refuse_body(self, status: int) -> None:
        """Say in OpenAI's form what Envoy says by itself: a body is too large."""
        limit = self._picker.router.settings.max_body_bytes
        problem = f"request body of more than {limit} bytes, which are accepted; send smaller "
        problem += "images, or raise router.max_body_bytes"
        reply = error_reply(RequestError(problem, status=status, code="body_too_large"))
        await self._respond(_immediate(reply.status, reply.headers, reply.body))

    def _begin(self, message: Any) -> None:
        self._asked = _headers(message)
        self._has_body = not message.end_of_stream
        path, _, self.query = self._asked[":path"].partition("?")
        self.method = self._asked[":method"]
        self.path = unquote(path)
        self.headers = {
            name: value
            for name, value in self._asked.items()
            if value.isascii() and not name.startswith(":")
        }
        if self._has_body and "content-length" not in self._asked:
            self.headers["transfer-encoding"] = "chunked"
        if self._has_body and self._whole_body:
            # It is sent when it is asked for.
            self.headers["expect"] = "100-continue"
        self._serving = asyncio.create_task(self._serve())
        self._serving.add_done_callback(_said)

    async def _serve(self) -> None:
        await self._picker.router.serve(self, forwarder=self)
        if self._status and not (self._carried and self._ended):
            # Of an answer of which the client has a part, Envoy cuts it off.
            await self._respond(_immediate(self._status, self._added, self._written))

    # A server to the router.

    async def body(self, count: Callable[[int], None]) -> bytearray:
        """Return the whole body; see `IncomingRequest`."""
        if self._has_body and self._whole_body:
            await self._respond(ProcessingResponse(request_headers={}))
        data = bytearray()
        while self._has_body:
            data += await self._piece()
            count(len(data))
        return data

    async def drop_body(self) -> None:
        """Forget the body, and return when all of it has come; see `IncomingRequest`."""
        while self._has_body:
            await self._piece()

    async def _piece(self) -> bytes:
        data, self._has_body = await self._pieces.get()
        if self._over.is_set():
            raise ClientGoneError("while its request was read")
        return data

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Have a function called when the client goes away; see `IncomingRequest`."""
        self._gone = callback
        if self._over.is_set():
            callback()

    def begin_answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Note status and headers; see `IncomingRequest`."""
        self._status, self._added = status, headers

    def write(self, data: bytes) -> bool:
        """Note a piece: there is one of an answer of the router's own; see `IncomingRequest`."""
        self._written += data
        return True

    async def writable(self) -> None:
        """Return when the client takes more; see `IncomingRequest`."""

    def end_answer(self) -> None:
        """Note the end; see `IncomingRequest`."""
        self._ended = not self._written or not self._carried

    async def _respond(self, response: Any) -> None:
        if self._over.is_set():
            return
        try:
            await self._context.write(response)
        except grpc.aio.BaseError:
            # The stream has ended, which its reader has not seen yet.
            self._over.set()

    # A forwarder to the exchange.

    def choose(self, selection: Selection, tried: Collection[str]) -> Instance | None:
        """Return the PD instance that should answer; for a second try, the one that Envoy asks."""
        if self._sent:
            return self._next
        chosen = self._choose(selection, tried)
        if chosen is None and self._subset is not None and not tried:
            named = ", ".join(self._subset[:8]) or "it is empty"
            message = f"no instance of the gateway's subset ({named}) can serve"
            raise RequestFailure(FailureKind.UNAVAILABLE, RequestPhase.ANSWER, message)
        return chosen

    def _choose(self, selection: Selection, tried: Collection[str]) -> Instance | None:
        endpoints = self._picker.endpoints
        if self._subset is not None:
            known = endpoints.by_address().items()
            tried = [*tried, *(each.name for at, each in known if at not in self._subset)]
        unseen = [instance.name for instance in endpoints.unseen]
        chosen = selection.choose_pd([*tried, *unseen])
        if chosen is None and unseen:
            # Most likely Envoy has seen it by now.
            unlisted = [each.name for each in endpoints.unseen if not endpoints.lists(each)]
            chosen = selection.choose_pd([*tried, *unlisted])
        return chosen

    async def forward(self, attempt: Attempt, body: Segments) -> int:
        """Have Envoy send a request and pass the answer on; see `Forwarder`."""
        call, out = attempt.call, attempt.out
        if self._sent:
            await self._send_again(attempt, body)
        else:
            self._sent = True
            self._next = self._choose(attempt.selection, [attempt.pd.name]) or attempt.pd
            self._picker.under_way[self._key] = self
            await self._send_first(attempt, body)
        answer = await self._first_of_answer_and_again(attempt)
        attempt.note_answer_began()
        pd = self._answering(attempt)
        status = int(answer[":status"])
        if status >= 500:
            await self._check_failure(attempt, pd, status, by_envoy=FROM_INSTANCE not in answer)
        else:
            pd.answered()
        self._carried = True
        self._whole_answer = bool(call.items) and not call.stream and status < 400
        out.begin_answer(status, {})
        await self._pass_on()
        await self._pass_pieces(pd)
        await self._over.wait()
        out.end_answer()
        return status

    async def _send_first(self, attempt: Attempt, body: Segments) -> None:
        assert self._next is not None
        whole = b"".join(body)
        first, second = map(self._picker.endpoints.address, (attempt.pd, self._next))
        self._named = {first: attempt.pd, second: self._next}
        destination = f"{first},{second}"
        given = {
            **self._picker.router.upstream.headers,
            **attempt.headers,
            envoy.DESTINATION: destination,
            PICKED: self._key,
        }
        if self._next is not attempt.pd:
            given[envoy.RETRY_ON] = "5xx"
        removed = [
            name
            for name in self._asked
            if name not in given and name not in _KEPT_FROM_CLIENTS and name[0] != ":"
        ]
        in_turn = not self._whole_body or ("content-length" not in self._asked and not whole)
        # There is another route for requests whose instance is named.
        changed: dict[str, Any] = {"clear_route_cache": True}
        if not in_turn:
            given["content-length"] = str(len(whole))
            removed.append("transfer-encoding")
            changed["body_mutation"] = {"body": whole}
        changed["header_mutation"] = header_mutation(given, removed)
        part = "request_headers" if in_turn else "request_body"
        response = ProcessingResponse(**{part: {"response": changed}})
        response.dynamic_metadata.update({envoy.NAMESPACE: {envoy.DESTINATION: destination}})
        await self._respond(response)
        if not self._whole_body and whole:
            await self._send_pieces("request_body", whole)

    async def _send_again(self, attempt: Attempt, body: Segments) -> None:
        """Let Envoy's second try bring what another instance is to get.

        Raises:
            RequestFailure: There is no second try.
        """
        try:
            if self._answer.done():
                raise TimeoutError
            context = await asyncio.wait_for(self.again.get(), AGAIN_WITHIN_S)
        except TimeoutError:
            raise RequestFailure(
                FailureKind.UNAVAILABLE,
                RequestPhase.ANSWER,
                f"Envoy's try at instance {attempt.pd.name} has failed, or does not come",
            ) from None
        changed: dict[str, Any] = {"header_mutation": header_mutation(attempt.headers)}
        if whole := b"".join(body):
            changed["status"] = ext_proc.CONTINUE_AND_REPLACE
            changed["body_mutation"] = {"body": whole}
        await context.write(ProcessingResponse(request_headers={"response": changed}))

    async def _first_of_answer_and_again(self, attempt: Attempt) -> Mapping[str, str]:
        """Return the headers of the answer.

        Raises:
            RequestFailure: Envoy tries another instance instead.
        """
        again = asyncio.ensure_future(self.again.get())
        try:
            await asyncio.wait({again, self._answer}, return_when=asyncio.FIRST_COMPLETED)
            if self._answer.done():
                return self._answer.result()
            self.again.put_nowait(again.result())
        finally:
            again.cancel()
        attempt.pd.failed(FailureKind.LOST)
        await self._relay.explain(attempt)
        raise RequestFailure(
            FailureKind.LOST,
            RequestPhase.ANSWER,
            f"instance {attempt.pd.name} was lost, or answered 5xx",
        )

    def _answering(self, attempt: Attempt) -> Instance:
        """Return who answers: a gateway's own retry may have led elsewhere."""
        asked, out = attempt.pd, attempt.out
        if not self._served or self._named.get(self._served) is asked:
            return asked
        asked.failed(FailureKind.LOST)
        done: tuple[Fallback, ...] = ("retried",)
        out.record.fall_back(RequestPhase.ANSWER, FailureKind.LOST, done)
        logger.warning(
            "request %s: %s answers in place of %s, to which its items go: turn the gateway's "
            "retries off, or have them ask the picker again",
            *(out.request_id, self._served, asked.name),
        )
        return self._named.get(self._served, asked)

    async def _check_failure(
        self, attempt: Attempt, pd: Instance, status: int, *, by_envoy: bool
    ) -> None:
        """Return if the answer is the instance's own and goes to the client.

        Raises:
            RequestFailure: It does not.
        """
        if not by_envoy:
            pd.failed(FailureKind.ERROR)
            await self._relay.explain(attempt)
        elif status == 504:
            pd.failed(FailureKind.TIMEOUT)
            raise silent(pd, RequestPhase.ANSWER)
        else:
            pd.failed(FailureKind.LOST)
            raise RequestFailure(
                FailureKind.UNAVAILABLE, RequestPhase.ANSWER, f"instance {pd.name} was lost"
            )

    async def _pass_on(self) -> None:
        """Let the answer's headers go to the client, with those that the router adds."""
        removed = [
            name
            for name in self._answer.result()
            if name[0] != ":" and name not in KEPT_FROM_ANSWERS
        ]
        changed = {"header_mutation": header_mutation(self._added, removed)}
        response = ProcessingResponse(response_headers={"response": changed})
        if self._whole_answer and not self._answer_streams and not self._answer_ends:
            response.mode_override.response_body_mode = ext_proc.BUFFERED
        await self._respond(response)

    async def _pass_pieces(self, pd: Instance) -> None:
        """Pass an answer's body on where it comes by here: as it comes, or checked as a whole."""
        whole = bytearray()
        ends = self._answer_ends or not (self._answer_streams or self._whole_answer)
        while not ends:
            piece, ends = await self._answer_pieces.get()
            pd.heard()
            if self._over.is_set():
                return
            if self._whole_answer:
                whole += piece
            else:
                await self._send_pieces("response_body", piece, end=ends)
        if not whole:
            return
        body = self._relay.without_outcome(Reply(200, {}, bytes(whole))).body
        if self._answer_streams:
            await self._send_pieces("response_body", body)
            return
        length = header_mutation({"content-length": str(len(body))})
        changed = {"header_mutation": length, "body_mutation": {"body": body}}
        await self._respond(ProcessingResponse(response_body={"response": changed}))

    async def _send_pieces(self, field: str, body: bytes, *, end: bool = True) -> None:
        for begin in range(0, len(body) or 1, PIECE_BYTES):
            piece = {
                "body": body[begin : begin + PIECE_BYTES],
                "end_of_stream": end and begin + PIECE_BYTES >= len(body),
            }
            changed = {"body_mutation": {"streamed_response": piece}}
            await self._respond(ProcessingResponse(**{field: {"response": changed}}))


def _headers(message: Any) -> dict[str, str]:
    return {header.key: header.raw_value.decode("latin-1") for header in message.headers.headers}


def _immediate(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    given = {name: value for name, value in headers.items() if name != "content-length"}
    return ProcessingResponse(
        immediate_response={
            "status": {"code": status},
            "headers": header_mutation(given),
            "body": body,
        }
    )

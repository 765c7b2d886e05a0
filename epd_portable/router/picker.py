"""The router as an endpoint picker: ``python -m epd_portable.router.picker``.

Envoy takes clients' requests in and carries answers; this process is asked about each request, over
Envoy's protocol for external processors (`ext_proc`), which the endpoint pickers of the Gateway API
inference extension speak. It reads the request, chooses as the router does, starts encode jobs, has
a prompt computed by a prefill instance, rewrites the request and names the one that answers it.

To the router, Envoy is a server like any other: a `Consultation` is the `IncomingRequest` of a
client, and the `Forwarder` that takes it to an instance.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc.aio
import uvloop

from epd_portable import log
from epd_portable.config.roles import Duty
from epd_portable.delivery.fallbacks import RequestFailure, RequestPhase
from epd_portable.delivery.instances import Instance
from epd_portable.delivery.replies import Reply, error_reply
from epd_portable.errors import ConfigError, EPDError, RequestError
from epd_portable.router import envoy, ext_proc
from epd_portable.router.client_exchange import ClientExchange
from epd_portable.router.contents.body import Call
from epd_portable.router.contents.cut_text import Segments
from epd_portable.router.encode_jobs import Attempt
from epd_portable.router.ext_proc import ProcessingRequest, ProcessingResponse, header_mutation
from epd_portable.router.http import open_files
from epd_portable.router.http.incoming import ClientGoneError
from epd_portable.router.relay import ANSWER_HEADERS, silent
from epd_portable.router.selector import Selection
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, first_of
from epd_portable.router.settings import RouterSettings, load_settings
from epd_portable.wire.outcomes import FailureKind

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


class Picker:
    """Answers Envoy."""

    def __init__(self, router: Router, endpoints: envoy.Endpoints) -> None:
        self.router = router
        self.endpoints = endpoints
        self.under_way: dict[str, Consultation] = {}
        """Consultations whose requests have been sent, by `PICKED`."""

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
        if not context.peer().startswith("unix:") and not context.peer_identities():
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "connect to the picker's UNIX socket, or show a certificate of its --gateway-ca",
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


class Consultation:
    """One client's request, from its headers to the end of its answer.

    Args:
        picker: Whose it is.
        context: Envoy's stream about the request.
        port: At which the client asked.

    Attributes:
        again: Envoy's stream about a second try.
        method: See `IncomingRequest`, as the next ones.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]

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
        self._whole_body = True
        self._has_body = False
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._next: Instance | None = None
        self._sent = False
        self._answer: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self._answer_pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._answer_streams = False
        self._answer_ends = False
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
                await self._take(message)
        finally:
            self._over.set()
            self._pieces.put_nowait((b"", False))
            self._answer_pieces.put_nowait((b"", True))
            # The end of an answer is awaited by `forward`.
            if self._gone is not None and not self._answer.done():
                self._gone()
            self._picker.under_way.pop(self._key, None)

    async def _take(self, message: Any) -> None:
        for field, part in message.ListFields()[:1]:
            await self._take_part(field.name, part, message.protocol_config)

    async def _take_part(self, name: str, part: Any, mode: Any) -> None:
        match name:
            case "request_headers":
                self._whole_body = mode.request_body_mode != ext_proc.FULL_DUPLEX_STREAMED
                self._answer_streams = mode.response_body_mode == ext_proc.FULL_DUPLEX_STREAMED
                self._begin(part)
            case "request_body":
                self._pieces.put_nowait((part.body, not part.end_of_stream))
            case "request_trailers":
                self._pieces.put_nowait((b"", False))
            case "response_headers" if not self._sent:
                await self._refuse_body(int(_headers(part)[":status"]))
            case "response_headers":
                self._answer_ends = part.end_of_stream
                self._answer.set_result(_headers(part))
            case "response_body":
                self._answer_pieces.put_nowait((part.body, part.end_of_stream))
            case "response_trailers":
                response = ProcessingResponse()
                response.response_trailers.SetInParent()
                await self._context.write(response)

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
            response = ProcessingResponse()
            response.request_headers.SetInParent()
            await self._respond(response)
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
        return self._choose(selection, tried)

    def _choose(self, selection: Selection, tried: Collection[str]) -> Instance | None:
        endpoints = self._picker.endpoints
        unseen = [instance.name for instance in endpoints.unseen]
        chosen = selection.choose_pd([*tried, *unseen])
        if chosen is None and unseen:
            # Most likely Envoy has seen it by now.
            unlisted = [each.name for each in endpoints.unseen if not endpoints.lists(each)]
            chosen = selection.choose_pd([*tried, *unlisted])
        return chosen

    async def forward(
        self, call: Call, attempt: Attempt, body: Segments, out: ClientExchange
    ) -> int:
        """Have Envoy send a request and pass the answer on; see `Forwarder`."""
        if self._sent:
            await self._send_again(attempt, body)
        else:
            self._sent = True
            self._next = self._choose(attempt.selection, [attempt.pd.name]) or attempt.pd
            self._picker.under_way[self._key] = self
            await self._send_first(attempt, body)
        answer = await self._first_of_answer_and_again(attempt)
        attempt.note_answer_began()
        status = int(answer[":status"])
        if status >= 500:
            await self._check_failure(attempt, status, by_envoy=FROM_INSTANCE not in answer)
        else:
            attempt.pd.answered()
        self._carried = True
        self._whole_answer = bool(call.items) and not call.stream and status < 400
        out.begin_answer(status, {})
        await self._pass_on()
        await self._pass_pieces(attempt.pd)
        await self._over.wait()
        out.end_answer()
        return status

    async def _send_first(self, attempt: Attempt, body: Segments) -> None:
        assert self._next is not None
        whole = b"".join(body)
        endpoints = self._picker.endpoints
        given = {
            **self._picker.router.upstream.headers,
            **attempt.headers,
            envoy.DESTINATION: f"{endpoints.address(attempt.pd)},{endpoints.address(self._next)}",
            PICKED: self._key,
        }
        if self._next is not attempt.pd:
            given[envoy.RETRY_ON] = "5xx"
        removed = [
            name
            for name in self._asked
            if name not in given and name not in _KEPT_FROM_CLIENTS and name[0] != ":"
        ]
        response = ProcessingResponse()
        in_turn = not self._whole_body or ("content-length" not in self._asked and not whole)
        changed = (response.request_headers if in_turn else response.request_body).response
        # There is another route for requests whose instance is named.
        changed.clear_route_cache = True
        if in_turn:
            header_mutation(changed.header_mutation, given, removed)
            await self._respond(response)
            if not self._whole_body and whole:
                await self._send_pieces("request_body", whole)
            return
        given["content-length"] = str(len(whole))
        header_mutation(changed.header_mutation, given, [*removed, "transfer-encoding"])
        changed.body_mutation.body = whole
        await self._respond(response)

    async def _send_again(self, attempt: Attempt, body: Segments) -> None:
        """Let Envoy's second try bring what another instance is to get.

        Raises:
            RequestFailure: There is no second try.
        """
        try:
            if self._answer.done():
                raise TimeoutError
            context = await asyncio.wait_for(self.again.get(), AGAIN_WITHIN_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise RequestFailure(
                FailureKind.UNAVAILABLE,
                RequestPhase.ANSWER,
                "Envoy sends this request to no other instance",
            ) from None
        response = ProcessingResponse()
        changed = response.request_headers.response
        if whole := b"".join(body):
            changed.status = ext_proc.CONTINUE_AND_REPLACE
            changed.body_mutation.body = whole
        header_mutation(changed.header_mutation, attempt.headers)
        await context.write(response)

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

    async def _check_failure(self, attempt: Attempt, status: int, *, by_envoy: bool) -> None:
        """Return if the answer is the instance's own and goes to the client.

        Raises:
            RequestFailure: It does not.
        """
        pd = attempt.pd
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
        response = ProcessingResponse()
        header_mutation(response.response_headers.response.header_mutation, self._added, removed)
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
        response = ProcessingResponse()
        changed = response.response_body.response
        header_mutation(changed.header_mutation, {"content-length": str(len(body))})
        changed.body_mutation.body = body
        await self._respond(response)

    async def _send_pieces(self, field: str, body: bytes, *, end: bool = True) -> None:
        for begin in range(0, len(body) or 1, PIECE_BYTES):
            response = ProcessingResponse()
            piece = getattr(response, field).response.body_mutation.streamed_response
            piece.body = body[begin : begin + PIECE_BYTES]
            piece.end_of_stream = end and begin + PIECE_BYTES >= len(body)
            await self._respond(response)


def _headers(message: Any) -> dict[str, str]:
    return {header.key: header.raw_value.decode("latin-1") for header in message.headers.headers}


def _immediate(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    response = ProcessingResponse()
    response.immediate_response.status.code = status
    given = {name: value for name, value in headers.items() if name != "content-length"}
    header_mutation(response.immediate_response.headers, given)
    response.immediate_response.body = body
    return response


async def serve(
    settings: RouterSettings, folder: Path, listen: str, gateway_ca: Path | None, threads: int
) -> None:
    """Answer Envoy until a signal comes, or Envoy ends.

    Args:
        settings: Of the router; clients find Envoy at its host and port.
        folder: For what Envoy reads.
        listen: Where a gateway of others asks, ``unix:path`` or ``host:port``; empty starts an
            Envoy.
        gateway_ca: Certificates that sign the gateway's, which it shows at ``host:port``.
        threads: Of the Envoy that is started.

    Raises:
        ConfigError: An address or a file of the settings cannot be used, or Envoy ended.
    """
    own = folder / "picker.sock"
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    _listen(server, settings, listen or f"unix:{own}", gateway_ca)
    router = Router(settings)
    duties: set[Duty] = {"answer"}
    if settings.hop_keys_file:
        # Hops that answer elsewhere have prompts computed here.
        duties.add("prefill")
    endpoints = envoy.Endpoints(folder / "endpoints.json", router.instances, duties)
    picker = Picker(router, endpoints)
    config = folder / "envoy.json"
    written = envoy.bootstrap(settings, endpoints=folder / "endpoints.json", picker=own)
    config.write_text(json.dumps(written, indent=1))
    server.add_generic_rpc_handlers((picker.service(),))
    stop = Stopping()
    stop.on_signals()
    await router.open()
    await endpoints.settle()
    # First Envoy: a process that serves gRPC should start no other. Its requests wait.
    process = None if listen else await envoy.start(config, threads=threads)
    await server.start()
    asked = f"{'https' if settings.tls_cert_file else 'http'}://{settings.host}:{settings.port}"
    logger.info("router for %s on %s, by Envoy as in %s", settings.model, asked, config)
    try:
        await first_of(stop.asked.wait(), *([process.wait()] if process is not None else []))
        if process is not None and not stop.asked.is_set():
            raise ConfigError(
                f"Envoy ended with status {process.returncode}: its last lines say why, as "
                f"that a port is taken; its configuration was {config}"
            )
        await router.drain()
    finally:
        if process is not None and process.returncode is None:
            process.terminate()
            await process.wait()
        await server.stop(grace=1)
        await router.close()


def _listen(
    server: grpc.aio.Server, settings: RouterSettings, where: str, gateway_ca: Path | None
) -> None:
    """Listen where only a gateway can ask: at a UNIX socket, or with certificates of both."""
    secured = (settings.tls_key_file, settings.tls_cert_file, gateway_ca)
    is_socket = where.startswith("unix:")
    if (is_socket and gateway_ca) or (not is_socket and not all(secured)):
        raise ConfigError(
            f"--listen {where}: answers of the picker tell the token of the instances; listen at "
            "unix:PATH, where the socket's permissions say who may ask, or at HOST:PORT with "
            "--gateway-ca FILE and tls_cert_file and tls_key_file in the settings"
        )
    try:
        if is_socket:
            server.add_insecure_port(where)
            return
        key, chain, trusted = (Path(each).read_bytes() for each in secured if each)
        credentials = grpc.ssl_server_credentials(
            [(key, chain)], root_certificates=trusted, require_client_auth=True
        )
        server.add_secure_port(where, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"picker address {where} cannot be used: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM: answers that have begun end first, for ``drain_s`` at most.

    Returns:
        0 after a clean stop, 2 if the settings are wrong or Envoy cannot serve.
    """
    parser = argparse.ArgumentParser(
        prog="python -m epd_portable.router.picker",
        description="Serve like the router, with Envoy in front that carries the bytes.",
    )
    add = parser.add_argument
    add(
        "--settings",
        required=True,
        metavar="JSON",
        help="settings as JSON, or @FILE of a file with them, as for python -m epd_portable.router",
    )
    add(
        "--listen",
        metavar="ADDRESS",
        default="",
        help="serve the endpoint picker protocol for a gateway of your own, at unix:PATH, or at "
        "HOST:PORT with --gateway-ca; without it an Envoy is started",
    )
    add(
        "--gateway-ca",
        type=Path,
        metavar="FILE",
        help="certificates in PEM that sign the gateway's, which it must show at HOST:PORT; this "
        "end shows tls_cert_file of the settings",
    )
    threads = "worker threads of the Envoy that is started (default: one per core)"
    add("--threads", type=int, default=os.cpu_count() or 1, help=threads)
    folder = "folder for envoy.json and endpoints.json (default: a temporary one)"
    add("--folder", type=Path, help=folder)
    options = parser.parse_args(argv)
    log.configure()
    open_files.warn_of_few(open_files.raise_limit())
    try:
        settings = load_settings(options.settings)
        with contextlib.ExitStack() as held:
            where: Path = options.folder or Path(
                held.enter_context(tempfile.TemporaryDirectory(prefix="epd-picker-"))
            )
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
            uvloop.run(serve(settings, where, options.listen, options.gateway_ca, options.threads))
    except EPDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The router: what it serves where, takes in and lets out, and its stop."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec

from epd_portable.config.secret import INSTANCE_TOKEN_HEADER, Secret
from epd_portable.connector.curve import CurveKeys
from epd_portable.errors import RequestError
from epd_portable.media.limits import MediaLimits
from epd_portable.router.access import ApiKeys
from epd_portable.router.body import (
    CHAT_PATH,
    COMPLETION_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Call,
    Rules,
    read_call,
)
from epd_portable.router.control import ControlChannels
from epd_portable.router.cors import Cors
from epd_portable.router.cut_text import Data
from epd_portable.router.exchange import EVENTS, Carrier, Exchange
from epd_portable.router.incoming import Bodies, Body, ClientGoneError, IncomingRequest
from epd_portable.router.instances import Fleet
from epd_portable.router.introduction import Introducer
from epd_portable.router.members import MAX_BODY_BYTES, MemberList, Members
from epd_portable.router.metrics import Metrics
from epd_portable.router.replies import Reply, error_event, error_reply, json_reply, unavailable
from epd_portable.router.settings import RouterSettings
from epd_portable.router.upstream import Upstream

logger = logging.getLogger(__name__)

WITH_MEDIA = frozenset({CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH})
"""Paths whose bodies are read: encoders get the items in them."""
TO_ANY_INSTANCE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "/tokenize",
            "/detokenize",
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/generative_scoring",
            "/v1/messages/count_tokens",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/derender",
            "/v1/chat/completions/render",
            "/v1/completions/derender",
            "/v1/completions/render",
            "/v1/messages/render",
            "/v1/responses/render",
            "/v1/systemone",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/cohere/v2/chat",
            "/invocations",
        ),
        "POST",
    ),
    **dict.fromkeys(("/v1/models", "/version", "/load", "/tokenizer_info"), "GET"),
}
"""Paths that go to a PD instance, and the method of each; the items in them are encoded there."""
NO_JSON = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Of them, those whose bodies are forms: nobody looks at them."""
_OPERATORS = "what it does concerns one instance: its operator asks that one directly"
NOT_SERVED: Mapping[str, str] = {
    "/v1/responses/": "responses are not kept for later: ask with stream, or take the whole answer",
    "/inference/v1/": "it takes names of media from whoever asks, under which others would find "
    "them: send a prompt or messages",
    **dict.fromkeys(
        (
            "/abort_requests",
            "/adapters",
            "/adapters/",
            "/collective_rpc",
            "/docs",
            "/docs/",
            "/fault_tolerance/",
            "/finish_weight_update",
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_scaling_elastic_ep",
            "/is_sleeping",
            "/kv_event_sources",
            "/openapi.json",
            "/pause",
            "/redoc",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/update_weight_version",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        ),
        _OPERATORS,
    ),
}
"""Paths of vLLM that are refused on purpose, and why; one with a final slash stands for all below
it."""
OTHER = "other"
"""Label of all paths that are not served."""

PASSED_ON = (
    "authorization",
    "traceparent",
    "tracestate",
    "x-session-id",
    "x-vllm-priority",
    "endpoint-load-metrics-format",
    "accept",
)
"""Headers of clients that reach instances. All others stay here, so none can be forged."""
IN_THREAD_BYTES = 256 * 1024
"""Bodies from this size on are read beside the event loop."""
SWEEP_EVERY_S = 1.0

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Router:
    """Everything that lives as long as the server.

    Args:
        settings: Of the router.
        instances: What is chosen from; several processes may count in their tally.
        members: Makes what looks after the instances, where another process does.
        metrics_folder: Where several processes count.

    Raises:
        ConfigError: The secret file or another one cannot be used.

    Attributes:
        draining: Nothing new is taken on.
        exchange: Has requests answered.
        in_flight: Requests that are being answered.
        members: Looks after the instances.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        instances: Fleet | None = None,
        members: Callable[[Fleet, ControlChannels], MemberList] | None = None,
        metrics_folder: str = "",
    ) -> None:
        self.settings = settings
        self.draining = False
        self.in_flight: set[_Client] = set()
        secret = Secret.read(settings.secret_file)
        self._keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file else None
        self._passed_on = PASSED_ON[1:] if self._keys else PASSED_ON
        self.upstream = Upstream({INSTANCE_TOKEN_HEADER: secret.instance_token()})
        self.instances = Fleet() if instances is None else instances
        self.metrics = Metrics(lambda: self.instances.all, metrics_folder)
        self._control = ControlChannels(CurveKeys.derive(secret))
        self.exchange = Exchange(
            settings, self.instances, self.upstream, self._control, self.metrics, secret
        )
        self.members = (
            members(self.instances, self._control) if members else self._own_members(secret)
        )
        self._bodies = Bodies(
            max_bytes=settings.max_body_bytes,
            max_sum_bytes=settings.max_bodies_bytes,
            tally=self.instances.tally,
        )
        self._operators_bodies = Bodies(
            max_bytes=MAX_BODY_BYTES,
            max_sum_bytes=settings.max_bodies_bytes,
            tally=self.instances.tally,
            remedy="no address for operators takes as much",
        )
        self._rules = Rules(
            max_items=settings.max_media_items,
            unknown_fields=settings.unknown_fields,
            limits=MediaLimits.among(settings),
            pd_takes_media=settings.local_encode,
        )
        self._cors = Cors(settings.cors_origins)
        self._sweeping: asyncio.Task[None] | None = None

    def _own_members(self, secret: Secret) -> MemberList:
        together = (self.settings, self.instances, self.upstream, self._control)
        introducer = Introducer(*together, secret)
        return Members(*together, self.metrics, introducer.introduce, secret)

    async def serve(self, request: IncomingRequest, carrier: Carrier | None = None) -> None:
        """Answer one request.

        Args:
            request: Of a client.
            carrier: Takes it to a PD instance and the answer to the client, if the server that took
                it in does that itself.
        """
        client = _Client(request, carrier, self._passed_on, self._cors.headers(request.headers))
        path = request.path
        preflight = self._cors.preflight(request.method, request.headers)
        if preflight is not None:
            client.whole(preflight)
        elif path in WITH_MEDIA or path in TO_ANY_INSTANCE:
            await self._generate(path, client)
        else:
            await self._answer_itself(path, client)

    async def open(self) -> None:
        """Connect to the instances and watch them.

        Raises:
            ConfigError: An address cannot be used.
        """
        self._sweeping = asyncio.create_task(self._sweep())
        await self.members.open()

    async def close(self) -> None:
        """End everything."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.exchange.close()
        await self.members.close()
        await self._control.close()
        await self.upstream.close()

    async def drain(self) -> None:
        """Take on nothing more, and return when all answers have ended or had their time."""
        self.draining = True
        logger.info("stopping: %d answers have begun", len(self.in_flight))
        deadline = time.monotonic() + self.settings.drain_s
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.in_flight:
            logger.warning("%d answers are cut off after router.drain_s", len(self.in_flight))

    # Requests that go to instances.

    async def _generate(self, path: str, client: _Client) -> None:
        """Answer by a PD instance; what a client gives up is given up everywhere."""
        metrics = self.metrics
        work = asyncio.current_task()
        assert work is not None
        metrics.in_flight.inc()
        self.in_flight.add(client)
        client.work = work
        started = time.monotonic()
        try:
            with self._bodies.holding() as body:
                call = await self._read(path, client, body)
                client.reading_since = 0.0
                started = time.monotonic()
                client.request.on_gone(client.give_up)
                await self.exchange.serve(call, client.for_instances, client, client.carrier)
        except RequestError as error:
            client.fail(error)
        except ClientGoneError:
            client.gone = True
        except asyncio.CancelledError:
            if client.overdue:
                client.whole(error_reply(self._too_slow()))
            elif not client.gone:
                # The server stops and waits no longer.
                client.fail(unavailable("the router is stopping"))
        except Exception:
            logger.exception("request %s", client.request_id)
            client.fail(_internal(client.request_id))
        finally:
            self.in_flight.discard(client)
            metrics.in_flight.dec()
            metrics.answered(path, client.status, started, client.first_at, gone=client.gone)

    async def _read(self, path: str, client: _Client, body: Body) -> Call:
        """Return what the client asks for.

        Raises:
            RequestError: It is refused.
            ClientGoneError: It has gone.
        """
        method = TO_ANY_INSTANCE.get(path, "POST")
        if client.method != method:
            raise _no_such(client.method, path, 405)
        if self._keys is not None:
            self._keys.check(client.headers)
        if self.draining:
            client.last = True
            raise unavailable("the router is stopping")
        data = await body.read(client.request)
        call = await self._call(method, path, data, client)
        query = client.request.query
        return msgspec.structs.replace(call, query=query) if query else call

    async def _call(self, method: str, path: str, data: Data, client: _Client) -> Call:
        if method == "GET" or path in NO_JSON:
            if given := client.headers.get("content-type"):
                client.for_instances["content-type"] = given
            return Call.untouched(method, path, data)
        client.for_instances["content-type"] = "application/json"
        if len(data) < IN_THREAD_BYTES:
            return read_call(path, data, self._rules)
        return await asyncio.to_thread(read_call, path, data, self._rules)

    # What the router answers itself.

    async def _answer_itself(self, path: str, client: _Client) -> None:
        try:
            reply = await self._own_reply(path, client)
        except RequestError as error:
            reply = error_reply(error)
        except ClientGoneError:
            return
        client.whole(reply)
        if client.method == "GET" and path in ("/health", "/ping", "/metrics"):
            return
        self.metrics.requests.labels(OTHER, str(reply.status)).inc()

    async def _own_reply(self, path: str, client: _Client) -> Reply:
        admin = self._on_admin_port(client)
        if path in ("/health", "/ping") and client.method in ("GET", "HEAD", "POST"):
            return await self._health(client)
        if path == "/metrics" and admin:
            if client.method != "GET":
                raise _no_such(client.method, path, 405)
            kind = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
            return Reply(200, kind, self.metrics.exposition())
        if path.startswith("/epd/") and admin:
            data = await self._operators_body(client)
            return await self.members.handle(client.method, client.target, client.headers, data)
        if client.headers.get("upgrade", "").lower() == "websocket":
            raise RequestError(
                f"{path}: websockets are not served here; ask by HTTP",
                status=501,
                code="websocket_unsupported",
            )
        for begin, why in NOT_SERVED.items():
            if path == begin or (begin.endswith("/") and path.startswith(begin)):
                problem = f"{client.method} {path[:256]} is not served here: {why}"
                raise RequestError(problem, status=404, code="not_served")
        raise _no_such(client.method, path, 404)

    async def _operators_body(self, client: _Client) -> bytes:
        """Return a body for ``/epd/``; that it may be asked for is known only from the whole.

        Raises:
            RequestError: 408 or 413; it does not come in time, or is too large.
            ClientGoneError: The client is gone.
        """
        try:
            with anyio.fail_after(self.settings.body_timeout_s):
                with self._operators_bodies.holding() as body:
                    return bytes(await body.read(client.request))
        except TimeoutError:
            raise self._too_slow() from None

    async def _health(self, client: _Client) -> Reply:
        """Answer 200 while a request could be served, else 503.

        Names of instances are for holders of the secret.
        """
        usable = self.instances.any_usable("prefill-decode")
        status = "draining" if self.draining else "ok" if usable else "unavailable"
        counted = dict.fromkeys(("up", "joining", "down", "draining"), 0)
        for instance in self.instances.all:
            counted[instance.state] += 1
        answer: dict[str, object] = {"status": status, "counts": counted}
        states = await self.members.states(client.method, client.target, client.headers)
        if states is not None:
            answer["instances"] = states
        return json_reply(answer, 200 if status == "ok" else 503)

    def _on_admin_port(self, client: _Client) -> bool:
        return self.settings.admin_port is None or client.request.port == self.settings.admin_port

    # Clients that send nothing, or take nothing.

    async def _sweep(self) -> None:
        """Give up clients whose bodies do not come, and who take nothing of their answers."""
        settings = self.settings
        shortest = min(settings.body_timeout_s, settings.send_timeout_s)
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, shortest / 4))
            now = time.monotonic()
            for client in tuple(self.in_flight):
                if 0 < client.reading_since < now - settings.body_timeout_s:
                    client.overdue = True
                    client.reading_since = 0.0
                    client.work.cancel()
                elif 0 < client.sending_since < now - settings.send_timeout_s:
                    logger.warning(
                        "request %s: its client took nothing for router.send_timeout_s",
                        client.request_id,
                    )
                    client.give_up()

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"the request body did not end within router.body_timeout_s of "
            f"{self.settings.body_timeout_s:g} s: send it faster, or raise that limit",
            status=408,
            code="body_timeout",
        )


class _Client:
    """One request of a client, and its answer.

    Attributes:
        request: As the server took it in.
        carrier: Whose server took the request in, if that carries it on, too.
        method: Of HTTP.
        headers: Names in lower case; those whose values are not ASCII are left out.
        request_id: The client's own or a new one.
        for_instances: Headers that instances get.
        begun: Whether status and headers are sent.
        status: Of the answer, 0 before.
        first_at: When its first byte was sent, 0 before.
        gone: The client has closed its connection.
        overdue: Its body did not come in time.
        work: The task that answers.
        reading_since: When its body was first waited for, 0 afterwards.
        last: No other request is taken on its connection.
        sending_since: When the client took no more, 0 while it does.
    """

    def __init__(
        self,
        request: IncomingRequest,
        carrier: Carrier | None,
        passed_on: tuple[str, ...],
        for_client: Mapping[str, str],
    ) -> None:
        self.request = request
        self.carrier = carrier
        self.method = request.method
        self.headers = headers = request.headers
        given = headers.get("x-request-id", "")
        named = given and _REQUEST_ID.fullmatch(given)
        self.request_id = given if named else f"{random.getrandbits(128):032x}"
        self.for_instances = {name: headers[name] for name in passed_on if name in headers}
        self.for_instances["x-request-id"] = self.request_id
        self.begun = False
        self.status = 0
        self.first_at = 0.0
        self.gone = False
        self.overdue = False
        self.last = False
        self.work: asyncio.Task[Any]
        self.reading_since = time.monotonic()
        self.sending_since = 0.0
        self._for_client = for_client
        self._of_events = False
        self._within_event = False

    @property
    def target(self) -> str:
        """Path and query."""
        query = self.request.query
        return f"{self.request.path}?{query}" if query else self.request.path

    def give_up(self) -> None:
        """Treat the client as gone."""
        self.gone = True
        self.work.cancel()

    def whole(self, reply: Reply) -> None:
        """Send a whole answer."""
        if reply.status in (408, 413):
            # Part of the body may still be on its way: this connection serves no other request.
            self.last = True
        self.begin(reply.status, {**reply.headers, "content-length": str(len(reply.body))})
        if reply.body and self.method != "HEAD":
            self.request.write(reply.body)
        self.request.end()

    def fail(self, error: RequestError) -> None:
        """Send an error, within the answer if that has begun; one without events breaks off."""
        if not self.begun:
            self.whole(error_reply(error))
        elif self._of_events:
            event = error_event(str(error), status=error.status, code=error.code)
            self.write(b"\n\n" + event if self._within_event else event)
            self.request.end()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.begun = True
        self.status = status
        self.first_at = time.monotonic()
        self._of_events = headers.get("content-type", "").startswith(EVENTS)
        given = {**headers, **self._for_client, "x-request-id": self.request_id}
        if self.last:
            given["connection"] = "close"
        self.request.begin(status, given)

    def write(self, data: bytes) -> bool:
        """Send a piece; tell whether the client takes more at once."""
        self._within_event = not data.endswith((b"\n\n", b"\r\n\r\n"))
        return self.request.write(data)

    async def writable(self) -> None:
        """Return when the client takes more."""
        self.sending_since = time.monotonic()
        await self.request.writable()
        self.sending_since = 0.0

    def end(self) -> None:
        """Send the end."""
        self.request.end()


def _no_such(method: str, path: str, status: int) -> RequestError:
    if status == 405:
        wanted = TO_ANY_INSTANCE.get(path, "POST" if path in WITH_MEDIA else "GET")
        problem, code = f"only {wanted} is served at this path", "method_not_allowed"
    else:
        known = ", ".join(sorted(WITH_MEDIA))
        problem = f"there is no such path; media are taken at {known}, and what else vLLM serves "
        problem += "to clients is passed on; addresses for operators are at the instances"
        code = "unknown_path"
    return RequestError(f"{method} {path[:256]}: {problem}", status=status, code=code)


def _internal(request_id: str) -> RequestError:
    return RequestError(
        f"internal error of the router; its log has the reason under request {request_id}",
        status=500,
        code="internal_error",
    )

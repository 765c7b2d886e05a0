"""The router: what it serves where, takes in and lets out, and its stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal

import anyio
import msgspec

from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.routing import AdmissionSection
from epd_portable.config.secret import INSTANCE_TOKEN_HEADER, Secret
from epd_portable.connector.curve import CurveKeys
from epd_portable.errors import ConfigError, RequestError
from epd_portable.media.limits import MediaLimits
from epd_portable.placement.admission import AdmissionControl
from epd_portable.placement.balance import Switching
from epd_portable.placement.instances import EndpointPool
from epd_portable.placement.profiles.selection_types import (
    EXPLAIN_HEADER,
    SESSION_HEADER,
    Explanation,
)
from epd_portable.placement.replies import (
    NAMES_MEDIA,
    WHY_NO_NAMES,
    Reply,
    body_timeout,
    error_reply,
    json_reply,
    not_served,
    unavailable,
)
from epd_portable.router.client_exchange import (
    ClientExchange,
    ClientGoneError,
    IncomingRequest,
    read_body,
)
from epd_portable.router.contents.body import (
    CHAT_PATH,
    COMPLETION_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Body,
    Call,
    HeldBytes,
    Rules,
    check_json,
    read_call,
)
from epd_portable.router.contents.cut_text import Data
from epd_portable.router.contents.media import FindMedia
from epd_portable.router.contents.media_urls import MediaFetcher
from epd_portable.router.exchange import Exchange
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.endpoints_file import EndpointsFile
from epd_portable.router.fleet.registration import MAX_BODY_BYTES, Registration
from epd_portable.router.hops import answer_headers, read_hints
from epd_portable.router.http.upstream import Upstream
from epd_portable.router.ingress.cors import Cors
from epd_portable.router.ingress.priority import priority_of
from epd_portable.router.observability.access_log import AccessLog
from epd_portable.router.observability.metrics import Metrics
from epd_portable.router.observability.record import Listener
from epd_portable.router.selector import EndpointSelector
from epd_portable.router.settings import RouterSettings, policy_of
from epd_portable.router.stored import LearningLookup
from epd_portable.router.warm_up import WarmUp

logger = logging.getLogger(__name__)

WITH_MEDIA = frozenset({CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH})
"""Paths whose bodies are read: encoders get the items in them."""
_POSTED = """
/tokenize /detokenize /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank
/v1/rerank /v2/rerank /generative_scoring /v1/messages/count_tokens /v1/chat/completions/batch
/v1/chat/completions/derender /v1/chat/completions/render /v1/completions/derender
/v1/completions/render /v1/messages/render /v1/responses/render /v1/systemone
/v1/audio/transcriptions /v1/audio/translations /cohere/v2/chat /cohere/v2/chat/render /invocations
"""
TO_ANY_INSTANCE: Mapping[str, str] = {
    **dict.fromkeys(_POSTED.split(), "POST"),
    **dict.fromkeys(("/v1/models", "/version", "/load", "/tokenizer_info"), "GET"),
}
"""Paths that go to a PD instance, and the method of each; the items in them are encoded there."""
NO_JSON = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Of them, those whose bodies are forms, which are not read."""
_OF_ONE_INSTANCE = """
/abort_requests /adapters /adapters/ /collective_rpc /docs /docs/ /fault_tolerance/
/finish_weight_update /get_world_size /init_weight_transfer_engine /is_paused /is_scaling_elastic_ep
/is_sleeping /kv_event_sources /openapi.json /pause /redoc /release_kv_cache_memory
/reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /server_info
/shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_profile
/start_weight_update /static /static/ /stop_profile /update_weight_version /update_weights
/v1/load_lora_adapter /v1/unload_lora_adapter /wake_up /weight_checker /weight_info
"""
NOT_SERVED: Mapping[str, str] = {
    "/v1/responses/": "responses are not kept for later: ask with stream, or take the whole answer",
    NAMES_MEDIA: WHY_NO_NAMES,
    **dict.fromkeys(
        _OF_ONE_INSTANCE.split(),
        "what it does concerns one instance: its operator asks that one directly",
    ),
}
"""Paths of vLLM that are refused on purpose, and why; one with a final slash stands for all below
it."""
LOOKS = frozenset({"/health", "/ping", "/metrics"})
"""Paths whose GETs are not counted: monitors ask them all the time."""
OTHER = "other"
"""Label of all paths that are not served."""

PASSED_ON = (
    "authorization",
    "traceparent",
    "tracestate",
    SESSION_HEADER,
    "x-vllm-priority",
    "endpoint-load-metrics-format",
    "accept",
)
"""Headers of clients that reach instances. All others stay here, so none can be forged."""
IN_THREAD_BYTES = 256 * 1024
"""Bodies from this size on are read in a thread."""
SWEEP_EVERY_S = 1.0
_OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry that name a collector."""


class Router:
    """Everything that lives as long as the server.

    Raises:
        ConfigError: The secret file or another one cannot be used.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._policy = policy_of(settings)
        if self._policy is not None and (wished_s := self._policy.encode_timeout_s) is not None:
            settings = settings.model_copy(update={"encode_timeout_s": wished_s})
            if (job_s := settings.encode_job_s) < wished_s:
                logger.warning(
                    "router.choice: of encoderTimeout, %g s, an encode job gets %g s, half of "
                    "transfer.wait_timeout_s, so that another encoder can be tried",
                    wished_s,
                    job_s,
                )
        self.settings = settings
        self.draining = False
        self.in_flight: set[ClientExchange] = set()
        secret = Secret.read(settings.secret_file)
        self._keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file else None
        self._hops: ApiKeys | None = None
        if settings.hop_keys_file:
            self._hops = ApiKeys(settings.hop_keys_file, "router.hop_keys_file")
        self._passed_on: tuple[str, ...] = PASSED_ON[1:] if self._keys else PASSED_ON
        if self._policy is not None and self._policy.profile_header:
            self._passed_on += (self._policy.profile_header,)
        self.upstream = Upstream({INSTANCE_TOKEN_HEADER: secret.instance_token()})
        self.instances = EndpointPool(caches=self._policy.cache_sizes if self._policy else None)
        self.metrics = Metrics(self.instances, llmd_names=settings.metrics_names == "llmd")
        takes_media = settings.local_encode and settings.media == "concurrent"
        elastic = takes_media and settings.elastic_encode
        self._switching = Switching(self.instances, elastic=elastic)
        self.listeners: list[Listener] = [self.metrics, *observers(settings)]
        self._control = ControlChannels(CurveKeys.derive(secret))
        self._store: LearningLookup | None = None
        if settings.store is not None:
            self._store = LearningLookup(
                settings.store,
                secret,
                self.metrics.store,
                lambda: (each.name for each in self.instances.all if each.role == "encode"),
            )
        for note in self._policy.notes if self._policy is not None else ():
            logger.warning("router.choice: %s", note)
        self.exchange = Exchange(
            settings,
            self.instances,
            EndpointSelector(self.instances, self._policy, deciders=takes_media),
            self.upstream,
            self._control,
            self.metrics,
            secret,
            self._store,
        )
        if settings.endpoints_file is not None:
            EndpointsFile(settings.endpoints_file, self.instances)
        together = (settings, self.instances, self.upstream, self._control)
        warm_up = WarmUp(*together, secret, self._store)
        self.members = Registration(
            *together,
            self.metrics,
            warm_up.warm_up,
            secret,
            wants_loads=self._policy is not None and self._policy.wants_loads,
        )
        self._admission: AdmissionControl | None = None
        if settings.admission != AdmissionSection():
            self._admission = AdmissionControl(
                settings.admission, self.instances, self.metrics.admission
            )
        self.held_bytes = HeldBytes(settings.max_bodies_bytes)
        self._body = partial(Body, self.held_bytes, settings.max_body_bytes)
        self._rules = Rules(
            max_items=settings.max_media_items,
            limits=MediaLimits.among(settings),
            pd_takes_media=settings.local_encode,
        )
        self._fetcher: MediaFetcher | None = None
        if settings.media_urls.allowed_domains:
            self._fetcher = MediaFetcher(settings.media_urls, self._body, self.metrics)
        self._cors = Cors(settings.cors_origins)
        self._sweeping: asyncio.Handle | None = None

    async def serve(self, request: IncomingRequest) -> None:
        """Answer one request."""
        path, preflight = request.path, None
        for_client: Mapping[str, str] = {}
        if self.settings.cors_origins:
            for_client = self._cors.headers(request.headers)
            preflight = self._cors.preflight(request.method, request.headers)
        client = ClientExchange(request, self._passed_on, for_client)
        if preflight is not None:
            client.send_reply(preflight)
        elif path in WITH_MEDIA or path in TO_ANY_INSTANCE:
            await self._generate(path, client)
        else:
            await self._answer_itself(path, client)

    async def open(self) -> None:
        """Connect to the instances and watch them.

        Raises:
            ConfigError: An address cannot be used.
        """
        self._sweeping = asyncio.get_running_loop().call_soon(self._sweep)
        await self.members.open()

    async def close(self) -> None:
        """End everything."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._store is not None:
            self._store.close()
        await self.exchange.close()
        for listener in self.listeners:
            await listener.close()
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

    async def _generate(self, path: str, client: ClientExchange) -> None:
        """Answer by a PD instance; what a client gives up is given up everywhere."""
        work = asyncio.current_task()
        assert work is not None
        record = client.record
        record.start(self.listeners)
        self.in_flight.add(client)
        client.work = work
        admission, ticket = self._admission, None
        try:
            with self._body() as body:
                call = await self._read(path, client, body)
                client.note_read()
                record.model, record.stream = call.model, call.stream
                if admission is not None and call.method != "GET":
                    ticket = await admission.enter(
                        items=len(call.items),
                        nbytes=body.counted,
                        key=client.key,
                        priority=priority_of(call, client.headers),
                    )
                    client.encoded = functools.partial(admission.encoded, ticket)
                record.admitted_at = time.monotonic()
                if client.named is not None:
                    names = [item.item_uuid for item in call.items]
                    client.for_hop = lambda: answer_headers(record, names, self.instances)
                await self.exchange.serve(call, client)
        except RequestError as error:
            client.fail(error)
        except ClientGoneError:
            record.gone = True
        except asyncio.CancelledError:
            if client.overdue:
                client.fail(body_timeout(self.settings.body_timeout_s))
            elif not record.gone:
                # The server stops and waits no longer.
                client.fail(unavailable("the router is stopping"))
        except Exception:
            logger.exception("request %s", client.request_id)
            client.fail(_internal(client.request_id))
        finally:
            if admission is not None:
                admission.leave(ticket)
            self.in_flight.discard(client)
            record.finish()

    async def _read(self, path: str, client: ClientExchange, body: Body) -> Call:
        """Return what the client asks for."""
        method = TO_ANY_INSTANCE.get(path, "POST")
        if client.method != method:
            raise _no_such(client.method, path, 405)
        if self._keys is not None:
            client.key = self._keys.check(client.headers)
            client.record.client = client.key.hex()[:8]
            if client.headers.get(EXPLAIN_HEADER) == "1":
                client.explanation = Explanation()
        if self._hops is not None:
            client.named = read_hints(client.headers, self._hops)
        if path in NO_JSON:
            self._cors.check_origin(client.headers)
        elif method == "POST":
            check_json(client.headers)
        if self.draining:
            client.last = True
            raise unavailable("the router is stopping")
        data = await read_body(client.request, body)
        client.record.nbytes = len(data)
        call = await self._call(method, path, data, client, body)
        query = client.request.query
        return msgspec.structs.replace(call, query=query) if query else call

    async def _call(
        self, method: str, path: str, data: Data, client: ClientExchange, body: Body
    ) -> Call:
        if method == "GET" or path in NO_JSON:
            if given := client.headers.get("content-type"):
                client.for_instances["content-type"] = given
            return Call.untouched(method, path, data)
        client.for_instances["content-type"] = "application/json"
        rules = self._rules
        if client.named is not None:
            rules = msgspec.structs.replace(rules, takes_kv=True)
        if self._fetcher is None:
            return await _parsed(path, data, rules)
        with self._fetcher.of_request() as linked:
            call = await _parsed(path, data, rules, linked.find_media)
            if linked.wanted:
                client.note_read()
                fetched_bytes = await linked.fetch()
                call = await _parsed(path, data, rules, linked.find_media, fetched_bytes)
                body.count(len(data) + linked.nbytes)
            return call

    # What the router answers itself.

    async def _answer_itself(self, path: str, client: ClientExchange) -> None:
        try:
            reply = await self._own_reply(path, client)
        except RequestError as error:
            reply = error_reply(error)
        except ClientGoneError:
            return
        client.send_reply(reply)
        if client.method == "GET" and path in LOOKS:
            return
        self.metrics.requests.labels(OTHER, str(reply.status)).inc()

    async def _own_reply(self, path: str, client: ClientExchange) -> Reply:
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
                raise not_served(client.method, path, why)
        raise _no_such(client.method, path, 404)

    async def _operators_body(self, client: ClientExchange) -> bytes:
        """Return a body for ``/epd/``; that it may be asked for is known only from the whole."""
        try:
            with anyio.fail_after(self.settings.body_timeout_s):
                remedy = "no address for operators takes as much"
                with Body(self.held_bytes, MAX_BODY_BYTES, remedy) as body:
                    return bytes(await read_body(client.request, body))
        except TimeoutError:
            raise body_timeout(self.settings.body_timeout_s) from None

    async def _health(self, client: ClientExchange) -> Reply:
        """Answer 200 while a request could be served, else 503.

        Names of instances are for holders of the secret.
        """
        answer: dict[str, object] = {"status": self.state, "counts": self.instances.counts()}
        states = self.members.states(client.method, client.target, client.headers)
        if states is not None:
            answer["instances"] = states
        return json_reply(answer, 200 if answer["status"] == "ok" else 503)

    @property
    def state(self) -> Literal["ok", "unavailable", "draining"]:
        """Whether a request could be served."""
        usable = self.instances.any_usable("answer")
        if self._hops is not None:
            # For hops that answer elsewhere it prefills.
            usable = usable or self.instances.any_usable("prefill")
        return "draining" if self.draining else "ok" if usable else "unavailable"

    def _on_admin_port(self, client: ClientExchange) -> bool:
        return self.settings.admin_port is None or client.request.port == self.settings.admin_port

    # Clients that send nothing, or take nothing.

    def _sweep(self) -> None:
        """Give up clients that do not send their bodies, or take nothing of their answers.

        It comes again, whatever fails in it: the event loop logs that.
        """
        settings = self.settings
        shortest = min(settings.body_timeout_s, settings.send_timeout_s)
        again_s = min(SWEEP_EVERY_S, shortest / 4)
        self._sweeping = asyncio.get_running_loop().call_later(again_s, self._sweep)
        self._give_up_slow_clients(time.monotonic())
        if settings.switch_roles:
            self._switching.tick(time.monotonic())

    def _give_up_slow_clients(self, now: float) -> None:
        for client in tuple(self.in_flight):
            if 0 < client.reading_since < now - self.settings.body_timeout_s:
                client.overdue = True
                client.reading_since = 0.0
                client.work.cancel()
            elif 0 < client.sending_since < now - self.settings.send_timeout_s:
                logger.warning(
                    "request %s: its client took nothing for %g s",
                    client.request_id,
                    self.settings.send_timeout_s,
                )
                client.give_up()


def observers(settings: RouterSettings) -> list[Listener]:
    """Return listeners to requests besides the metrics, tracing first: others show its names.

    Raises:
        ConfigError: A file cannot be written, or a package is missing.
    """
    found: list[Listener] = []
    endpoint = settings.tracing.endpoint
    named = next((name for name in _OTEL_ENDPOINTS if os.environ.get(name)), "")
    # Switched off, OpenTelemetry has no names of spans to send.
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if (endpoint or named) and not off:
        try:
            from epd_portable.router.observability.tracing import Tracing, provider
        except ImportError as error:
            asked = "router.tracing.endpoint" if endpoint else f"the variable {named}"
            raise ConfigError(
                f"{asked} asks for spans, and OpenTelemetry is not installed ({error}): install "
                "epd-portable[otel], or leave it out"
            ) from error
        found.append(Tracing(provider(endpoint)))
    if settings.access_log:
        found.append(AccessLog(settings.access_log))
    return found


async def _parsed(
    path: str, data: Data, rules: Rules, find: FindMedia | None = None, fetched_bytes: int = 0
) -> Call:
    if len(data) + fetched_bytes < IN_THREAD_BYTES:
        return read_call(path, data, rules, find)
    return await asyncio.to_thread(read_call, path, data, rules, find)


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

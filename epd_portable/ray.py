"""A topology as an application of Ray Serve: ``import_path: epd_portable.ray:build_app``.

A replica is a launcher with all instances of the file on one node, and has vLLM's server over them,
the engine front. Serve's proxy asks the replica, and the replica that server: tokens go through
Serve once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from epd_portable.config.quantities import Seconds, Section
from epd_portable.errors import RequestError
from epd_portable.launch.plan.launchers import LauncherSpec, MostOwed, fullness
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.plan.processes import new_run_id
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.run.held import HeldLauncher
from epd_portable.placement.replies import error_reply
from epd_portable.ray_cluster import actor_options

logger = logging.getLogger(__name__)

_FULLNESS = "epd_fullness"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OF_A_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_METRICS_WITHIN_S = 8.0
_SERVES_OWN = frozenset({b"date", b"server", b"x-request-id"})
"""Headers of answers that Serve sets; it gives requests their ids."""
_MOST_REQUESTS = 10_000
"""Requests at a replica: the front has bounds of its own, and says so when it refuses one."""


class AppArgs(Section):
    """``args`` of an application: the options of ``epd-launch up``, and how it is scaled."""

    config: str
    platform: str | None = None
    hardware: str | None = None
    model: str | None = None
    set: list[str] = Field(default_factory=list)
    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    most_encode_s: Seconds = MostOwed().encode_s
    most_answer_s: Seconds = MostOwed().answer_s


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application; Serve calls it with the ``args`` of its configuration: `AppArgs`.

    Raises:
        ConfigError: The file is wrong, or the topology does not fit the platform or the profile.
    """
    given = AppArgs.model_validate(args)
    request = PlanRequest.from_options(
        platform=given.platform,
        config=Path(given.config),
        hardware=given.hardware,
        model=given.model,
        overrides=tuple(given.set),
    )
    # Serve's proxy is what clients reach.
    spec = LauncherSpec.plan(
        request,
        "epd",
        *("launch.host=127.0.0.1", "router.host=127.0.0.1", "router.join=[]"),
        *("router.tls_cert_file=null", "router.tls_key_file=null"),
        most=MostOwed(encode_s=given.most_encode_s, answer_s=given.most_answer_s),
    )
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="epd",
        ray_actor_options=actor_options(spec.resources),
        autoscaling_config=AutoscalingConfig(
            min_replicas=given.min_replicas,
            max_replicas=given.max_replicas,
            policy=AutoscalingPolicy(policy_function=f"{__name__}:wanted_replicas"),
        ),
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=spec.stop_s,
    )
    return deployment.bind(spec)


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas there should be: each as full as one may be."""
    found = context.aggregated_metrics.get(_FULLNESS, {}) if context.aggregated_metrics else {}
    return math.ceil(sum(found.values())) or 1, {}


class Replica:
    """A launcher with all instances, and the way to its server."""

    def __init__(self, spec: LauncherSpec) -> None:
        port = port_source(new_run_id())()
        self._launcher = HeldLauncher(spec, f"router.port={port}")
        self._launcher.wait_ready()
        url = self._launcher.url
        self._room_s = spec.room_s
        # An answer may take as long as its client waits.
        self._client = httpx.AsyncClient(
            base_url=url, timeout=None, trust_env=False, limits=httpx.Limits()
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._pass_on, methods=_METHODS)])

    def check_health(self) -> None:
        """Raise if the launcher has ended; what it has started it restarts by itself."""
        self._launcher.require()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how full this replica's instances are, for `wanted_replicas`."""
        owed_s: dict[str, float] = {}
        page = await self._client.get("/metrics", timeout=_METRICS_WITHIN_S)
        for family in text_string_to_metric_families(page.text):
            if family.name in ("epd_front_owed_seconds", "epd_router_owed_seconds"):
                for sample in family.samples:
                    role = sample.labels["role"]
                    owed_s[role] = owed_s.get(role, 0.0) + sample.value
        return {_FULLNESS: fullness(owed_s, self._room_s)}

    async def __del__(self) -> None:
        """Let the launcher end; Serve has waited for open requests."""
        await asyncio.to_thread(self._launcher.stop)

    async def _pass_on(self, request: Request) -> Response:
        """Pass a request to the front, and its answer back as it comes."""
        has_body = not {"content-length", "transfer-encoding"}.isdisjoint(request.headers)
        asked = self._client.build_request(
            request.method,
            httpx.URL(path=f"/{request.path_params['path']}", query=request.url.query.encode()),
            headers=_end_to_end(request.headers.raw, without={b"host"}),
            content=request.stream() if has_body else None,
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.TransportError as error:
            logger.warning("%s does not answer: %s", asked.url, error)
            problem = "this replica's server does not answer now; ask again"
            away = RequestError(problem, status=503, code="unavailable", retry_after_s=1)
            reply = error_reply(away, request.url.path)
            return Response(reply.body, reply.status, dict(reply.headers))
        passed = StreamingResponse(_content(answer), answer.status_code)
        passed.raw_headers = _end_to_end(answer.headers.raw, without=_SERVES_OWN)
        return passed


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an answer as it comes; the request ends with it, or when it is not read on."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _end_to_end(
    headers: Sequence[tuple[bytes, bytes]], *, without: Collection[bytes]
) -> list[tuple[bytes, bytes]]:
    dropped = _OF_A_CONNECTION.union(without)
    return [(name, value) for name, value in headers if name.lower() not in dropped]

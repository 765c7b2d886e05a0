"""The router as an ASGI application: its parts, its endpoints, their paths."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from epd_portable.config.secret import Secret
from epd_portable.connector.curve import CurveKeys
from epd_portable.errors import RequestError
from epd_portable.router.control import ControlChannels
from epd_portable.router.generation import Generation, headers_for_instances
from epd_portable.router.introduction import Introducer
from epd_portable.router.membership import Membership
from epd_portable.router.metrics import Metrics
from epd_portable.router.pipeline import Pipeline
from epd_portable.router.pool import Pool, describe
from epd_portable.router.registration import INSTANCE_PATH, INSTANCES_PATH, Registration
from epd_portable.router.replies import Reply, error_reply, unavailable
from epd_portable.router.requests import (
    CHAT_PATH,
    COMPLETION_PATH,
    Call,
    read_chat,
    read_completion,
)
from epd_portable.router.settings import RouterSettings


class Router:
    """Everything that lives as long as the server.

    Raises:
        ConfigError: The secret file cannot be used.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.pool = Pool(settings)
        self.metrics = Metrics(lambda: self.pool.instances)
        secret = Secret.read(settings.secret_file)
        self.control = ControlChannels(CurveKeys.derive(secret))
        self.pipeline = Pipeline(settings, self.pool, self.control, self.metrics, secret)
        introducer = Introducer(settings, self.pool, self.control, secret)
        self.membership = Membership(
            settings, self.pool, self.control, self.metrics, introducer.introduce
        )
        self.registration = Registration(
            self.membership, self.pool, secret if settings.registration else None
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect to the instances and watch them.

        Raises:
            ConfigError: An address cannot be used.
        """
        try:
            await self.membership.open()
            yield
        finally:
            await self.pipeline.close()
            await self.membership.close()
            await self.control.close()

    def read_chat(self, data: bytes) -> Call:
        """Read a chat request under this router's limits."""
        return read_chat(data, model=self.settings.model, max_items=self.settings.max_media_items)

    def read_completion(self, data: bytes) -> Call:
        """Read a text completion request."""
        return read_completion(data, model=self.settings.model)

    def generation(self, path: str, read: Callable[[bytes], Call]) -> Generation:
        """Return the endpoint of one kind of generation."""
        limit = self.settings.max_body_bytes
        return Generation(path, read, self.pipeline, self.metrics, max_body_bytes=limit)

    async def health(self, request: Request) -> Response:
        """Answer 200 while a request could be served, else 503; with the instances' states."""
        instances = {
            instance.name: {
                "role": instance.role,
                "healthy": instance.healthy,
                "state": instance.state,
                "in_flight": instance.in_flight,
                **({} if instance.healthy else {"reason": instance.reason}),
                **({"problem": instance.problem} if instance.problem else {}),
            }
            for instance in self.pool.instances
        }
        usable = any(instance.usable for instance in self.pool.of_role("prefill-decode"))
        return JSONResponse(
            {"status": "ok" if usable else "unavailable", "instances": instances},
            status_code=200 if usable else 503,
        )

    async def show_metrics(self, request: Request) -> Response:
        """Answer with all metrics in Prometheus text format."""
        return Response(
            self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self, request: Request) -> Response:
        """Answer with a PD instance's list of models."""
        pd = self.pool.prefill_decode("models")
        if pd is None:
            return _response(error_reply(unavailable("no prefill+decode instance can serve")))
        try:
            with pd.held():
                answer = await pd.client.get(
                    "/v1/models",
                    headers=headers_for_instances(request),
                    timeout=self.settings.probe_timeout_s,
                )
        except httpx.RequestError as error:
            pd.suspect()
            message = f"instance {pd.name}: {describe(error)}"
            return _response(error_reply(unavailable(message)))
        return Response(
            answer.content, answer.status_code, media_type=answer.headers.get("content-type")
        )


def create_app(settings: RouterSettings) -> Starlette:
    """Return the router as an ASGI application; its lifespan connects to the instances."""
    router = Router(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route(CHAT_PATH, router.generation(CHAT_PATH, router.read_chat), methods=["POST"]),
            Route(
                COMPLETION_PATH,
                router.generation(COMPLETION_PATH, router.read_completion),
                methods=["POST"],
            ),
            Route("/v1/models", router.models),
            Route("/health", router.health),
            Route("/metrics", router.show_metrics),
            Route(INSTANCES_PATH, router.registration.instances, methods=["GET", "POST"]),
            Route(INSTANCE_PATH, router.registration.instance, methods=["DELETE"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, reply.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ", ".join(f"POST {path}" for path in (CHAT_PATH, COMPLETION_PATH))
    message = (
        f"{request.method} {request.url.path}: {error.detail}; served are {known}, "
        "GET /v1/models, GET /health, GET /metrics"
    )
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return _response(error_reply(RequestError(message, status=error.status_code, code=code)))

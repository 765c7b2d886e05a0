"""Fixtures of tests of the front."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from epd_portable.front.client import SplitClient
    from epd_portable.front.server import Front
    from tests.integration.front.played_front import Make, Serve


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Let what a test left show in its own module, where ``__del__`` raises."""
    yield
    gc.collect()


@pytest.fixture
def make(config: Any, tmp_path: Path) -> Make:
    """Return what makes a front of engines with these names."""
    from tests.integration.front.played_front import Front

    return partial(Front, config, tmp_path)


@pytest.fixture(scope="module")
def configured() -> Any:
    """vLLM's configuration of a front whose processor cache holds a few images."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from epd_portable.front.server import configuration
    from tests.integration.front.played_front import MODEL

    arguments = AsyncEngineArgs(
        model=str(MODEL), enforce_eager=True, mm_processor_cache_gb=0.001, max_model_len=2048
    )
    return configuration(arguments)


@pytest.fixture
def client(configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SplitClient:
    """Return the client below `front`, of engines that are not up."""
    from vllm.v1.engine.core_client import EngineCoreClient

    from tests.integration.front.played_front import client_of

    made = client_of(configured, tmp_path, "e-0", "e-1", "pd-0", "pd-1")
    made.engines.close = lambda: None
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", lambda *_, **__: made)
    return made


@pytest.fixture
async def front(client: SplitClient) -> AsyncIterator[Front]:
    """vLLM's engine client of a front, with its processor."""
    from epd_portable.front.server import Front

    made = Front.from_vllm_config(client.vllm_config)
    yield made
    made.shutdown()


@pytest.fixture
def serve(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return what puts a front with some settings before an application that counts bytes."""
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    from epd_portable.front.http import FrontMiddleware
    from tests.integration.front.played_front import client_of, http_to, within

    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    made: list[FrontMiddleware] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        await PlainTextResponse(str(len(body)))(scope, receive, send)

    def begin(
        guarded: Callable[[ASGIApp, SplitClient], ASGIApp] = lambda app, _: app, **settings: Any
    ) -> Any:
        client = client_of(config, tmp_path, "e-0", "pd-0", **settings)
        made.append(FrontMiddleware(guarded(app, client)))
        return http_to(within(made[-1], client)), client

    yield begin
    for middleware in made:
        for handler in middleware._log.handlers if middleware._log else ():
            handler.close()

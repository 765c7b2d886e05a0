"""A topology as an application of Ray Serve: ``import_path: epd_portable.ray:build_app``.

A replica is a launcher with the front and all engines of the file on one node. Serve places the
replicas on nodes, balances requests among the replicas, and scales them by open requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from epd_portable.config.load import or_shipped
from epd_portable.config.problems import read_text
from epd_portable.config.quantities import Section
from epd_portable.errors import LaunchError, RequestError
from epd_portable.launch.environment import child_environ, new_run_id
from epd_portable.launch.plan.machine import port_source
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.run.guard import Guard
from epd_portable.launch.run.supervisor import DRAIN_MARGIN_S
from epd_portable.responses import error_reply

logger = logging.getLogger(__name__)

_BEHIND_SERVE = (
    *("launch.host=127.0.0.1", "front.host=127.0.0.1", "launch.join=[]"),
    *("front.tls_cert_file=null", "front.tls_key_file=null"),
)
"""Settings of a replica: clients reach the proxy of Serve, which ends TLS."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_SET_BY_SERVE = frozenset({b"date", b"server", b"x-request-id"})
"""Headers of responses; Serve assigns the ids of requests."""
_CLEAN_UP_S = 60.0


class AppArgs(Section):
    """``args`` of an application: the options of ``epd-launch up``."""

    config: str
    platform: str | None = None
    hardware: str | None = None
    model: str | None = None
    set: list[str] = Field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherSpec:
    """Options of ``epd-launch up``, the text of ``--config``, and limits of a start and a stop."""

    options: tuple[str, ...]
    topology: str
    start_s: float
    stop_s: float


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application; Serve calls this with the ``args`` of its configuration: `AppArgs`.

    Raises:
        ConfigError: The file is invalid, or the topology does not fit the platform or the profile.
    """
    given = AppArgs.model_validate(args)
    request = PlanRequest.from_options(
        platform=given.platform,
        config=Path(given.config),
        hardware=given.hardware,
        model=given.model,
        overrides=(*given.set, *_BEHIND_SERVE),
    )
    topology, plan = request.plan_elsewhere()
    settings = [f"--set={each}" for each in request.overrides]
    spec = LauncherSpec(
        options=("--platform", request.traits.name, *settings),
        topology=read_text(or_shipped(request.config)),
        start_s=2 * topology.launch.startup_timeout_s,
        stop_s=topology.front.drain_s + topology.launch.stop_grace_s + DRAIN_MARGIN_S,
    )
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="epd",
        ray_actor_options=_actor_options(request, plan),
        max_ongoing_requests=10_000,  # The front has lower limits, with an error for each.
        graceful_shutdown_timeout_s=spec.stop_s + _CLEAN_UP_S,
    )
    return deployment.bind(spec)


def _actor_options(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """Return the devices of a launcher, or a core for each engine without a device."""
    engines = sum(spec.role != "front" for spec in plan.processes)
    word = request.traits.ray_resource
    amounts = {"CPU": 0, "GPU": 0, word: engines if word == "CPU" else len(plan.devices)}
    return {
        "num_cpus": amounts.pop("CPU"),
        "num_gpus": amounts.pop("GPU"),
        "resources": amounts,
        "accelerator_type": request.hardware and request.hardware.accelerator_type,
        # Otherwise Ray kills the guard of the launcher together with the replica.
        "runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
    }


class Launcher:
    """``epd-launch up`` as a child process that ends with this process, also after SIGKILL."""

    def __init__(self, spec: LauncherSpec) -> None:
        self._spec = spec
        self._ready, self._ended = threading.Event(), threading.Event()
        self._notice = ""
        mark = new_run_id()
        port = port_source(mark)()
        self.url = f"http://127.0.0.1:{port}"
        folder = Path(tempfile.mkdtemp(prefix="epd-ray-"))
        config, log = folder / "topology.yaml", folder / "guard.log"
        config.write_text(spec.topology, "utf-8")
        self._guard = Guard(run_id=mark, temp_dir=folder, grace_s=1.0, log=log)
        options = (*spec.options, f"--config={config}", f"--port={port}", "--json")
        environ = child_environ(os.environ)
        environ.pop("OMP_NUM_THREADS", None)  # Ray limits the replica's own process by it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd_portable.launch.cli", "up", *options],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until the front serves requests.

        Raises:
            LaunchError: The launcher has ended before, or is not ready in time.
        """
        if not self._ready.wait(self._spec.start_s):
            limit = f"{self._spec.start_s:g} s, twice launch.startup_timeout_s"
            raise LaunchError(f"launcher: not ready within {limit}: {self._notice}")
        self.require()

    def require(self) -> None:
        """Raise `LaunchError`, with the reason, if the launcher has ended."""
        if self._ended.is_set():
            status = self._process.returncode
            raise LaunchError(f"launcher: ended with status {status}: {self._notice}")

    def stop(self) -> None:
        """End the launcher as by Ctrl-C, and kill what is left of it after its time."""
        self._process.terminate()
        self._ended.wait(self._spec.stop_s)
        self._guard.close(timeout_s=_CLEAN_UP_S)
        self._process.wait(_CLEAN_UP_S)

    def _read(self) -> None:
        """Print the launcher's notices until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            notice: dict[str, Any] = json.loads(line)
            is_error = notice["event"] == "error"
            self._notice = notice["error"]["message"] if is_error else notice["text"]
            print(self._notice, flush=True)
            if notice["event"] == "ready":
                self._ready.set()
        self._process.wait()
        self._ended.set()
        self._ready.set()


class Replica:
    """A launcher, and an ASGI application that forwards requests to its front."""

    def __init__(self, spec: LauncherSpec) -> None:
        self._launcher = Launcher(spec)
        self._launcher.wait_ready()
        # The timeouts are those of the client and of the front.
        self._client = httpx.AsyncClient(
            base_url=self._launcher.url, timeout=None, trust_env=False, limits=httpx.Limits()
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])

    def check_health(self) -> None:
        """Raise if the launcher has ended; the launcher itself restarts engines."""
        self._launcher.require()

    async def __del__(self) -> None:
        """End the launcher; Serve has waited for open requests."""
        await asyncio.to_thread(self._launcher.stop)

    async def _forward(self, request: Request) -> Response:
        """Forward a request to the front, and return the response while it arrives."""
        has_body = not {"content-length", "transfer-encoding"}.isdisjoint(request.headers)
        sent = self._client.build_request(
            request.method,
            httpx.URL(path=f"/{request.path_params['path']}", query=request.url.query.encode()),
            headers=_end_to_end(request.headers.raw, without={b"host"}),
            content=request.stream() if has_body else None,
        )
        try:
            received = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            logger.warning("%s: unreachable: %s", sent.url, error)
            problem = "front of this replica: unreachable. Repeat the request."
            away = RequestError(problem, status=503, code="unavailable", retry_after_s=1)
            reply = error_reply(away, request.url.path)
            return Response(reply.body, reply.status, dict(reply.headers))
        response = StreamingResponse(_content(received), received.status_code)
        response.raw_headers = _end_to_end(received.headers.raw, without=_SET_BY_SERVE)
        return response


async def _content(received: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a response while it arrives, and close its connection at the end or a cancellation."""
    try:
        async for piece in received.aiter_raw():
            yield piece
    finally:
        await received.aclose()


def _end_to_end(
    headers: Sequence[tuple[bytes, bytes]], *, without: Collection[bytes]
) -> list[tuple[bytes, bytes]]:
    dropped = _HOP_BY_HOP.union(without)
    return [(name, value) for name, value in headers if name.lower() not in dropped]

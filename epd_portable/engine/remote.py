"""Engine for fronts on other machines: ``python -m epd_portable.engine.remote JSON ARGUMENTS``.

``JSON`` is a `Places`, and ``ARGUMENTS`` are those of vLLM's server. Fronts are informed of the
engine by the process that registers it; the engine itself serves every holder of the secret, see
`epd_portable.engine.hub`, and has a page for operators.
"""

from __future__ import annotations

from epd_portable.vllm_plugin import imports  # noqa: F401

# isort: split

import asyncio
import copy
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import msgspec
from prometheus_client import REGISTRY, make_wsgi_app
from vllm.config import VllmConfig
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.executor import Executor

from epd_portable.config.folders import temp_folder
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.roles import SENDS_KV, Role
from epd_portable.engine.core import configuration, run
from epd_portable.engine.hub import Hub
from epd_portable.vllm_plugin import agreement, exposition
from epd_portable.vllm_plugin.job_items import JobReader

logger = logging.getLogger(__name__)

_END_WITHIN_S = 5.0


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses at which an engine listens.

    Attributes:
        hub: ZMQ address for fronts.
        plain: Jobs are not encrypted.
        page: Host and port of its page, ``/health`` and ``/metrics``.
    """

    role: Role
    hub: str
    plain: bool
    page: tuple[str, int]


def main() -> None:
    """Run one engine in this process until the launcher ends it."""
    given, *argv = sys.argv[1:]
    places = msgspec.json.decode(given, type=Places)
    config, log_stats = configuration(argv)
    instance = InstanceConfig.parse(config.ec_transfer_config.ec_connector_extra_config)
    fingerprint, reader = agreement.fingerprint(config), JobReader(config, places.role)
    kv = agreement.kv_form(config) if places.role in SENDS_KV else ""
    hub = Hub(places.hub, instance, places.role, fingerprint, reader, kv=kv, plain=places.plain)
    exposition.serve()
    _serve_page(places.page, lambda: hub.well)
    place = f"ipc://{temp_folder()}/hub-{os.getpid()}"
    given_hub = (hub, copy.copy(config), place)
    threading.Thread(target=_serve_hub, args=given_hub, name="epd-hub", daemon=True).start()
    run(config, [place], log_stats=log_stats)


def _serve_hub(hub: Hub, config: VllmConfig, place: str) -> None:
    """Serve in this thread; without its hub the engine ends."""
    config.cache_config = copy.copy(config.cache_config)  # A client adds up what engines report.
    try:
        addresses = {"input_address": f"{place}-in", "output_address": f"{place}-out"}
        client = AsyncMPClient(config, Executor.get_class(config), True, addresses)
        asyncio.run(hub.serve(client))
    except Exception:
        logger.exception("the hub has ended: this engine ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_END_WITHIN_S)
    os._exit(1)


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log no probe."""


def _serve_page(address: tuple[str, int], is_well: Callable[[], bool]) -> None:
    metrics = make_wsgi_app(REGISTRY)

    def page(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            found: Iterable[bytes] = metrics(environ, start)
            return found
        if environ["PATH_INFO"] != "/health":
            status = HTTPStatus.NOT_FOUND
        else:
            status = HTTPStatus.OK if is_well() else HTTPStatus.SERVICE_UNAVAILABLE
        start(f"{status.value} {status.phrase}", [("content-length", "0")])
        return []

    server = make_server(*address, page, handler_class=_Silent)
    threading.Thread(target=server.serve_forever, name="epd-page", daemon=True).start()


if __name__ == "__main__":
    main()

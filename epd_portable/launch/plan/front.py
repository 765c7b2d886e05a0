"""Who stands in front of the instances: vLLM's own server over their engines, or the router.

A plan is made for the router first. Where the engine front serves, its instances become engines
without servers, and the front takes the router's place.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

from epd_portable.config.roles import ROLES, Role
from epd_portable.config.routing import RouterSection
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan import installed
from epd_portable.launch.plan.engine import MEDIA_BOUNDS
from epd_portable.launch.plan.processes import Plan, ProcessSpec, run_secret_file

KNOWN = (0, 32)
"""First vLLM whose engine front has been run."""
_SERVED: frozenset[Role] = frozenset({"encode", "prefill-decode", "encode-prefill-decode"})
_KEPT = frozenset(
    {"host", "port", "tls_cert_file", "tls_key_file", "cors_origins", "item_outcomes"}
    | {"max_body_bytes", "max_bodies_bytes", "max_media_items", "max_item_pixels"}
    | {"max_request_pixels", "max_media_seconds", "max_media_memory_bytes"}
    | {"elastic_encode", "access_log", "tracing", "drain_s"}
)
"""Keys of ``router`` that the engine front keeps; any other that is set asks for the router."""
_SERVERS_OWN = ("--middleware", "--host", "--port", "--served-model-name")
_NO_DOMAIN = "none.invalid"
"""vLLM fetches media from everywhere unless it is told domains."""


def reasons_for_router(topology: Topology) -> list[str]:
    """Return why a topology needs the router; nothing if the engine front can serve it."""
    plain = RouterSection()
    found = [
        f"router.{name} is set"
        for name in RouterSection.model_fields
        if name not in _KEPT and getattr(topology.router, name) != getattr(plain, name)
    ]
    instances = topology.instances
    found += [f"there are {role} instances" for role in ROLES if instances.counts[role]
              and role not in _SERVED]  # fmt: skip
    if topology.secret_file is not None:
        found.append("secret_file is set, so instances of other hosts may join")
    if topology.store is not None:
        found.append("store is set")
    if not instances.prefill_decode.encoder:
        found.append("instances.prefill_decode.encoder is false")
    version = installed.vllm_version()
    if version is not None and version < KNOWN:
        found.append(f"vLLM {version[0]}.{version[1]} is older than {KNOWN[0]}.{KNOWN[1]}")
    return found


def with_front(plan: Plan, topology: Topology, temp_dir: str) -> Plan:
    """Return a plan with who the topology asks for in front, and why.

    Raises:
        ConfigError: It asks for the engine front and needs the router.
    """
    if topology.front == "router":
        return dataclasses.replace(plan, front="router: the file asks for it (front)")
    reasons = reasons_for_router(topology)
    if reasons and topology.front == "engine":
        raise ConfigError(
            f"front is engine, which does not serve this: {'; '.join(reasons)}; remove that, or "
            "set front to auto or router"
        )
    if reasons:
        return dataclasses.replace(plan, front=f"router: {'; '.join(reasons)}")
    return _engine_front(plan, topology, temp_dir)


def _engine_front(plan: Plan, topology: Topology, temp_dir: str) -> Plan:
    instances = [spec for spec in plan.processes if spec.role != "router"]
    (router,) = (spec for spec in plan.processes if spec.role == "router")
    model = next(spec for spec in instances if spec.role != "encode")
    socket, shared = f"{temp_dir}/front", {"EPD_METRICS_DIR": f"{temp_dir}/metrics"}
    engines = [_engine(spec, router, socket, shared) for spec in instances]
    encoders = [spec for spec in instances if spec.role == "encode"]
    front = dataclasses.replace(
        router,
        name="front",
        argv=(
            *(model.argv[0], "-m", "epd_portable.vllm_plugin.front"),
            *("--settings", json.dumps(_settings(instances, topology, temp_dir, socket))),
            *_server_arguments(topology, plan.model),
            *_engine_arguments(model.argv),
        ),
        env={**model.env, **shared, "EPD_INSTANCE": "front"},
        # Off the cores of steps that make tokens.
        cores=router.cores or tuple(core for spec in encoders for core in spec.cores),
    )
    return dataclasses.replace(
        plan,
        processes=(*engines, front),
        front="engine: all instances are on this machine, and nothing that is set needs the router",
    )


def _engine(
    spec: ProcessSpec, router: ProcessSpec, socket: str, env: dict[str, str]
) -> ProcessSpec:
    argv = (spec.argv[0], "-m", "epd_portable.vllm_plugin.engine_core", socket)
    # What the front has processed is kept there.
    return dataclasses.replace(
        spec,
        argv=(*argv, *_engine_arguments(spec.argv), "--mm-processor-cache-gb", "0"),
        env={**spec.env, **env},
        url=f"{router.url}/epd/instances/{spec.name}",
        tls_cert_file=router.tls_cert_file,
        ports={name: port for name, port in spec.ports.items() if name != "http"},
        api_cores=(),
    )


def _engine_arguments(argv: Iterable[str]) -> list[str]:
    """Return what of the command of an instance concerns its engine."""
    found, left = [], iter([*argv][3:])
    for each in left:
        if each in _SERVERS_OWN:
            next(left)
        else:
            found.append(each)
    return found


def _server_arguments(topology: Topology, model: str) -> list[str]:
    router = topology.router
    found = ["--host", router.host, "--port", str(router.port), "--served-model-name", model]
    if router.tls_cert_file and router.tls_key_file:
        found += ["--ssl-certfile", router.tls_cert_file, "--ssl-keyfile", router.tls_key_file]
    found += ["--allowed-origins", json.dumps(router.cors_origins)]
    found += ["--allowed-media-domains", _NO_DOMAIN]
    found += ["--shutdown-timeout", str(math.ceil(router.drain_s))]
    found += ["--enable-request-id-headers", "--disable-uvicorn-access-log"]
    found += ["--middleware", MEDIA_BOUNDS]
    # The last is outermost.
    return [*found, "--middleware", "epd_portable.vllm_plugin.front_http.FrontMiddleware"]


def _settings(
    instances: list[ProcessSpec], topology: Topology, temp_dir: str, socket: str
) -> dict[str, object]:
    """Return a ``FrontSettings`` of `epd_portable.vllm_plugin.front_client` as plain JSON."""
    router, encode = topology.router, topology.instances.encode
    return {
        "engines": [
            {
                "name": spec.name,
                "role": spec.role,
                "control": f"tcp://{topology.launch.host}:{spec.ports['control']}"
                if "control" in spec.ports
                else "",
                "weight": topology.instances.of(spec.role).weight if spec.role != "router" else 1.0,
                "max_queued_items": encode.max_queued_items,
            }
            for spec in instances
        ],
        "socket": socket,
        "secret_file": run_secret_file(temp_dir),
        "elastic_encode": router.elastic_encode,
        "wait_timeout_s": topology.transfer.wait_timeout_s,
        "item_outcomes": router.item_outcomes,
        "access_log": router.access_log,
        "max_body_bytes": router.max_body_bytes,
        "max_bodies_bytes": router.max_bodies_bytes,
        "max_media_items": router.max_media_items,
    }

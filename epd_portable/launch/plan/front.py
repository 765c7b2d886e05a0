"""Who stands in front of the instances, and the commands of the engine front and its engines. Pure.

Behind the engine front instances are engines without servers, which meet it at its Unix socket.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Literal

from epd_portable.config.roles import DUTIES, ROLES
from epd_portable.config.routing import RouterSection
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan import installed
from epd_portable.launch.plan.engine import CARRIES_PARAMS, MEDIA_BOUNDS, PARAMS, Engine

PRELOADED = ("epd_portable.front.server", "epd_portable.engine.core")
"""What front and engines import before they know which model they serve."""
_ANSWERS = tuple(role for role in ROLES if DUTIES[role] == "answer")
_KEPT = frozenset(
    {"host", "port", "tls_cert_file", "tls_key_file", "cors_origins", "item_outcomes"}
    | {"max_body_bytes", "max_bodies_bytes", "max_media_items", "max_item_pixels"}
    | {"max_request_pixels", "max_media_seconds", "max_media_memory_bytes"}
    | {"elastic_encode", "switch_roles", "access_log", "tracing", "drain_s"}
    | {"choice", "hop_keys_file", "encode_order", "partial_results"}
    | {"api_keys_file", "admission", "media_urls"}
)
"""Keys of ``router`` that the engine front keeps; any other that is set asks for the router."""
_BESIDE_ENCODER = ("mm_processor_device", "media_io_kwargs", "api_server_count")
"""Engine arguments for how an encode instance's own servers read and process media."""
PLAIN = "plain+"
"""Before the address of a hub to which jobs go without encryption."""
_NO_DOMAIN = "none.invalid"
"""vLLM fetches media from everywhere unless it is told domains."""


def choose_front(topology: Topology) -> tuple[Literal["engine", "router"], str]:
    """Return who stands in front, and why.

    Raises:
        ConfigError: The file asks for the engine front and needs the router.
    """
    if topology.front == "router":
        return "router", "the file asks for it (front)"
    reasons = "; ".join(_reasons_for_router(topology))
    if reasons and topology.front == "engine":
        raise ConfigError(
            f"front is engine, which does not serve this: {reasons}; remove that, or set front to "
            "auto or router"
        )
    if reasons:
        return "router", reasons
    if topology.router.join:
        return "engine", "encode instances join fronts on other machines"
    return (
        "engine",
        "all instances that answer are on this machine, and nothing that is set needs the router",
    )


def _reasons_for_router(topology: Topology) -> list[str]:
    plain = RouterSection()
    found = [
        f"router.{name} is set"
        for name in RouterSection.model_fields
        if name not in {*_KEPT, "join"} and getattr(topology.router, name) != getattr(plain, name)
    ]
    instances, joins = topology.instances, bool(topology.router.join)
    if joins and any(instances.counts[role] for role in ROLES if role != "encode"):
        found.append("router.join is set, and instances of other roles than encode join routers")
    found += [
        f"instances.encode.engine_args.{name} is set, and the engine front processes media itself"
        for name in _BESIDE_ENCODER
        if name in instances.encode.engine_args
    ]
    groups = [instances.of(role) for role in ROLES if instances.counts[role]]
    arguments = [topology.engine_args, *(each.engine_args for each in groups)]
    if any(each.get("mm_tensor_ipc") == "torch_shm" for each in arguments):
        found.append(
            "engine_args.mm_tensor_ipc is torch_shm, for instances with servers of their own only"
        )
    if not found and not joins and not any(instances.counts[role] for role in _ANSWERS):
        found.append("no instance here answers")
    return found


def core_argv(engine: Engine) -> tuple[str, ...]:
    """Return the command of an engine without a server."""
    # What the front has processed is kept there.
    arguments = engine.arguments(mm_processor_cache_gb=0)
    module = "epd_portable.engine.core"
    sockets = json.dumps(_sockets(engine))
    return (sys.executable, "-m", module, sockets, *arguments)


def remote_argv(engine: Engine) -> tuple[str, ...]:
    """Return the command of an engine that does jobs of fronts on other machines."""
    places = {
        "role": engine.role,
        "hub": hub_address(engine).removeprefix(PLAIN),
        "plain": engine.topology.transfer.trusted_network,
        "page": [engine.topology.launch.host, engine.ports["http"]],
    }
    arguments = engine.arguments(mm_processor_cache_gb=0)
    return (sys.executable, "-m", "epd_portable.engine.remote", json.dumps(places), *arguments)


def hub_address(engine: Engine) -> str:
    """Return where an engine takes jobs of other machines, as fronts are told."""
    plain = PLAIN if engine.topology.transfer.trusted_network else ""
    return f"{plain}tcp://{engine.topology.launch.host}:{engine.ports['jobs']}"


def front_argv(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Return the command of the front, which processes requests as an engine that answers does."""
    answers = answering(engines)
    router = answers.topology.router
    found = [sys.executable, "-m", "epd_portable.front.server"]
    found += ["--settings", json.dumps(_settings(engines))]
    # Media are processed here for encoders, whether the engine that answers takes any or not.
    wished = answers.wished_args
    media = {name: wished.get(name) for name in ("limit_mm_per_prompt", "enable_mm_embeds")}
    found += [*answers.arguments(**media), "--served-model-name", answers.model.served_name]
    found += ["--host", router.host, "--port", str(router.port)]
    if router.tls_cert_file and router.tls_key_file:
        found += ["--ssl-certfile", router.tls_cert_file, "--ssl-keyfile", router.tls_key_file]
    found += ["--allowed-origins", json.dumps(router.cors_origins)]
    found += ["--allowed-media-domains", _NO_DOMAIN]
    found += ["--shutdown-timeout", str(math.ceil(router.drain_s))]
    found += ["--enable-request-id-headers", "--disable-uvicorn-access-log"]
    found += ["--middleware", MEDIA_BOUNDS]
    version = installed.vllm_version()
    if router.item_outcomes and version and version < CARRIES_PARAMS:
        found += ["--middleware", PARAMS]
    if router.choice or router.hop_keys_file or router.partial_results or router.api_keys_file:
        found += ["--middleware", "epd_portable.front.headers.PlacementMiddleware"]
    # The last is outermost.
    found += ["--middleware", "epd_portable.front.http.FrontMiddleware"]
    return tuple(found)


def answering(engines: Sequence[Engine]) -> Engine:
    """Return the first engine that answers requests."""
    return next(engine for engine in engines if DUTIES[engine.role] == "answer")


def _sockets(engine: Engine) -> list[str]:
    """Return the Unix socket of each API server of the front."""
    topology, instances = engine.topology, engine.topology.instances
    groups = [instances.of(role) for role in _ANSWERS if instances.counts[role]]
    wished = [
        {**topology.engine_args, **each.engine_args}.get("api_server_count") for each in groups
    ]
    count = max((each for each in wished if isinstance(each, int)), default=1)
    return [f"{engine.temp_dir}/front-{index}" for index in range(max(1, count))]


def _settings(engines: Sequence[Engine]) -> dict[str, object]:
    """Return a ``FrontSettings`` of `epd_portable.front.client` as plain JSON.

    Each API server counts its own work, so each gets its part of what all may have.
    """
    answers = answering(engines)
    topology, router, sockets = answers.topology, answers.topology.router, _sockets(answers)
    bodies = max(router.max_bodies_bytes // len(sockets), router.max_body_bytes)
    queued = math.ceil(topology.instances.encode.max_queued_items / len(sockets))
    return {
        "engines": [
            {
                "name": engine.instance.instance,
                "role": engine.role,
                "control": engine.instance.control_address,
                "weight": engine.group.weight,
                "labels": engine.labels,
                "max_queued_items": queued,
            }
            for engine in engines
        ],
        "sockets": sockets,
        "secret_file": answers.instance.secret_file,
        "trusted_network": topology.transfer.trusted_network,
        "elastic_encode": router.elastic_encode,
        "switch_roles": router.switch_roles,
        "can_encode": topology.instances.prefill_decode.encoder,
        "wait_timeout_s": topology.transfer.wait_timeout_s,
        "item_outcomes": router.item_outcomes,
        "access_log": router.access_log,
        "max_body_bytes": router.max_body_bytes,
        "max_bodies_bytes": bodies,
        "hop_keys_file": router.hop_keys_file,
        "encode_order": router.encode_order,
        "partial_results": router.partial_results,
        "explains": router.api_keys_file is not None,
        **({"choice": router.choice.model_dump(exclude_none=True)} if router.choice else {}),
        **({"store": topology.store.model_dump(mode="json")} if topology.store else {}),
        "api_keys_file": router.api_keys_file,
        "cors_origins": router.cors_origins,
        "admission": router.admission.model_dump(exclude_defaults=True),
        "media_urls": router.media_urls.model_dump(exclude_defaults=True),
    }

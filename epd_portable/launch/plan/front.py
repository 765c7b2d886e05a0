"""Commands of the front and of its engines. Pure.

Engines have no HTTP server. Those on the front's machine meet it at its Unix socket.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

from epd_portable.config.roles import DUTIES, ROLES
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan import installed
from epd_portable.launch.plan.engine import CARRIES_PARAMS, PARAMS, Engine

_ANSWERS = tuple(role for role in ROLES if DUTIES[role] == "answer")
_OF_A_SERVER = ("mm_processor_device", "media_io_kwargs", "api_server_count")
"""Engine arguments of the server that processes media."""
PLAIN = "plain+"
"""Before the address of a hub to which jobs go without encryption."""
_NO_DOMAIN = "none.invalid"
"""vLLM fetches media from everywhere unless it is told domains."""


def check_engine_args(topology: Topology) -> None:
    """Refuse engine arguments for servers that engines do not have.

    Raises:
        ConfigError: Names the argument and the remedy.
    """
    instances = topology.instances
    for name in _OF_A_SERVER:
        if name in instances.encode.engine_args:
            raise ConfigError(
                f"instances.encode.engine_args.{name} has no effect: the front processes media; "
                "set it in engine_args, for the front and all instances"
            )
    groups = [instances.of(role) for role in ROLES if instances.counts[role]]
    for arguments in (topology.engine_args, *(each.engine_args for each in groups)):
        if arguments.get("mm_tensor_ipc") == "torch_shm":
            raise ConfigError(
                "engine_args.mm_tensor_ipc: torch_shm is for engines that vLLM's own server "
                "starts; leave it out"
            )


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
    front = answers.topology.front
    found = [sys.executable, "-m", "epd_portable.front.server"]
    found += ["--settings", json.dumps(_settings(engines))]
    # Media are processed here for encoders, whether the engine that answers takes any or not.
    wished = answers.wished_args
    media = {name: wished.get(name) for name in ("limit_mm_per_prompt", "enable_mm_embeds")}
    found += [*answers.arguments(**media), "--served-model-name", answers.model.served_name]
    found += ["--host", front.host, "--port", str(front.port)]
    if front.tls_cert_file and front.tls_key_file:
        found += ["--ssl-certfile", front.tls_cert_file, "--ssl-keyfile", front.tls_key_file]
    found += ["--allowed-origins", json.dumps(front.cors_origins)]
    found += ["--allowed-media-domains", _NO_DOMAIN]
    found += ["--shutdown-timeout", str(math.ceil(front.drain_s))]
    found += ["--enable-request-id-headers", "--disable-uvicorn-access-log"]
    version = installed.vllm_version()
    if front.item_outcomes and version and version < CARRIES_PARAMS:
        found += ["--middleware", PARAMS]
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
    topology, front, sockets = answers.topology, answers.topology.front, _sockets(answers)
    bodies = max(front.max_bodies_bytes // len(sockets), front.max_body_bytes)
    queued = math.ceil(topology.instances.encode.max_queued_items / len(sockets))
    return {
        "engines": [
            {
                "name": engine.instance.instance,
                "role": engine.role,
                "control": engine.instance.control_address,
                "weight": engine.group.weight,
                "labels": {**engine.group.labels},
                "max_queued_items": queued,
            }
            for engine in engines
        ],
        "sockets": sockets,
        "secret_file": answers.instance.secret_file,
        "trusted_network": topology.transfer.trusted_network,
        "elastic_encode": front.elastic_encode,
        "can_encode": topology.instances.prefill_decode.encoder,
        "wait_timeout_s": topology.transfer.wait_timeout_s,
        "item_outcomes": front.item_outcomes,
        "access_log": front.access_log,
        "max_body_bytes": front.max_body_bytes,
        "max_bodies_bytes": bodies,
        "hop_keys_file": front.hop_keys_file,
        "encode_order": front.encode_order,
        "partial_results": front.partial_results,
        "explains": front.api_keys_file is not None,
        **({"choice": front.choice.model_dump(exclude_none=True)} if front.choice else {}),
        **({"store": topology.store.model_dump(mode="json")} if topology.store else {}),
        "api_keys_file": front.api_keys_file,
        "cors_origins": front.cors_origins,
        "admission": front.admission.model_dump(exclude_defaults=True),
        "media_urls": front.media.urls.model_dump(exclude_defaults=True),
    }

"""Commands of the front and of its engines. Pure.

Engines have no HTTP server. Those on the front's machine meet it at its Unix socket.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from epd_portable.config.roles import DUTIES, ROLES
from epd_portable.launch.plan import machine
from epd_portable.launch.plan.engine import CARRIES_PARAMS, PARAMS, Engine

_ANSWERS = tuple(role for role in ROLES if DUTIES[role] == "decode")
PLAIN = "plain+"
"""Before the address of a hub to which jobs go without encryption."""
_NO_DOMAIN = "none.invalid"
"""vLLM fetches media from every domain unless some are given."""


def engine_argv(engine: Engine) -> tuple[str, ...]:
    """Return the command of an engine, which has no server, or a hub for jobs of fronts."""
    module, places = "epd_portable.engine.core", json.dumps(_sockets(engine))
    if hub := _hub(engine):
        module = "epd_portable.engine.remote"
        places = json.dumps(
            {
                "role": engine.role,
                "hub": hub,
                "plain": engine.topology.transfer.trusted_network,
                "page": [engine.topology.launch.host, engine.ports["http"]],
            }
        )
    # What the front has processed is kept there.
    return (engine.python, "-m", module, places, *engine.arguments(mm_processor_cache_gb=0))


def as_member(engine: Engine) -> dict[str, Any]:
    """Return what fronts receive of an engine; with a ``url`` where it joins them."""
    hub = _hub(engine)
    plain = PLAIN if engine.topology.transfer.trusted_network else ""
    return {
        "name": engine.name,
        "role": engine.role,
        **({"url": plain + hub} if hub else {}),
        "control": engine.instance.control_address,
        "weight": engine.group.weight,
        "labels": dict(engine.group.labels),
    }


def _hub(engine: Engine) -> str:
    """Return where an engine takes jobs of fronts that it joins; empty where it joins none."""
    port = engine.ports.get("jobs")
    return f"tcp://{engine.topology.launch.host}:{port}" if port else ""


def front_argv(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Return the command of the front, which processes requests as a decode-capable engine does."""
    answers = answering(engines)
    front = answers.topology.front
    found = [sys.executable, "-m", "epd_portable.front.server"]
    found += ["--settings", json.dumps(_settings(engines))]
    # Media are processed here for encoders, whether the decode-capable engine takes any or not.
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
    version = machine.vllm_version()
    if front.item_outcomes and version and version < CARRIES_PARAMS:
        found += ["--middleware", PARAMS]
    # The last is outermost.
    found += ["--middleware", "epd_portable.front.http.FrontMiddleware"]
    return tuple(found)


def answering(engines: Sequence[Engine]) -> Engine:
    """Return the first decode-capable engine."""
    return next(engine for engine in engines if DUTIES[engine.role] == "decode")


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
    most = max(front.max_bodies_bytes // len(sockets), front.max_body_bytes)
    bodies = {"max_bodies_bytes": most}
    queued = math.ceil(topology.instances.encode.max_queued_items / len(sockets))
    return {
        "engines": [{**as_member(engine), "max_queued_items": queued} for engine in engines],
        "sockets": sockets,
        "secret_file": answers.instance.secret_file,
        "trusted_network": topology.transfer.trusted_network,
        "can_encode": topology.instances.prefill_decode.encoder,
        "encode_priority": topology.encode_priority,
        "wait_timeout_s": topology.transfer.wait_timeout_s,
        "front": front.model_dump(mode="json", exclude_defaults=True) | bodies,
        **({"store": topology.store.model_dump(mode="json")} if topology.store else {}),
    }

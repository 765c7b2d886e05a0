"""Commands of the front and of its engines: the model, arguments and environment. Pure.

Engines have no HTTP server. Those on the front's machine meet it at its Unix socket.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from epd_portable.config.folders import expanded
from epd_portable.config.groups import InstanceGroup, PrefillDecodeGroup
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.roles import DUTIES, ENCODES, ROLES, Role
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.environment import run_secret_file, shm_prefix
from epd_portable.launch.plan.kv import KV_CONNECTORS, KVConnector
from epd_portable.launch.plan.placement import Cores, InstancePlacement, Placements
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer.registry import may_use_device_memory

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
SCHEDULER_CLS = "epd_portable.vllm_plugin.scheduler.make_scheduler"
CONNECTOR = {
    "ec_connector": "EPDConnector",
    "ec_connector_module_path": "epd_portable.vllm_plugin.ec_connector",
}
CPU_KV_GIB = "VLLM_CPU_KVCACHE_SPACE"
ROLE_ARGS: dict[str, dict[str, JsonValue]] = {
    # An encoder computes no KV blocks, so there is no prefix to find again. It generates nothing,
    # so no step can be scheduled ahead. From 0.29 on vLLM derives most of this from the role.
    # LoRA adapters are for the language model, which it does not hold.
    "encode": {
        "mm_encoder_only": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "enable_lora": None,
    }
}


QUEUED_BODIES = 8
"""Bodies of the largest size that the front admits, which an encode instance queues."""
SMALLEST_POOL_BYTES = 4 << 10
"""Receive pool of an instance that gets no items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model as engines and clients know it.

    Attributes:
        argument: Value of ``--model``: an absolute folder or a Hugging Face id.
        served_name: Value of ``model`` in requests.
        is_folder: Whether it loads without a network.
    """

    argument: str
    served_name: str
    is_folder: bool


def resolve_model(model: str, *, served_name: str | None = None) -> ModelSource:
    """Find a model: the bundled ``demo``, an existing folder, or a Hugging Face id.

    Raises:
        ConfigError: It looks like a folder but is none, or the folder holds no ``config.json``.
    """
    if model == DEMO:
        folder = Path(str(files("epd_portable"))) / "demo" / "model"
    else:
        folder = expanded(model)
    looks_like_folder = model == DEMO or model.startswith((".", "/", "~")) or folder.is_dir()
    if not looks_like_folder and HUB_ID.fullmatch(model):
        return ModelSource(argument=model, served_name=served_name or model, is_folder=False)
    if not folder.is_dir():
        raise ConfigError(
            f"model {model!r}: there is no folder {folder}; give an existing folder, "
            f"a Hugging Face id such as Qwen/Qwen2.5-VL-3B-Instruct, or '{DEMO}'"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {model!r}: {folder} holds no config.json; is it a checkpoint?")
    folder = folder.resolve()
    name = served_name or (DEMO if model == DEMO else folder.name)
    return ModelSource(argument=str(folder), served_name=name, is_folder=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Platform, Python environment and machine of engines, and the run that they belong to.

    Attributes:
        topology: Checked configuration of the platform.
        model: Target of ``topology.model``.
        placed: Engines of the platform, also those that run in another environment.
        has_compiler: See `Machine`.
        temp_dir: Folder of the run.
        python: Interpreter of the environment.
    """

    topology: Topology
    model: ModelSource
    traits: PlatformTraits
    placed: Placements
    has_compiler: bool
    run_id: str
    temp_dir: str
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An instance of a topology, as far as it is decided.

    Attributes:
        ports: By purpose: ``jobs`` where it does jobs of fronts that it joins, ``http`` for its
            page there, ``control`` and ``data`` where it takes items, ``kv`` where it has KV to
            send or take.
        kv: The connector of KV, if it has one.
    """

    site: Site
    placement: InstancePlacement
    ports: Mapping[str, int]
    kv: KVConnector | None

    @property
    def name(self) -> str:
        """For example ``encode-0``."""
        return self.placement.name

    @property
    def role(self) -> Role:
        """The stages that it is there for."""
        return self.placement.role

    @property
    def topology(self) -> Topology:
        """Configuration of its platform."""
        return self.site.topology

    @property
    def group(self) -> InstanceGroup:
        """Return its section of the file."""
        return self.topology.instances.of(self.role)

    @property
    def instance(self) -> InstanceConfig:
        """Return the settings of its connector."""
        topology, role, ports = self.topology, self.role, self.ports
        transfer, host = topology.transfer, topology.launch.host
        settings: dict[str, Any] = {}
        if role in ENCODES or "jobs" in ports:
            settings["max_queued_items"] = topology.instances.encode.max_queued_items
            settings["max_queued_bytes"] = QUEUED_BODIES * topology.front.max_body_bytes
        if role == "encode":
            settings["host_cache_bytes"] = topology.instances.encode.host_cache_bytes
        else:
            gets_items = topology.gets_items(role)
            settings |= {
                "control_address": f"tcp://{host}:{ports['control']}",
                "data_address": f"tcp://{host}:{ports['data']}",
                "pool": f"{shm_prefix(self.site.run_id)}{self.name}",
                "pool_bytes": transfer.pool_bytes if gets_items else SMALLEST_POOL_BYTES,
                "can_encode": topology.instances.prefill_decode.encoder,
                "encode_priority": topology.encode_priority,
                "overlaps": role in ENCODES,
            }
        return InstanceConfig(
            instance=self.name,
            platform=self.site.traits.name,
            host=host,
            secret_file=run_secret_file(self.site.temp_dir),
            **transfer.model_dump(exclude={"pool_bytes"}),
            store=topology.store,
            **settings,
        )

    def arguments(self, **others: JsonValue) -> list[str]:
        """Return vLLM's arguments of the engine alone, without those of a server.

        Of the arguments for one name the most specific wins: `others`, then those that may not be
        set, those of the instance's group, of its role, of the whole topology, and the launcher's.
        """
        traits, ranks = self.site.traits, self.group.tensor_parallel_size
        alone, together = traits.single_rank_executor_cls, traits.pd_ranks_executor_cls
        arguments: dict[str, JsonValue] = {
            "scheduler_cls": SCHEDULER_CLS,
            "worker_cls": traits.worker_cls,
            "distributed_executor_backend": alone if ranks == 1 else together,
            "otlp_traces_endpoint": self._traces_endpoint,
            **self.topology.engine_args,
            **ROLE_ARGS.get(self.role, {}),
            **self.group.engine_args,
            **self._without_encoder(),
            "tensor_parallel_size": ranks,
            "ec_transfer_config": {
                **CONNECTOR,
                # All others take items, if only their own.
                "ec_role": "ec_producer" if self.role == "encode" else "ec_consumer",
                "ec_connector_extra_config": self.instance.as_json(),
            },
        }
        if self.kv:
            arguments |= self.kv.arguments(self.topology, self.role, self.ports["kv"])
        return ["--model", self.site.model.argument, *render_arguments(arguments | others)]

    def env(self) -> dict[str, str]:
        """Return its variables beyond the launcher's own environment."""
        limits, traits, group = self.topology.front.media, self.site.traits, self.group
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_MAX_IMAGE_PIXELS": str(limits.max_item_pixels),
            "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(math.ceil(limits.max_seconds)),
            # Ranks of one instance meet on the loopback address.
            "VLLM_HOST_IP": "127.0.0.1",
        }
        if not self.site.has_compiler:
            variables |= dict(traits.env_without_compiler)
        gets_items = self.topology.gets_items(self.role)
        if gets_items and may_use_device_memory(self.topology.transfer.path):
            variables |= dict(traits.env_with_slab)
        here = self.site.placed.by_device
        if any(len(here[device]) > 1 for device in self.placement.devices):
            variables |= dict(traits.env_on_shared_device)
        if self._traces_endpoint:
            variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
            variables["OTEL_SERVICE_NAME"] = self.name
        if self.site.model.is_folder:
            variables["HF_HUB_OFFLINE"] = "1"
        if traits.visible_devices_env is None:
            eager = self.topology.engine_args_of(self.role).get("enforce_eager") is True
            variables |= cpu_env(self.placement.cores, eager=eager)
        variables |= {**self.topology.env, **group.env}
        # See `owned_variables`.
        variables["EPD_INSTANCE"] = self.name
        variables["EPD_PLATFORM"] = traits.name
        # Engines leave sockets and rendezvous files there; the folder is removed with the run.
        variables["TMPDIR"] = self.site.temp_dir
        if traits.visible_devices_env is not None:
            # An engine takes the first tensor_parallel_size of them.
            visible = (*self.placement.devices, *self.placement.peers)
            variables[traits.visible_devices_env] = ",".join(visible)
        # What it counts is on the page of the front, or on its own.
        own = f"-{self.name}" if "jobs" in self.ports else ""
        variables["EPD_METRICS_DIR"] = f"{self.site.temp_dir}/metrics{own}"
        if self.kv:
            variables |= self.kv.env(self.topology.launch.host, self.ports["kv"])
        return variables

    @property
    def _traces_endpoint(self) -> str | None:
        """Return the collector to which it sends its spans."""
        endpoint = self.topology.front.tracing.endpoint
        return f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None

    def _without_encoder(self) -> dict[str, JsonValue]:
        """Return what makes vLLM leave the encoder out (0.31 on): no media, embeddings only."""
        if not isinstance(self.group, PrefillDecodeGroup) or self.group.encoder:
            return {}
        wished = self.topology.engine_args_of(self.role).get("limit_mm_per_prompt")
        limits = dict(wished) if isinstance(wished, dict) else {}
        return {
            "limit_mm_per_prompt": {**limits, **dict.fromkeys(("image", "video", "audio"), 0)},
            "enable_mm_embeds": True,
        }


def owned_variables(traits: PlatformTraits, *, has_kv: bool) -> dict[str, str]:
    """Return the variables that only the launcher sets for a group, and what to do instead."""
    remedies = dict.fromkeys(("EPD_INSTANCE", "EPD_PLATFORM", "TMPDIR"), "remove it")
    if traits.visible_devices_env is not None:
        remedies[traits.visible_devices_env] = "list devices instead"
    if has_kv:
        remedies |= dict.fromkeys(KV_CONNECTORS[traits.kv_connector].env("", 0), "remove it")
    return remedies


def render_arguments(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Write engine arguments as command-line flags.

    ``True`` and ``False`` become ``--name`` and ``--no-name``, mappings and lists become JSON, and
    ``None`` leaves the flag out.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            flags += [f"--{flag}", text]
    return flags


def cpu_env(cores: Sequence[Cores], *, eager: bool) -> dict[str, str]:
    """Return how many threads an instance computes with, and where, by the cores of its ranks.

    One rank computes in the engine's own process, which the launcher binds to its cores. Of several
    ranks vLLM binds each worker's threads itself.
    """
    variables = {CPU_KV_GIB: "1"}
    if eager:
        # vLLM compiles parts of its sampler all the same, within the first request that needs them.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if len(cores) > 1:
        bound = "|".join(",".join(map(str, own)) for own in cores)
        return {**variables, "VLLM_CPU_OMP_THREADS_BIND": bound}
    # Without cores of its own each rank would have a thread for every core.
    threads = str(len(cores[0]) if cores else 1)
    return {**variables, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}


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
    return (engine.site.python, "-m", module, places, *engine.arguments(mm_processor_cache_gb=0))


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
    wished = answers.topology.engine_args_of(answers.role)
    media = {name: wished.get(name) for name in ("limit_mm_per_prompt", "enable_mm_embeds")}
    found += [*answers.arguments(**media), "--served-model-name", answers.site.model.served_name]
    found += ["--host", front.host, "--port", str(front.port)]
    if front.tls_cert_file and front.tls_key_file:
        found += ["--ssl-certfile", front.tls_cert_file, "--ssl-keyfile", front.tls_key_file]
    found += ["--allowed-origins", json.dumps(front.cors_origins)]
    found += ["--allowed-media-domains", _NO_DOMAIN]
    found += ["--shutdown-timeout", str(math.ceil(front.drain_s))]
    found += ["--enable-request-id-headers", "--disable-uvicorn-access-log"]
    found += ["--middleware", "epd_portable.front.http.FrontMiddleware"]
    return tuple(found)


def answering(engines: Sequence[Engine]) -> Engine:
    """Return the first decode-capable engine."""
    return next(engine for engine in engines if DUTIES[engine.role] == "decode")


def _sockets(engine: Engine) -> list[str]:
    """Return the Unix socket of each API server of the front."""
    topology, counts = engine.topology, engine.topology.instances.counts
    groups = (topology.engine_args_of(role) for role in _ANSWERS if counts[role])
    wished = [each.get("api_server_count") for each in groups]
    count = max((each for each in wished if isinstance(each, int)), default=1)
    return [f"{engine.site.temp_dir}/front-{index}" for index in range(count)]


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

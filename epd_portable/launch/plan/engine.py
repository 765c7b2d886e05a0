"""The command line and environment of one vLLM server."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

from pydantic import JsonValue

from epd_portable.config.groups import InstanceGroup, PrefillDecodeGroup
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan import installed
from epd_portable.launch.plan.kv import KVEnd
from epd_portable.launch.plan.model import ModelSource
from epd_portable.launch.plan.placement import InstancePlacement
from epd_portable.platforms.traits import PlatformTraits

SCHEDULER_CLS = "epd_portable.vllm_plugin.scheduler.make_scheduler"
CONNECTOR = {
    "ec_connector": "EPDConnector",
    "ec_connector_module_path": "epd_portable.vllm_plugin.ec_connector",
}
PARAMS = "epd_portable.vllm_plugin.params_bridge.ParamsMiddleware"
CARRIES_PARAMS = (0, 26)
"""First vLLM whose API server knows ``ec_transfer_params``."""
TOKEN = "epd_portable.vllm_plugin.instance_token.TokenMiddleware"
MEDIA_BOUNDS = "epd_portable.vllm_plugin.media_bounds.MediaBoundsMiddleware"
ADMISSION = "epd_portable.vllm_plugin.admission.AdmissionMiddleware"
ROLE_ARGS: dict[str, dict[str, JsonValue]] = {
    # An encoder computes no KV blocks, so there is no prefix to find again. It generates nothing,
    # so no step can be scheduled ahead. From 0.29 on vLLM derives most of this from the role.
    "encode": {"mm_encoder_only": True, "enable_prefix_caching": False, "async_scheduling": False}
}


def engine_argv(
    topology: Topology,
    group_name: str,
    *,
    model: ModelSource,
    traits: PlatformTraits,
    instance: InstanceConfig,
    kv: KVEnd | None,
    port: int,
) -> tuple[str, ...]:
    """Return the command that starts one instance.

    Of the arguments for one name the most specific wins: those of the instance's group, then those
    of its role, then those of the whole topology, then the launcher's.

    Raises:
        ConfigError: The file sets one that only the launcher can set here.
    """
    group: InstanceGroup = getattr(topology.instances, group_name)
    arguments: dict[str, JsonValue] = {
        "scheduler_cls": SCHEDULER_CLS,
        "worker_cls": traits.worker_cls,
        "distributed_executor_backend": _executor(traits, group_name, group.tensor_parallel_size),
        "otlp_traces_endpoint": _traces_endpoint(topology),
        **topology.engine_args,
        **ROLE_ARGS.get(group_name, {}),
        **group.engine_args,
        **_without_encoder(topology, group),
        "tensor_parallel_size": group.tensor_parallel_size,
        "ec_transfer_config": {
            **CONNECTOR,
            # All others take items, if only their own.
            "ec_role": "ec_producer" if group_name == "encode" else "ec_consumer",
            "ec_connector_extra_config": instance.as_json(),
        },
        **_kv_arguments(topology, group_name, group, kv),
    }
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model.argument, "--served-model-name", model.served_name),
        *("--host", topology.launch.host, "--port", str(port)),
        *render_arguments(arguments),
        # Written out, because a list becomes JSON and every mention of this flag adds one.
        *(("--middleware", PARAMS) if _lacks_params() else ()),
        *("--middleware", MEDIA_BOUNDS),
        *(("--middleware", ADMISSION) if group_name == "encode" else ()),
        # The last is outermost: requests without the token are not even queued.
        *("--middleware", TOKEN),
    )


def _lacks_params() -> bool:
    version = installed.vllm_version()
    return version is not None and version < CARRIES_PARAMS


def _executor(traits: PlatformTraits, group_name: str, ranks: int) -> str | None:
    """Return the import path of an instance's executor, or nothing: vLLM chooses."""
    if ranks == 1:
        return traits.single_rank_executor_cls
    return None if group_name == "encode" else traits.pd_ranks_executor_cls


def _traces_endpoint(topology: Topology) -> str | None:
    """Return where engines send their spans: below those of the router, whose names they get."""
    endpoint = topology.router.tracing.endpoint
    return f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None


def _kv_arguments(
    topology: Topology, group_name: str, group: InstanceGroup, kv: KVEnd | None
) -> dict[str, JsonValue]:
    if kv is None:
        return {}
    if "kv_transfer_config" in _wished(topology, group):
        raise ConfigError(
            f"kv_transfer_config cannot be set for instances.{group_name}: the launcher writes it; "
            "its settings are under transfer"
        )
    return kv.arguments(topology)


def _wished(topology: Topology, group: InstanceGroup) -> dict[str, JsonValue]:
    """Return the engine arguments that the file sets for a group."""
    return {**topology.engine_args, **group.engine_args}


def _without_encoder(topology: Topology, group: InstanceGroup) -> dict[str, JsonValue]:
    """Return what makes vLLM leave the encoder out (0.31 and later): no media, embeddings only."""
    if not isinstance(group, PrefillDecodeGroup) or group.encoder:
        return {}
    wished = _wished(topology, group).get("limit_mm_per_prompt")
    limits = dict(wished) if isinstance(wished, dict) else {}
    return {
        "limit_mm_per_prompt": {**limits, **dict.fromkeys(("image", "video", "audio"), 0)},
        "enable_mm_embeds": True,
    }


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
        elif isinstance(value, dict | list):
            flags += [f"--{flag}", json.dumps(value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def engine_env(
    topology: Topology,
    group_name: str,
    *,
    model: ModelSource,
    traits: PlatformTraits,
    instance: InstanceConfig,
    kv: KVEnd | None,
    placement: InstancePlacement,
    temp_dir: str,
    has_compiler: bool,
) -> dict[str, str]:
    """Return the variables of one instance beyond the launcher's own environment.

    Raises:
        ConfigError: The topology sets a variable that only the launcher can set.
    """
    group: InstanceGroup = getattr(topology.instances, group_name)
    wished = {**topology.env, **group.env}
    owned = {
        "EPD_INSTANCE": instance.instance,
        "EPD_PLATFORM": traits.name,
        # Engines leave sockets and rendezvous files there; the folder is removed with the run.
        "TMPDIR": temp_dir,
    }
    if traits.visible_devices_env is not None:
        # An engine takes the first tensor_parallel_size of them.
        owned[traits.visible_devices_env] = ",".join((*placement.devices, *placement.peers))
    if group.share is not None and traits.share_env is not None:
        owned[traits.share_env] = str(group.share)
    if kv is not None:
        owned |= kv.env(topology.launch.host)
    remedies = owned_variables(traits, has_share=group.share is not None)
    for name in sorted(owned.keys() & wished.keys()):
        remedy = remedies.get(name, "remove it")
        raise ConfigError(f"env: {name} of instances.{group_name} is set by the launcher; {remedy}")
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MAX_IMAGE_PIXELS": str(instance.media_limits.max_item_pixels),
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(math.ceil(instance.media_limits.max_media_seconds)),
        # Ranks of one instance meet on the loopback address.
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if not has_compiler:
        defaults |= dict(traits.env_without_compiler)
    if _traces_endpoint(topology):
        defaults["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
        defaults["OTEL_SERVICE_NAME"] = instance.instance
    if model.is_folder:
        defaults["HF_HUB_OFFLINE"] = "1"
    if traits.visible_devices_env is None:
        eager = _wished(topology, group).get("enforce_eager") is True
        defaults |= cpu_env(placement, group.tensor_parallel_size, eager=eager)
    return {**defaults, **wished, **owned}


def owned_variables(traits: PlatformTraits, *, has_share: bool) -> dict[str, str]:
    """Return the variables that only the launcher sets for a group, and what to do instead."""
    remedies = dict.fromkeys(("EPD_INSTANCE", "EPD_PLATFORM", "TMPDIR"), "remove it")
    if traits.visible_devices_env is not None:
        remedies[traits.visible_devices_env] = "list devices instead"
    if has_share and traits.share_env is not None:
        remedies[traits.share_env] = "write share beside count"
    return remedies


def cpu_env(placement: InstancePlacement, ranks: int, *, eager: bool) -> dict[str, str]:
    """Return how many threads an instance computes with, and where.

    One rank computes in the engine's own process, which the launcher binds to its cores. Of several
    ranks vLLM binds each worker's threads itself.
    """
    fixed = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if eager:
        # vLLM compiles parts of its sampler all the same, within the first request that needs them.
        fixed["TORCH_COMPILE_DISABLE"] = "1"
    if ranks == 1 or not placement.cores:
        # Without cores of its own each rank would have a thread for every core.
        threads = str(len(placement.cores[0]) if placement.cores else 1)
        return {**fixed, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    bound = "|".join(",".join(map(str, cores)) for cores in placement.cores)
    return {**fixed, "VLLM_CPU_OMP_THREADS_BIND": bound}

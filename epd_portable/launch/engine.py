"""The command line and environment of one vLLM server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.schema import InstanceGroup, Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.assign import Cores
from epd_portable.launch.model import ModelSource
from epd_portable.platforms.traits import PlatformTraits

SCHEDULER_CLS = "epd_portable.vllm_plugin.scheduler.make_scheduler"
CONNECTOR = {
    "ec_connector": "EPDConnector",
    "ec_connector_module_path": "epd_portable.vllm_plugin.ec_connector",
}
EC_ROLES = {"encode": "ec_producer", "prefill_decode": "ec_consumer"}
ROLE_ARGS: dict[str, dict[str, JsonValue]] = {
    # An encoder computes no KV blocks, so there is no prefix to find again. It generates nothing,
    # so no step can be scheduled ahead. From 0.29 on vLLM derives most of this from the role.
    "encode": {
        "mm_encoder_only": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    },
    "prefill_decode": {},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one instance runs.

    Attributes:
        port: Its HTTP port on the loopback address.
        devices: One device per rank; empty where the platform has no numbered devices.
        cores: The CPU cores of each rank; empty where ranks are not bound to cores.
    """

    port: int
    devices: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()


def engine_argv(
    topology: Topology,
    group_name: str,
    *,
    model: ModelSource,
    traits: PlatformTraits,
    instance: InstanceConfig,
    port: int,
) -> tuple[str, ...]:
    """Return the command that starts one instance.

    Of the arguments for one name the most special wins: those of the instance's group, then those
    of its role, then those of the whole topology, then the launcher's.
    """
    group: InstanceGroup = getattr(topology.instances, group_name)
    arguments: dict[str, JsonValue] = {
        "scheduler_cls": SCHEDULER_CLS,
        "worker_cls": traits.worker_cls,
        **topology.engine_args,
        **ROLE_ARGS[group_name],
        **group.engine_args,
        "tensor_parallel_size": group.tensor_parallel_size,
        "ec_transfer_config": {
            **CONNECTOR,
            "ec_role": EC_ROLES[group_name],
            "ec_connector_extra_config": instance.model_dump(),
        },
    }
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model.argument, "--served-model-name", model.served_name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *render_arguments(arguments),
    )


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
    seat: Seat,
    temp_dir: str,
) -> dict[str, str]:
    """Return what one instance has in its environment beyond the launcher's own.

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
        owned[traits.visible_devices_env] = ",".join(seat.devices)
    for name in sorted(owned.keys() & wished.keys()):
        remedy = "list devices instead" if name == traits.visible_devices_env else "remove it"
        raise ConfigError(f"env: {name} of instances.{group_name} is set by the launcher; {remedy}")
    defaults = {
        # The connector's hooks are those of the first model runner.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Ranks of one instance meet on the loopback address.
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if model.is_folder:
        defaults["HF_HUB_OFFLINE"] = "1"
    if seat.cores:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, cores)) for cores in seat.cores
        )
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return {**defaults, **wished, **owned}

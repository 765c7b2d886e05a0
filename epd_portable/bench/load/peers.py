"""Plain vLLM beside a topology: replicas, and the example of disaggregated encoders.

They get the topology's model, engine arguments and environment, and the same cores or devices. On a
CPU they run as vLLM does by itself there, with a worker process beside each engine; or *tuned*:
with the executor and the threads that the launcher gives its own instances.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue

from epd_portable.bench import servers
from epd_portable.bench.router.stand import pinned
from epd_portable.config.schema import Topology
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.launch.plan.placement import Seat
from epd_portable.platforms.traits import TRAITS

PEERS = {
    "stock": "Plain vLLM runs as it does by itself, on a CPU with a worker process each engine.",
    "tuned": "Plain vLLM has the executor and threads that epd-launch gives its own instances.",
}
"""How plain vLLM runs, in words for pages."""
EXAMPLE_CONNECTOR = "ECExampleConnector"
_EC_ROLES = {"encode": "ec_producer", "prefill_decode": "ec_consumer"}


def plain_engine(
    topology: Topology,
    *,
    name: str,
    platform: str,
    units: Sequence[str],
    folder: Path,
    tuned: bool,
    extra: dict[str, JsonValue] | None = None,
    report: Callable[[str], None],
) -> servers.Server:
    """Return one server of plain vLLM on these cores or devices.

    Args:
        topology: Whose model, engine arguments and environment it gets.
        name: For messages and its log.
        platform: What it runs on.
        units: Its cores or devices.
        folder: For its log.
        tuned: See the module.
        extra: Engine arguments beyond those of the topology.
        report: Gets one line for each stage of its start.
    """
    traits = TRAITS[platform]
    arguments: dict[str, JsonValue] = {**topology.engine_args, **(extra or {})}
    if traits.visible_devices_env is not None:
        env = {traits.visible_devices_env: ",".join(units)}
        arguments.setdefault("tensor_parallel_size", len(units))
        start = None
    else:
        cores = tuple(map(int, units))
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(units)}
        if tuned:
            eager = arguments.get("enforce_eager") is True
            env = cpu_env(Seat(port=0, cores=(cores,)), 1, eager=eager)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
        start = pinned(frozenset(cores), str(folder))
    return servers.one_process(
        topology.model,
        log=folder / f"{name}.log",
        engine_args=arguments,
        platform=platform,
        env={**env, **topology.env},
        report=report,
        name=name,
        **({"popen": start} if start else {}),
    )


def example_engine(
    topology: Topology,
    group: str,
    *,
    platform: str,
    units: Sequence[str],
    folder: Path,
    store: Path,
    tuned: bool,
    report: Callable[[str], None],
) -> servers.Server:
    """Return one instance of vLLM's example.

    Args:
        topology: As in `plain_engine`; the arguments of the same role are taken too.
        group: ``encode`` or ``prefill_decode``.
        platform: What it runs on.
        units: Its cores or devices.
        folder: For its log.
        store: Folder through which encoder outputs go from one instance to the other.
        tuned: See the module.
        report: Gets one line for each stage of its start.
    """
    transfer: dict[str, JsonValue] = {
        "ec_connector": EXAMPLE_CONNECTOR,
        "ec_role": _EC_ROLES[group],
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }
    return plain_engine(
        topology,
        name=group.replace("_", "-"),
        platform=platform,
        units=units,
        folder=folder,
        extra={
            **ROLE_ARGS.get(group, {}),
            **getattr(topology.instances, group).engine_args,
            "ec_transfer_config": transfer,
        },
        tuned=tuned,
        report=report,
    )


def example_proxy(
    encode: str, prefill_decode: str, *, cores: frozenset[int], folder: Path
) -> servers.Server:
    """Return the stand-in of the example's proxy, see `epd_portable.bench.router.proxy`."""
    port = servers.free_port()
    argv = [sys.executable, "-m", "epd_portable.bench.router.proxy", "--port", str(port)]
    return servers.Server(
        name="the proxy",
        argv=[*argv, "--encode", encode, "--prefill-decode", prefill_decode],
        url=f"http://127.0.0.1:{port}",
        log=folder / "proxy.log",
        popen=pinned(cores, str(folder)),
    )

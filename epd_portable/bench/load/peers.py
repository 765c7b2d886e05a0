"""Plain vLLM beside a topology: replicas, ranks, and the example of disaggregated encoders.

They get the topology's model, engine arguments and environment, and the same cores or devices. On a
CPU they run *stock*, as vLLM does by itself there, with a worker process beside each engine; or
*tuned*: with the executor and the threads that the launcher gives its own instances, and API
servers where the launcher would let them run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue

from epd_portable.bench import servers
from epd_portable.bench.load.sides import LoadSide
from epd_portable.config.schema import Topology
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.launch.plan.placement import InstancePlacement
from epd_portable.platforms.traits import TRAITS

_EC_ROLES = {"encode": "ec_producer", "prefill_decode": "ec_consumer"}


def describe(sides: Sequence[LoadSide], proxy: Path | None) -> str:
    """Say how plain vLLM runs; empty where none does.

    Args:
        sides: All.
        proxy: That of vLLM's example; ``None`` for its stand-in.
    """
    stock = ", ".join(side.name for side in sides if side.plain and not side.tuned)
    tuned = ", ".join(side.name for side in sides if side.plain and side.tuned)
    found = []
    if stock:
        found.append(f"Stock, as vLLM runs by itself: {stock}.")
    if tuned:
        found.append(
            "Tuned, on a CPU with the executor, threads and freedom of API servers that epd-launch "
            f"gives its own instances: {tuned}."
        )
    if any(side.kind == "upstream" for side in sides):
        which = f"its own ({proxy.name})" if proxy else "a stand-in, on the same libraries"
        found.append(f"The proxy of vLLM's example is {which}.")
    return " ".join(found)


def plain_engine(
    topology: Topology,
    *,
    name: str,
    platform: str,
    units: Sequence[str],
    folder: Path,
    tuned: bool,
    ranks: int = 1,
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
        ranks: Of data parallelism, which divide its cores or devices among them.
        extra: Engine arguments beyond those of the topology.
        report: Gets one line for each stage of its start.
    """
    traits = TRAITS[platform]
    arguments: dict[str, JsonValue] = {**topology.engine_args, **(extra or {})}
    each = len(units) // ranks
    if ranks > 1:
        arguments["data_parallel_size"] = ranks
    start = None
    if traits.visible_devices_env is not None:
        env = {traits.visible_devices_env: ",".join(units)}
        arguments.setdefault("tensor_parallel_size", each)
    else:
        by_rank = [tuple(map(int, units[rank * each :][:each])) for rank in range(ranks)]
        env = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in by_rank)}
        if tuned:
            eager = arguments.get("enforce_eager") is True
            env = cpu_env(InstancePlacement(port=0, cores=(by_rank[0],)), 1, eager=eager)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
        start = servers.start_on_cores(frozenset(map(int, units)), folder)
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
    """Return one instance of vLLM's example; it takes the arguments of the same role, too.

    Args:
        topology: As in `plain_engine`.
        group: ``encode`` or ``prefill_decode``.
        platform: What it runs on.
        units: Its cores or devices.
        folder: For its log.
        store: Folder through which encoder outputs go from one instance to the other.
        tuned: See the module.
        report: Gets one line for each stage of its start.
    """
    transfer: dict[str, JsonValue] = {
        "ec_connector": "ECExampleConnector",
        "ec_role": _EC_ROLES[group],
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }
    arguments = {**ROLE_ARGS.get(group, {}), **getattr(topology.instances, group).engine_args}
    return plain_engine(
        topology,
        name=group.replace("_", "-"),
        platform=platform,
        units=units,
        folder=folder,
        extra={**arguments, "ec_transfer_config": transfer},
        tuned=tuned,
        report=report,
    )


def example_proxy(
    encode: str, prefill_decode: str, *, cores: frozenset[int], folder: Path, file: Path | None
) -> servers.Server:
    """Return the example's proxy.

    Args:
        encode: Base address of its encode instance.
        prefill_decode: That of the other.
        cores: Where it runs.
        folder: For its log.
        file: The proxy itself; ``None`` for `epd_portable.bench.load.proxy`, which stands in.
    """
    port = servers.free_port()
    argv = [sys.executable, *([str(file)] if file else ["-m", "epd_portable.bench.load.proxy"])]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--encode-servers-urls", encode]
    argv += ["--prefill-servers-urls", "disable", "--decode-servers-urls", prefill_decode]
    return servers.Server(
        name="the proxy",
        argv=argv,
        url=f"http://127.0.0.1:{port}",
        log=folder / "proxy.log",
        popen=servers.start_on_cores(cores, folder),
    )

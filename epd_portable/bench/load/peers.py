"""The servers of a side: a topology, or plain vLLM as replicas or its own example.

Plain vLLM gets the topology's model, engine arguments and environment, and the same cores or
devices. On a CPU it runs *stock*, as it does by itself, with a worker process beside each engine;
or *tuned*: with the executor and the threads that the launcher gives its own instances, and API
servers where the launcher would let them run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from epd_portable.bench import servers
from epd_portable.bench.load.context import BenchContext
from epd_portable.bench.load.sides import LoadSide
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.platforms.traits import TRAITS

_EC_ROLES = {"encode": "ec_producer", "prefill_decode": "ec_consumer"}


def describe(sides: Sequence[LoadSide]) -> str:
    """Say how plain vLLM runs; empty where none does."""
    stock = ", ".join(side.name for side in sides if side.plain and not side.tuned)
    tuned = ", ".join(side.name for side in sides if side.plain and side.tuned)
    found = [f"Stock, as vLLM runs by itself: {stock}."] if stock else []
    if tuned:
        found.append(
            "Tuned, on a CPU with the executor, threads and freedom of API servers that epd-launch "
            f"gives its own instances: {tuned}."
        )
    return " ".join(found)


def plain_engine(
    side: LoadSide,
    context: BenchContext,
    *,
    name: str,
    units: Sequence[str],
    extra: dict[str, JsonValue] | None = None,
) -> servers.Server:
    """Return one server of plain vLLM on these cores or devices.

    Its topology gives the model, environment and engine arguments, `extra` more of these.
    """
    topology, traits = context.topologies[side.name], TRAITS[context.platform]
    arguments: dict[str, JsonValue] = {**topology.engine_args, **(extra or {})}
    folder = context.folder_of(side)
    start = None
    if traits.visible_devices_env is not None:
        env = {traits.visible_devices_env: ",".join(units)}
        arguments.setdefault("tensor_parallel_size", len(units))
    else:
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(units)}
        if side.tuned:
            eager = arguments.get("enforce_eager") is True
            env = cpu_env((tuple(map(int, units)),), eager=eager)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
        start = servers.start_on_cores(frozenset(map(int, units)), folder)
    return servers.one_process(
        topology.model,
        log=folder / f"{name}.log",
        engine_args=arguments,
        platform=context.platform,
        env={**env, **topology.env},
        report=context.report_of(side),
        name=name,
        **({"popen": start} if start else {}),
    )


def side_servers(side: LoadSide, context: BenchContext, store: Path) -> list[list[servers.Server]]:
    """Return the servers of a side: those of a list are started together, after the one before.

    The encode and the prefill+decode instance of vLLM's example pass encoder outputs by `store`.
    """
    if side.kind == "topology":
        assert side.file is not None
        bound = [
            f"instances.{name}.cores={cores}"
            for name, cores in context.cores_of(side).items()
            if cores
        ]
        launched = servers.topology(
            side.file,
            platform=context.platform,
            log_dir=context.folder_of(side) / "logs",
            settings=(*context.settings, *side.settings, *bound),
            model=context.model,
            report=context.report_of(side),
        )
        return [[launched]]
    units = context.allotment.units[side.name]
    if side.kind != "upstream":
        return [
            [
                plain_engine(side, context, name=f"replica-{index}", units=own)
                for index, own in enumerate(units)
            ]
        ]
    engines = []
    for (group, role), own in zip(_EC_ROLES.items(), units, strict=True):
        instances = getattr(context.topologies[side.name].instances, group)
        extra: dict[str, JsonValue] = {**ROLE_ARGS.get(group, {}), **instances.engine_args}
        extra["ec_transfer_config"] = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(store)},
        }
        name = group.replace("_", "-")
        engines.append(plain_engine(side, context, name=name, units=own, extra=extra))
    return [engines, [_example_proxy(side, context, *(engine.url for engine in engines))]]


def _example_proxy(
    side: LoadSide, context: BenchContext, encode: str, prefill_decode: str
) -> servers.Server:
    port, folder = servers.free_port(), context.folder_of(side)
    argv = [sys.executable, str(context.upstream_proxy), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--encode-servers-urls", encode, "--prefill-servers-urls", "disable"]
    argv += ["--decode-servers-urls", prefill_decode]
    return servers.Server(
        name="the proxy",
        argv=argv,
        url=f"http://127.0.0.1:{port}",
        log=folder / "proxy.log",
        popen=servers.start_on_cores(frozenset(context.allotment.rest), folder),
    )

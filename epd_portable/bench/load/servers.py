"""Starts sides on their cores or devices, and finds the processes of each.

A side is a topology, or plain vLLM as replicas or as its own example. Plain vLLM gets the
topology's model, engine arguments and environment, and the same cores or devices. On a CPU it runs
*stock*, as it does by itself, with a worker process beside each engine; or *tuned*: with the
executor and the threads that the launcher gives its own instances, and API servers where the
launcher would let them run.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from pydantic import JsonValue

from epd_portable.bench import console, servers
from epd_portable.bench.load.setting import LoadSetting
from epd_portable.bench.load.sides import LoadSide, api_cores
from epd_portable.bench.load.usage import Part
from epd_portable.bench.servers import Server
from epd_portable.config.folders import temp_folder
from epd_portable.config.groups import Instances
from epd_portable.errors import MeasurementError
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.launch.plan.placement import ranks_of
from epd_portable.launch.run import fork_server
from epd_portable.launch.run.process import bind_threads
from epd_portable.launch.run.running import find_runs
from epd_portable.launch.run.sessions import SHM
from epd_portable.platforms.traits import TRAITS

_EC_ROLES = {"encode": "ec_producer", "prefill_decode": "ec_consumer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningSide:
    """A side that is up.

    Attributes:
        urls: Base addresses; clients ask them in turns.
        model: Name of the model there.
        parts: Its processes; none of servers that ran already.
    """

    name: str
    urls: tuple[str, ...]
    model: str
    parts: tuple[Part, ...] = ()


@contextlib.contextmanager
def start_side(side: LoadSide, setting: LoadSetting) -> Iterator[RunningSide]:
    """Start a side and yield it; stop it at the end.

    Raises:
        LaunchError: It did not start.
        MeasurementError: It does not run where it should, or is not there.
    """
    if side.kind == "url":
        try:
            model = servers.model_name(side.urls[0])
        except httpx.TransportError as error:
            raise MeasurementError(
                f"--side {side.name}: {side.urls[0]}: {error!r}; start a server there first"
            ) from error
        yield RunningSide(name=side.name, urls=side.urls, model=model)
        return
    with ExitStack() as stack:
        if side.kind == "topology":
            started = entries = [_topology(side, setting)]
            _start(started, stack)
            parts = [*_parts_of_topology(started[0])]
        else:
            where = SHM if SHM.is_dir() else setting.folder
            store = stack.enter_context(tempfile.TemporaryDirectory("", "epd-bench-", where))
            started = entries = plain_engines(side, setting, Path(store))
            _start(started, stack)
            _spread_api_servers(started, side, setting)
            parts = [
                Part(
                    name=each.name.removeprefix("the "),
                    pid=each.pid,
                    metrics_url=f"{each.url}/metrics",
                )
                for each in started
            ]
        if side.kind == "upstream":
            proxy = example_proxy(side, setting, *(engine.url for engine in started))
            entries = [stack.enter_context(proxy)]
            parts.append(Part(name="proxy", pid=proxy.pid))
        yield RunningSide(
            name=side.name,
            urls=tuple(server.url for server in entries),
            model=servers.model_name(started[0].url),
            parts=tuple(parts),
        )


def _start(together: Sequence[Server], stack: ExitStack) -> None:
    """Start servers at the same time; the stack stops them."""
    for server in together:
        server.start()
        stack.callback(server.stop)
    for server in together:
        server.wait_until_ready()


def _report(side: LoadSide, line: str) -> None:
    console.progress(f"{side.name}: {line}")


def _topology(side: LoadSide, setting: LoadSetting) -> Server:
    assert side.file is not None
    bound = []
    if setting.allotment.binds_cores:
        units = iter(setting.allotment.units[side.name])
        for name in Instances.model_fields:
            ranks = ranks_of(getattr(setting.topologies[side.name].instances, name))
            cores = [int(core) for own in itertools.islice(units, ranks) for core in own]
            bound += [f"instances.{name}.cores={cores}"] if cores else []
    return servers.topology(
        side.file,
        platform=setting.platform,
        log_dir=setting.folder / side.name / "logs",
        settings=(*setting.settings, *side.settings, *bound),
        report=partial(_report, side),
    )


def plain_engines(side: LoadSide, setting: LoadSetting, store: Path) -> list[Server]:
    """Return the servers of plain vLLM: replicas, or the two instances of its example.

    Args:
        store: Folder by which those of the example pass encoder outputs.
    """
    topology, units = setting.topologies[side.name], setting.allotment.units[side.name]
    if side.kind == "replicas":
        return [
            _plain_engine(side, setting, f"replica-{index}", own, {})
            for index, own in enumerate(units)
        ]
    return [
        _plain_engine(
            side,
            setting,
            group.replace("_", "-"),
            own,
            {
                **ROLE_ARGS.get(group, {}),
                **getattr(topology.instances, group).engine_args,
                "ec_transfer_config": {
                    "ec_connector": "ECExampleConnector",
                    "ec_role": role,
                    "ec_connector_extra_config": {"shared_storage_path": str(store)},
                },
            },
        )
        for (group, role), own in zip(_EC_ROLES.items(), units, strict=True)
    ]


def _plain_engine(
    side: LoadSide,
    setting: LoadSetting,
    name: str,
    units: Sequence[str],
    more_args: dict[str, JsonValue],
) -> Server:
    """Return one server of plain vLLM on these cores or devices."""
    topology, traits = setting.topologies[side.name], TRAITS[setting.platform]
    arguments: dict[str, JsonValue] = {**topology.engine_args, **more_args}
    folder = setting.folder / side.name
    cores = frozenset[int]()
    if traits.visible_devices_env is not None:
        env = {traits.visible_devices_env: ",".join(units)}
        arguments.setdefault("tensor_parallel_size", len(units))
    else:
        cores = frozenset(map(int, units))
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(units)}
        if side.tuned:
            eager = arguments.get("enforce_eager") is True
            env = cpu_env((tuple(map(int, units)),), eager=eager)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
    return servers.one_process(
        topology.model,
        log=folder / f"{name}.log",
        engine_args=arguments,
        platform=setting.platform,
        env={**env, **topology.env},
        report=partial(_report, side),
        name=name,
        popen=servers.start_on_cores(cores, folder),
    )


def example_proxy(side: LoadSide, setting: LoadSetting, encode: str, prefill_decode: str) -> Server:
    """Return the proxy of vLLM's example in front of two instances."""
    port, folder = servers.free_port(), setting.folder / side.name
    argv = [sys.executable, str(setting.upstream_proxy), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--encode-servers-urls", encode, "--prefill-servers-urls", "disable"]
    argv += ["--decode-servers-urls", prefill_decode]
    return Server(
        name="the proxy",
        argv=argv,
        url=f"http://127.0.0.1:{port}",
        log=folder / "proxy.log",
        popen=servers.start_on_cores(frozenset(setting.allotment.rest), folder),
    )


def _spread_api_servers(engines: Sequence[Server], side: LoadSide, setting: LoadSetting) -> None:
    """Let API servers of tuned vLLM onto more cores; its engines keep theirs."""
    allotment = setting.allotment
    if side.tuned and allotment.binds_cores:
        for index, (server, own) in enumerate(
            zip(engines, allotment.units[side.name], strict=True)
        ):
            bind_threads(server.pid, {*map(int, own), *api_cores(side, index, allotment)})


def _parts_of_topology(server: Server) -> Iterator[Part]:
    """Yield the launcher's instances, what stands in front of them, and the launcher itself.

    Engines behind the engine front have no server: the front's page has what they count.
    """
    runs = find_runs(temp_folder())
    for process in next(run for run in runs if run.pid == server.pid).processes:
        assert process.pid is not None
        group = process.name.rpartition("-")[0]
        if group in Instances.model_fields:
            yield Part(
                name=process.name,
                pid=process.pid,
                metrics_url=f"{process.url}/metrics" if "http" in process.ports else "",
            )
        else:
            yield Part(name=process.name, pid=process.pid, metrics_url=f"{server.url}/metrics")
    for child in psutil.Process(server.pid).children():
        if fork_server.__name__ in child.cmdline():
            yield Part(name="fork server", pid=child.pid, below=False)
    yield Part(name="launcher", pid=server.pid, below=False)

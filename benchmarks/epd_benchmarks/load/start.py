"""Starts sides on their cores or devices, and finds the processes of each.

Plain vLLM, as replicas or as its own example, gets the topology's model, engine arguments and
environment, and the same cores or devices.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from epd_benchmarks import console
from epd_benchmarks.load.sides import LoadSetting, LoadSide
from epd_benchmarks.load.usage import Part
from epd_portable.config.folders import temp_folder
from epd_portable.config.groups import Instances
from epd_portable.demo import servers
from epd_portable.demo.servers import Server
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.launch.plan.placement import ranks_of
from epd_portable.launch.run.process import on_cores
from epd_portable.launch.run.running import find_runs
from epd_portable.launch.run.sessions import SHM
from epd_portable.platforms.traits import TRAITS


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningSide:
    """A side that is up: base addresses, and processes if it was started here."""

    name: str
    urls: tuple[str, ...]
    parts: tuple[Part, ...] = ()


@contextlib.contextmanager
def start_side(side: LoadSide, setting: LoadSetting) -> Iterator[RunningSide]:
    """Start a side and yield it; stop it at the end. `LaunchError` if it does not start."""
    if side.kind == "url":
        yield RunningSide(name=side.name, urls=side.urls)
        return
    with ExitStack() as stack:
        if side.kind == "topology":
            started = entries = [_topology(side, setting)]
        else:
            where = SHM if SHM.is_dir() else setting.folder
            store = stack.enter_context(tempfile.TemporaryDirectory("", "epd-bench-", where))
            started = entries = plain_engines(side, setting, Path(store))
        for server in started:
            server.start()
            stack.callback(server.stop)
        for server in started:
            server.wait_until_ready()
        if side.kind == "topology":
            parts = [*_parts_of_topology(started[0])]
        else:
            names = (each.name.removeprefix("the ") for each in started)
            parts = [Part(name=n, pid=each.pid) for n, each in zip(names, started, strict=True)]
        if side.kind == "upstream":
            proxy = example_proxy(side, setting, *(engine.url for engine in started))
            entries = [stack.enter_context(proxy)]
            parts.append(Part(name="proxy", pid=proxy.pid))
        urls = tuple(server.url for server in entries)
        yield RunningSide(name=side.name, urls=urls, parts=tuple(parts))


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

    Those of the example pass encoder outputs by the folder ``store``.
    """
    topology, units = setting.topologies[side.name], setting.allotment.units[side.name]
    if side.kind == "replicas":
        named = enumerate(units)
        return [_plain_engine(side, setting, f"replica-{n}", own, {}) for n, own in named]
    found = []
    for group, own in zip(("encode", "prefill_decode"), units, strict=True):
        connector: dict[str, JsonValue] = {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_producer" if group == "encode" else "ec_consumer",
            "ec_connector_extra_config": {"shared_storage_path": str(store)},
        }
        arguments = {**ROLE_ARGS.get(group, {}), **getattr(topology.instances, group).engine_args}
        arguments |= {"ec_transfer_config": connector}
        found.append(_plain_engine(side, setting, group.replace("_", "-"), own, arguments))
    return found


def _plain_engine(
    side: LoadSide,
    setting: LoadSetting,
    name: str,
    units: Sequence[str],
    more_args: dict[str, JsonValue],
) -> Server:
    topology, traits = setting.topologies[side.name], TRAITS[setting.platform]
    arguments: dict[str, JsonValue] = {**topology.engine_args, **more_args}
    cores = frozenset[int]()
    if traits.visible_devices_env is not None:
        env = {traits.visible_devices_env: ",".join(units)}
        arguments.setdefault("tensor_parallel_size", len(units))
    else:
        cores = frozenset(map(int, units))
        env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(units)}
        if side.tuned:
            env = cpu_env((tuple(cores),), eager=arguments.get("enforce_eager") is True)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
    folder = setting.folder / side.name
    return servers.one_process(
        topology.model,
        log=folder / f"{name}.log",
        engine_args=arguments,
        platform=setting.platform,
        env={**env, **topology.env},
        report=partial(_report, side),
        name=name,
        popen=_start_on_cores(cores, folder),
    )


def example_proxy(side: LoadSide, setting: LoadSetting, encode: str, prefill_decode: str) -> Server:
    """Return the proxy of vLLM's example in front of two instances."""
    port, folder = servers.free_port(), setting.folder / side.name
    argv = [sys.executable, str(setting.upstream_proxy), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--encode-servers-urls", encode, "--prefill-servers-urls", "disable"]
    return Server(
        name="the proxy",
        argv=[*argv, "--decode-servers-urls", prefill_decode],
        url=f"http://127.0.0.1:{port}",
        log=folder / "proxy.log",
        popen=_start_on_cores(frozenset(setting.allotment.rest), folder),
    )


def _parts_of_topology(server: Server) -> Iterator[Part]:
    """Yield the instances, the front end, and the launcher's own processes."""
    runs = find_runs(temp_folder())
    for process in next(run for run in runs if run.pid == server.pid).processes:
        assert process.pid is not None
        url = server.url
        if process.name.rpartition("-")[0] in Instances.model_fields:
            # Engines behind the front have no server: its page has their counters.
            url = process.url if "http" in process.ports else ""
        metrics_url = f"{url}/metrics" if url else ""
        yield Part(name=process.name, pid=process.pid, metrics_url=metrics_url)
    yield Part(name="launcher", pid=server.pid, below=False)


def _start_on_cores(cores: frozenset[int], folder: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a `subprocess.Popen` whose process starts on these cores and in this folder.

    In a folder of its own: Python takes modules from where it is started before all others.
    """

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with on_cores(cores):
            return subprocess.Popen(argv, cwd=folder, **options)

    return start

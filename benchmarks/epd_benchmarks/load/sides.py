"""Sides of a measurement: their cores or devices, their start, and what their processes use.

Plain vLLM, as replicas or as its own example, gets the topology's model, engine arguments and
environment, and the same cores or devices.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from epd_benchmarks import report
from epd_portable.config.folders import temp_folder
from epd_portable.config.groups import Instances
from epd_portable.config.schema import Topology
from epd_portable.demo import servers
from epd_portable.demo.servers import Server
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.plan.engine import ROLE_ARGS, cpu_env
from epd_portable.launch.plan.placement import ranks_of
from epd_portable.launch.run.lifecycle import on_cores
from epd_portable.launch.run.running import find_runs
from epd_portable.launch.run.sessions import SHM
from epd_portable.platforms.traits import TRAITS


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSide:
    """A side of a measurement.

    Attributes:
        kind: ``topology``, ``replicas`` of plain vLLM, ``upstream`` (vLLM's example), or ``url``.
        what: The option without the name.
        settings: Keys that its topology has otherwise.
        count: Of replicas or the example's instances.
        tuned: Plain vLLM has the executor and threads of ``epd-launch``, on a CPU.
    """

    name: str
    kind: Literal["topology", "replicas", "upstream", "url"]
    what: str
    file: Path | None = None
    settings: tuple[str, ...] = ()
    count: int = 0
    urls: tuple[str, ...] = ()
    tuned: bool = False


def read_side(text: str) -> LoadSide:
    """Read one ``--side``; `ConfigError` if it is invalid."""
    named = re.match(r"([\w.-]+)=", text)
    name, what = (named[1], text[named.end() :]) if named else ("", text)
    plain = r"(?:replicas:([1-9]\d*)|upstream:1E1PD)(,tuned)?((?:,[\w.]+=[^,]+)*)"
    if found := re.fullmatch(plain, what, re.I):
        kind: Literal["replicas", "upstream"] = "replicas" if found[1] else "upstream"
        return LoadSide(
            name=name or ("tuned-" if found[2] else "") + ("one" if found[1] == "1" else kind),
            kind=kind,
            what=what,
            settings=tuple(found[3].split(",")[1:]),
            count=int(found[1] or 2),
            tuned=bool(found[2]),
        )
    urls = tuple(url.rstrip("/").removesuffix("/v1") for url in what[4:].split(","))
    if what.startswith("url:") and all(re.fullmatch(r"http://[^/]+", url) for url in urls):
        return LoadSide(name=name or "url", kind="url", what=what, urls=urls)
    file, *changed = what.split(",")
    if file.endswith((".yaml", ".yml")) and all("=" in each for each in changed):
        return LoadSide(
            name=name or "ours", kind="topology", what=what, file=Path(file), settings=(*changed,)
        )
    examples = "ours=configs/1e1pd.yaml, replicas:2, upstream:1E1PD, there=url:http://h:8000"
    raise ConfigError(f"--side {text}: expected NAME=WHAT, for example {examples}")


def read_sides(texts: Sequence[str]) -> tuple[LoadSide, ...]:
    """Read all sides; `ConfigError` if one is invalid, or two have one name."""
    found = tuple(map(read_side, texts))
    names = [side.name for side in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--side: two are called {twice[0]}; write NAME=WHAT with other names")
    return found


def instance_count(side: LoadSide, topology: Topology | None) -> int:
    """Return the ranks of a side's instances, a listed device once; 0 for running servers."""
    if topology is None or side.kind != "topology":
        return side.count
    groups = [getattr(topology.instances, name) for name in Instances.model_fields]
    listed = {device for group in groups for device in group.devices or ()}
    return len(listed) + sum(ranks_of(group) for group in groups if not group.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """Cores or devices of each side.

    Attributes:
        units: Of each instance of each side, in the order of the instances.
        rest: Cores of the clients, the front end and the proxy.
        binds_cores: Each instance is bound to cores of its own: no devices, and cores enough.
    """

    units: dict[str, list[tuple[str, ...]]]
    rest: tuple[int, ...]
    binds_cores: bool

    def __str__(self) -> str:
        """Return the cores or devices of each side, as a sentence."""
        each = ", ".join(f"{name}: {units}" for name, units in self.units.items()) or "unknown"
        rest = ", ".join(map(str, self.rest))
        return f"Cores or devices of each instance: {each}; of clients and front end: {rest}."


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSetting:
    """A whole measurement, before its results.

    Attributes:
        topologies: Of each side; of plain vLLM the one whose arguments it gets.
        settings: Keys that all topologies have otherwise, the model among them.
        folder: For logs, in a folder for each side.
    """

    sides: tuple[LoadSide, ...]
    platform: str
    topologies: dict[str, Topology]
    settings: tuple[str, ...]
    allotment: Allotment
    folder: Path
    upstream_proxy: Path | None


def share_out(
    counts: Mapping[str, int], *, cores: Sequence[int], devices: Sequence[str] | None
) -> Allotment:
    """Give every side the same cores or devices, and divide them among its instances.

    A side has one for each instance of the largest side; fewer cores are shared by all instances.

    Raises:
        ConfigError: They cannot be divided equally, or there are too few devices.
    """
    supply = list(map(str, cores)) if devices is None else list(devices)
    started = {name: count for name, count in counts.items() if count}
    total = max(started.values(), default=0)
    if total > len(supply) and devices is None:
        shared = {name: [tuple(supply)] * count for name, count in started.items()}
        return Allotment(units=shared, rest=tuple(cores), binds_cores=False)
    if total > len(supply):
        raise ConfigError(f"--side: {total} devices are needed, of {len(supply)}; use fewer")
    taken = supply[len(supply) - total :]
    units = {}
    for name, count in started.items():
        each, left = divmod(total, count)
        if left:
            raise ConfigError(
                f"--side {name}: {total} cores or devices cannot be divided equally among the "
                f"{count} instances; give all sides the same number of instances"
            )
        units[name] = [tuple(taken[at * each : (at + 1) * each]) for at in range(count)]
    rest = tuple(core for core in cores if devices is not None or str(core) not in taken)
    return Allotment(units=units, rest=rest or tuple(cores), binds_cores=devices is None)


_TIMEOUT_S = 20.0
_ITEMS = ("epd_front_items_total", "epd_pd_fallbacks_total")
_FALLBACK = "encoded without a transfer"
_AS_MEANT = ("encoded", "stored", "local_first", "not_needed", "cancelled")
"""Outcomes of items with which nothing went wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a side, for example ``encode-0``: a process, and all below it."""

    name: str
    pid: int
    below: bool = True
    metrics_url: str = ""


@contextlib.contextmanager
def start_side(side: LoadSide, setting: LoadSetting) -> Iterator[tuple[Sequence[str], list[Part]]]:
    """Start a side, yield its addresses and processes, and stop it at the end.

    Running servers have no processes here. `LaunchError` if the side does not start.
    """
    if side.kind == "url":
        yield side.urls, []
        return
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory("", "epd-bench-", SHM))
        topology = [_topology(side, setting)] if side.kind == "topology" else []
        started = topology or plain_engines(side, setting, store)
        for index, server in enumerate(started):
            units = () if topology else setting.allotment.units[side.name][index]
            with on_cores(_cores(units, setting)):
                server.start()
            stack.callback(server.stop)
        for server in started:
            server.wait_until_ready()
        urls = [server.url for server in started]
        if side.kind == "upstream":
            with on_cores(frozenset(setting.allotment.rest)):
                started.append(stack.enter_context(example_proxy(side, setting, *urls)))
            urls = [started[-1].url]
        plain = (Part(name=each.name.removeprefix("the "), pid=each.pid) for each in started)
        yield urls, [*(_parts_of_topology(*topology) if topology else plain)]


def _cores(units: Sequence[str], setting: LoadSetting) -> frozenset[int]:
    has_devices = TRAITS[setting.platform].visible_devices_env is not None
    return frozenset() if has_devices else frozenset(map(int, units))


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
        report=report.progress,
    )


def plain_engines(side: LoadSide, setting: LoadSetting, store: str) -> list[Server]:
    """Return the servers of plain vLLM: replicas, or the two instances of its example.

    Those of the example pass encoder outputs by the folder ``store``.
    """
    topology, traits = setting.topologies[side.name], TRAITS[setting.platform]
    found = []
    for number, units in enumerate(setting.allotment.units[side.name]):
        name, arguments = f"replica-{number}", {**topology.engine_args}
        if side.kind == "upstream":
            name = group = ("encode", "prefill_decode")[number]
            arguments |= ROLE_ARGS.get(group, {}) | getattr(topology.instances, group).engine_args
            arguments["ec_transfer_config"] = {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_consumer" if number else "ec_producer",
                "ec_connector_extra_config": {"shared_storage_path": store},
            }
        if traits.visible_devices_env is not None:
            env = {traits.visible_devices_env: ",".join(units)}
            arguments.setdefault("tensor_parallel_size", len(units))
        elif side.tuned:
            eager = arguments.get("enforce_eager") is True
            env = cpu_env((tuple(_cores(units, setting)),), eager=eager)
            arguments.setdefault("distributed_executor_backend", traits.single_rank_executor_cls)
        else:
            env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(units)}
        server = servers.one_process(
            topology.model,
            log=setting.folder / side.name / f"{name}.log",
            engine_args=arguments,
            platform=setting.platform,
            env={**env, **topology.env},
            report=report.progress,
            name=name,
        )
        found.append(server)
    return found


def example_proxy(side: LoadSide, setting: LoadSetting, encode: str, prefill_decode: str) -> Server:
    """Return the proxy of vLLM's example in front of two instances."""
    port = servers.free_port()
    argv = [sys.executable, str(setting.upstream_proxy), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--encode-servers-urls", encode, "--prefill-servers-urls", "disable"]
    return Server(
        name="the proxy",
        argv=[*argv, "--decode-servers-urls", prefill_decode],
        url=f"http://127.0.0.1:{port}",
        log=setting.folder / side.name / "proxy.log",
    )


def _parts_of_topology(server: Server) -> Iterator[Part]:
    """Yield the instances, the front end, and the launcher's own processes."""
    runs = find_runs(temp_folder())
    for process in next(run for run in runs if run.pid == server.pid).processes:
        assert process.pid is not None
        # Engines behind the front have no server: its page has their counters.
        page = f"{process.url}/metrics" if "http" in process.ports else ""
        yield Part(name=process.name, pid=process.pid, metrics_url=page)
    yield Part(name="launcher", pid=server.pid, below=False)


def read_cpu_s(parts: Sequence[Part]) -> Counter[str]:
    """Return the CPU time of each part so far."""
    return _sums(parts, lambda process: sum(process.cpu_times()[:2]))


def read_memory_bytes(parts: Sequence[Part]) -> Counter[str]:
    """Return the memory of each part, shared pages divided among those who share them (PSS)."""
    return _sums(parts, lambda process: process.memory_full_info().pss)


def _sums(parts: Sequence[Part], figure: Callable[[psutil.Process], Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(part.pid)
            for process in [root, *(root.children(recursive=True) if part.below else ())]:
                with contextlib.suppress(psutil.Error):  # It has ended.
                    found[part.name] += figure(process)
    return found


def read_counters(parts: Sequence[Part]) -> Counter[str]:
    """Return the items of a side by outcome; `MeasurementError` if its metrics are unreachable."""
    found: Counter[str] = Counter()
    for url in dict.fromkeys(part.metrics_url for part in parts if part.metrics_url):
        try:
            response = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise MeasurementError(f"{url}: {error!r}") from error
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name in _ITEMS:
                    found[sample.labels.get("outcome", _FALLBACK)] += int(sample.value)
    return found


def untransferred(counted: Counter[str]) -> int:
    """Return the number of items that were not encoded or not transferred as intended."""
    return sum(count for outcome, count in counted.items() if outcome not in _AS_MEANT)

"""Starts the sides on their cores or devices, and knows the processes of each."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from epd_portable.bench import servers
from epd_portable.bench.load import watch
from epd_portable.bench.load.bodies import text_of
from epd_portable.bench.load.peers import example_engine, example_proxy, plain_engine
from epd_portable.bench.load.sides import Allotment, LoadSide, api_cores
from epd_portable.bench.load.watch import Part
from epd_portable.bench.servers import model_name
from epd_portable.config.groups import Instances
from epd_portable.config.instance import PlatformName
from epd_portable.config.schema import Topology
from epd_portable.errors import MeasurementError
from epd_portable.launch.plan.placement import ranks_of
from epd_portable.launch.run.process import bind_threads
from epd_portable.launch.run.sessions import SHM
from epd_portable.platforms.traits import TRAITS

_PROBE_WORDS = 1000
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What all sides of a measurement stand on.

    Attributes:
        platform: What everything runs on.
        topologies: Of each side, with all settings; of plain vLLM the one whose arguments it takes.
        settings: As ``--set`` takes them.
        model: Replaces that of a topology file.
        allotment: Who gets which cores or devices.
        folder: For logs, a folder for each side.
        stages: Topologies write event traces.
        upstream_proxy: File of the proxy of vLLM's example; ``None`` for its stand-in.
        report: Gets progress lines.
        starting: Servers that were begun.
    """

    platform: PlatformName
    topologies: dict[str, Topology]
    settings: tuple[str, ...]
    model: str | None
    allotment: Allotment
    folder: Path
    stages: bool
    upstream_proxy: Path | None
    report: Callable[[str], None]
    starting: list[servers.Server] = field(default_factory=list)

    @property
    def binds(self) -> bool:
        """Whether instances are bound to cores of their own, and not to devices."""
        if self.allotment.crowded:
            return False
        return TRAITS[self.platform].visible_devices_env is None


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingSide:
    """A side that is up.

    Attributes:
        side: Who it is.
        urls: Where clients ask, in turns.
        model: Name of the model there.
        parts: Its processes; none of servers that ran already.
        startup_s: Seconds from the start to readiness.
        trace_dir: Where it writes event traces; ``None`` for nowhere.
        store: Folder of encoder outputs; ``None`` for none.
        tokenizer_url: Base address of what tells tokens of a text, if that is not the first of
            ``urls``.
    """

    side: LoadSide
    urls: tuple[str, ...]
    model: str
    parts: tuple[Part, ...] = ()
    startup_s: float = 0.0
    trace_dir: Path | None = None
    store: Path | None = None
    tokenizer_url: str = ""

    def tidy(self) -> None:
        """Remove what earlier requests left: traces, and what vLLM's example keeps for ever."""
        if self.store is not None:
            for folder in self.store.iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        if self.trace_dir is not None:
            for file in self.trace_dir.glob("*.jsonl"):
                # Processes append to it, wherever its end is.
                os.truncate(file, 0)


@contextlib.contextmanager
def stand_up(sides: Sequence[LoadSide], ground: Ground) -> Iterator[list[StandingSide]]:
    """Start sides at the same time and yield them; stop them at the end.

    Raises:
        LaunchError: One did not start.
        MeasurementError: One does not run where it should.
    """
    with ExitStack() as stack:
        # Entered one after the other by the stack, in threads of their own: a start takes minutes.
        with ThreadPoolExecutor(len(sides)) as pool:
            starts = [pool.submit(stack.enter_context, _started(side, ground)) for side in sides]
            try:
                up = [start.result() for start in starts]
            except BaseException:
                # Nobody wants to wait for the others.
                for server in ground.starting:
                    server.interrupt()
                raise
        for each in up:
            watch.check_cores(each.parts)
        yield up


def words_per_token(side: StandingSide) -> tuple[float, bool]:
    """Return how many words of a text make a token, and whether the side could tell.

    Raises:
        MeasurementError: It cannot be reached.
    """
    texts = {words: text_of(words, words) for words in (1, 1 + _PROBE_WORDS)}
    counts = {}
    base = side.tokenizer_url or side.urls[0]
    for words, text in texts.items():
        body = {"model": side.model, "prompt": text}
        try:
            answer = httpx.post(f"{base}/tokenize", json=body, timeout=_TIMEOUT_S, trust_env=False)
        except httpx.TransportError as error:
            raise MeasurementError(f"{base}/tokenize: {error!r}") from error
        if answer.status_code != httpx.codes.OK:
            return 1.0, False
        counts[words] = int(answer.json()["count"])
    one, many = counts.values()
    return round(_PROBE_WORDS / (many - one), 4), True


@contextlib.contextmanager
def _started(side: LoadSide, ground: Ground) -> Iterator[StandingSide]:
    starts = {
        "topology": _topology,
        "replicas": _replicas,
        "ranks": _replicas,
        "upstream": _upstream,
        "url": _running,
    }
    with starts[side.kind](side, ground) as up:
        yield up


@contextlib.contextmanager
def _running(side: LoadSide, ground: Ground) -> Iterator[StandingSide]:
    try:
        model = model_name(side.urls[0])
    except httpx.TransportError as error:
        raise MeasurementError(
            f"--side {side.name}: {side.urls[0]}: {error!r}; start a server there first"
        ) from error
    yield StandingSide(side=side, urls=side.urls, model=model)


@contextlib.contextmanager
def _topology(side: LoadSide, ground: Ground) -> Iterator[StandingSide]:
    assert side.file is not None
    folder = ground.folder / side.name
    trace_dir = folder / "trace" if ground.stages else None
    cores = _group_cores(ground, side) if ground.binds else {}
    bound = [f"instances.{name}.cores={list(own)}" for name, own in cores.items() if own]
    server = servers.topology(
        side.file,
        platform=ground.platform,
        log_dir=folder / "logs",
        settings=(*ground.settings, *side.settings, *bound),
        model=ground.model,
        env={"EPD_TRACE_DIR": str(trace_dir)} if trace_dir else {},
        report=lambda line: ground.report(f"{side.name}: {line}"),
    )
    ground.starting.append(server)
    with server:
        yield StandingSide(
            side=side,
            urls=(server.url,),
            model=model_name(server.url),
            parts=tuple(_parts_of_topology(server, side, ground)),
            startup_s=server.startup_s,
            trace_dir=trace_dir,
        )


@contextlib.contextmanager
def _replicas(side: LoadSide, ground: Ground) -> Iterator[StandingSide]:
    folder = ground.folder / side.name
    plain = [
        plain_engine(
            ground.topologies[side.name],
            name=f"replica-{index}",
            platform=ground.platform,
            units=units,
            folder=_made(folder),
            tuned=side.tuned,
            ranks=side.count if side.kind == "ranks" else 1,
            report=lambda line: ground.report(f"{side.name}: {line}"),
        )
        for index, units in enumerate(_units(side, ground))
    ]
    ground.starting.extend(plain)
    with _all_up(plain):
        urls = tuple(server.url for server in plain)
        yield StandingSide(
            side=side,
            urls=urls,
            model=model_name(urls[0]),
            parts=_parts_of_engines(plain, side, ground),
            startup_s=max(server.startup_s for server in plain),
        )


@contextlib.contextmanager
def _upstream(side: LoadSide, ground: Ground) -> Iterator[StandingSide]:
    folder = _made(ground.folder / side.name)
    where = SHM if SHM.is_dir() else folder
    with tempfile.TemporaryDirectory(prefix="epd-bench-store-", dir=where) as name:
        engines = [
            example_engine(
                ground.topologies[side.name],
                group,
                platform=ground.platform,
                units=units,
                folder=folder,
                store=Path(name),
                tuned=side.tuned,
                report=lambda line: ground.report(f"{side.name}: {line}"),
            )
            for group, units in zip(
                ("encode", "prefill_decode"), ground.allotment.units[side.name], strict=True
            )
        ]
        ground.starting.extend(engines)
        with _all_up(engines):
            encode, prefill_decode = (server.url for server in engines)
            with example_proxy(
                encode,
                prefill_decode,
                cores=frozenset(ground.allotment.rest),
                folder=folder,
                file=ground.upstream_proxy,
            ) as proxy:
                yield StandingSide(
                    side=side,
                    urls=(proxy.url,),
                    model=model_name(encode),
                    parts=(
                        *_parts_of_engines(engines, side, ground),
                        Part(name="proxy", pid=proxy.pid),
                    ),
                    startup_s=max(server.startup_s for server in engines),
                    store=Path(name),
                    # The proxy serves chat alone.
                    tokenizer_url=prefill_decode,
                )


@contextlib.contextmanager
def _all_up(engines: Sequence[servers.Server]) -> Iterator[None]:
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(stack.enter_context, engines))
        yield


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _group_cores(ground: Ground, side: LoadSide) -> dict[str, list[int]]:
    """Return the cores of each group of instances of a topology."""
    units = iter(ground.allotment.units[side.name])
    topology = ground.topologies[side.name]
    return {
        name: [
            int(core)
            for _ in range(ranks_of(getattr(topology.instances, name)))
            for core in next(units)
        ]
        for name in Instances.model_fields
    }


def _units(side: LoadSide, ground: Ground) -> list[tuple[str, ...]]:
    """Return the cores or devices of each server of plain vLLM."""
    units = ground.allotment.units[side.name]
    return [tuple(unit for rank in units for unit in rank)] if side.kind == "ranks" else units


def _parts_of_engines(
    engines: Sequence[servers.Server], side: LoadSide, ground: Ground
) -> tuple[Part, ...]:
    parts = []
    for index, (server, units) in enumerate(zip(engines, _units(side, ground), strict=True)):
        own = more = frozenset[int]()
        if ground.binds:
            own, more = frozenset(map(int, units)), api_cores(side, index, ground.allotment)
            if more:
                bind_threads(server.pid, own | more)
        parts.append(
            Part(
                name=server.name.removeprefix("the "),
                pid=server.pid,
                cores=own,
                api_cores=more,
                metrics_url=f"{server.url}/metrics",
            )
        )
    return tuple(parts)


def _parts_of_topology(server: servers.Server, side: LoadSide, ground: Ground) -> Iterator[Part]:
    """Yield the launcher's instances, its router, which it keeps off their cores, and itself."""
    cores = _group_cores(ground, side) if ground.binds else {}
    launcher = psutil.Process(server.pid)
    for child in launcher.children():
        instance = _instance_of(child)
        if not instance:
            continue
        group = instance.rpartition("-")[0]
        if group not in Instances.model_fields:
            yield Part(name=instance, pid=child.pid, metrics_url=f"{server.url}/metrics")
            continue
        yield Part(
            name=instance,
            pid=child.pid,
            cores=frozenset(cores.get(group, ())),
            api_cores=frozenset(core for each in cores.values() for core in each),
            metrics_url=f"http://127.0.0.1:{_port_of(child)}/metrics",
        )
    yield Part(name="launcher", pid=server.pid, below=False)


def _instance_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("EPD_INSTANCE", "")
    return ""


def _port_of(process: psutil.Process) -> int:
    words = process.cmdline()
    return int(words[words.index("--port") + 1])

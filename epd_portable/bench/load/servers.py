"""Starts sides on their cores or devices, and finds the processes of each."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from epd_portable.bench.load import usage
from epd_portable.bench.load.context import BenchContext
from epd_portable.bench.load.peers import side_servers
from epd_portable.bench.load.sides import LoadSide, api_cores
from epd_portable.bench.load.usage import Part
from epd_portable.bench.servers import Server, model_name
from epd_portable.config.groups import Instances
from epd_portable.errors import MeasurementError
from epd_portable.launch.run import fork_server
from epd_portable.launch.run.process import bind_threads
from epd_portable.launch.run.running import find_runs
from epd_portable.launch.run.sessions import SHM


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningSide:
    """A side that is up.

    Attributes:
        urls: Base addresses; clients ask them in turns.
        model: Name of the model there.
        parts: Its processes; none of servers that ran already.
        store: Folder in which vLLM's example keeps encoder outputs for ever; ``None`` for none.
    """

    side: LoadSide
    urls: tuple[str, ...]
    model: str
    parts: tuple[Part, ...] = ()
    store: Path | None = None

    def clear_store(self) -> None:
        """Remove what earlier requests left."""
        for folder in self.store.iterdir() if self.store else ():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def start_side(side: LoadSide, context: BenchContext) -> Iterator[RunningSide]:
    """Start a side and yield it; stop it at the end.

    Raises:
        LaunchError: It did not start.
        MeasurementError: It does not run where it should, or is not there.
    """
    if side.kind == "url":
        try:
            model = model_name(side.urls[0])
        except httpx.TransportError as error:
            raise MeasurementError(
                f"--side {side.name}: {side.urls[0]}: {error!r}; start a server there first"
            ) from error
        yield RunningSide(side=side, urls=side.urls, model=model)
        return
    where = SHM if SHM.is_dir() else context.folder
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-bench-", dir=where))
        servers: list[Server] = []
        for together in side_servers(side, context, Path(store)):
            _start(together, stack)
            servers += together
        if side.kind == "topology":
            parts = tuple(_parts_of_topology(servers[0], context.cores_of(side)))
        else:
            parts = tuple(_parts_of_plain(servers, side, context))
        usage.check_cores(parts)
        entries = servers if side.kind == "replicas" else servers[-1:]
        yield RunningSide(
            side=side,
            urls=tuple(server.url for server in entries),
            model=model_name(servers[0].url),
            parts=parts,
            store=Path(store),
        )


def _start(servers: Sequence[Server], stack: ExitStack) -> None:
    """Start servers at the same time; the stack stops them."""
    with ThreadPoolExecutor(len(servers)) as pool:
        starts = [pool.submit(stack.enter_context, server) for server in servers]
        try:
            for start in starts:
                start.result()
        except BaseException:
            # The starts of the others would take minutes.
            for server in servers:
                server.interrupt()
            raise


def _parts_of_plain(
    servers: Sequence[Server], side: LoadSide, context: BenchContext
) -> Iterator[Part]:
    """Yield the servers of plain vLLM, whose API servers are let onto more cores, and the proxy."""
    units = context.allotment.units[side.name]
    for index, (server, cores) in enumerate(zip(servers, units, strict=False)):
        own = more = frozenset[int]()
        if context.allotment.binds_cores:
            own, more = frozenset(map(int, cores)), api_cores(side, index, context.allotment)
            if more:
                bind_threads(server.pid, own | more)
        yield Part(
            name=server.name.removeprefix("the "),
            pid=server.pid,
            cores=own,
            api_cores=more,
            metrics_url=f"{server.url}/metrics",
        )
    for proxy in servers[len(units) :]:
        yield Part(name="proxy", pid=proxy.pid)


def _parts_of_topology(server: Server, cores: dict[str, list[int]]) -> Iterator[Part]:
    """Yield the launcher's instances, what stands in front of them, and the launcher itself.

    Engines behind the engine front have no server: the front's page has what they count.
    """
    runs = find_runs(Path(tempfile.gettempdir())).running
    for process in next(run for run in runs if run.pid == server.pid).processes:
        assert process.pid is not None
        group = process.name.rpartition("-")[0]
        if group in Instances.model_fields:
            yield Part(
                name=process.name,
                pid=process.pid,
                cores=frozenset(cores.get(group, ())),
                api_cores=frozenset(core for each in cores.values() for core in each),
                metrics_url=f"{process.url}/metrics" if "http" in process.ports else "",
            )
        else:
            yield Part(name=process.name, pid=process.pid, metrics_url=f"{server.url}/metrics")
    for child in psutil.Process(server.pid).children():
        if fork_server.__name__ in child.cmdline():
            yield Part(name="fork server", pid=child.pid, below=False)
    yield Part(name="launcher", pid=server.pid, below=False)

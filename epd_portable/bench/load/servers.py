"""Starts sides on their cores or devices, and finds the processes of each."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from epd_portable.bench.load import usage
from epd_portable.bench.load.context import BenchContext
from epd_portable.bench.load.peers import example_engines, example_proxy, plain_engine
from epd_portable.bench.load.sides import LoadSide, SideKind, api_cores
from epd_portable.bench.load.usage import Part
from epd_portable.bench.servers import Server, model_name, topology
from epd_portable.config.groups import Instances
from epd_portable.errors import MeasurementError
from epd_portable.launch.run.process import bind_threads
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
        MeasurementError: It does not run where it should.
    """
    with _STARTS[side.kind](side, context) as running:
        usage.check_cores(running.parts)
        yield running


@contextlib.contextmanager
def _find_running(side: LoadSide, context: BenchContext) -> Iterator[RunningSide]:
    try:
        model = model_name(side.urls[0])
    except httpx.TransportError as error:
        raise MeasurementError(
            f"--side {side.name}: {side.urls[0]}: {error!r}; start a server there first"
        ) from error
    yield RunningSide(side=side, urls=side.urls, model=model)


@contextlib.contextmanager
def _start_topology(side: LoadSide, context: BenchContext) -> Iterator[RunningSide]:
    assert side.file is not None
    bound = [
        f"instances.{name}.cores={cores}" for name, cores in context.cores_of(side).items() if cores
    ]
    server = topology(
        side.file,
        platform=context.platform,
        log_dir=context.folder_of(side) / "logs",
        settings=(*context.settings, *side.settings, *bound),
        model=context.model,
        report=context.report_of(side),
    )
    with server:
        parts = tuple(_parts_of_topology(server, context.cores_of(side)))
        yield RunningSide(side=side, urls=(server.url,), model=model_name(server.url), parts=parts)


@contextlib.contextmanager
def _start_replicas(side: LoadSide, context: BenchContext) -> Iterator[RunningSide]:
    plain = [
        plain_engine(side, context, name=f"replica-{index}", units=units)
        for index, units in enumerate(context.servers_of(side))
    ]
    with _started(plain, side, context) as parts:
        urls = tuple(server.url for server in plain)
        yield RunningSide(side=side, urls=urls, model=model_name(urls[0]), parts=parts)


@contextlib.contextmanager
def _start_upstream(side: LoadSide, context: BenchContext) -> Iterator[RunningSide]:
    where = SHM if SHM.is_dir() else context.folder
    with tempfile.TemporaryDirectory(prefix="epd-bench-store-", dir=where) as store:
        engines = example_engines(side, context, Path(store))
        with _started(engines, side, context) as parts:
            encode, prefill_decode = (server.url for server in engines)
            with example_proxy(side, context, encode, prefill_decode) as proxy:
                yield RunningSide(
                    side=side,
                    urls=(proxy.url,),
                    model=model_name(encode),
                    parts=(*parts, Part(name="proxy", pid=proxy.pid)),
                    store=Path(store),
                )


_STARTS: dict[SideKind, Callable[..., contextlib.AbstractContextManager[RunningSide]]] = {
    "topology": _start_topology,
    "replicas": _start_replicas,
    "ranks": _start_replicas,
    "upstream": _start_upstream,
    "url": _find_running,
}


@contextlib.contextmanager
def _started(
    engines: Sequence[Server], side: LoadSide, context: BenchContext
) -> Iterator[tuple[Part, ...]]:
    """Start the engines of plain vLLM at the same time, on their cores."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(engines)) as pool:
            starts = [pool.submit(stack.enter_context, engine) for engine in engines]
            try:
                for start in starts:
                    start.result()
            except BaseException:
                # The starts of the others would take minutes.
                for engine in engines:
                    engine.interrupt()
                raise
        parts = []
        for index, (server, units) in enumerate(
            zip(engines, context.servers_of(side), strict=True)
        ):
            own = more = frozenset[int]()
            if context.allotment.binds_cores:
                own, more = frozenset(map(int, units)), api_cores(side, index, context.allotment)
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
        yield tuple(parts)


def _parts_of_topology(server: Server, cores: dict[str, list[int]]) -> Iterator[Part]:
    """Yield the launcher's instances, its router, which it keeps off their cores, and itself."""
    for child in psutil.Process(server.pid).children():
        instance = ""
        with contextlib.suppress(psutil.Error):
            instance = child.environ().get("EPD_INSTANCE", "")
        group = instance.rpartition("-")[0]
        if group in Instances.model_fields:
            words = child.cmdline()
            yield Part(
                name=instance,
                pid=child.pid,
                cores=frozenset(cores.get(group, ())),
                api_cores=frozenset(core for each in cores.values() for core in each),
                metrics_url=f"http://127.0.0.1:{words[words.index('--port') + 1]}/metrics",
            )
        elif instance:
            yield Part(name=instance, pid=child.pid, metrics_url=f"{server.url}/metrics")
    yield Part(name="launcher", pid=server.pid, below=False)

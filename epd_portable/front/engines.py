"""The engines behind the front: each has a client of its own, replaced when it starts again.

An engine (`epd_portable.engine.core`) connects to the Unix socket of each API server
and sends its name, receives the address of that server's client, and reports when it is ready.
vLLM's client lasts as long as the connection, which the death of either side closes. API
servers exchange their counts by the same sockets, and share nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from epd_portable.config.roles import DUTIES, ENCODES, SENDS_KV, TAKES_ITEMS, TAKES_KV, Role
from epd_portable.config.secret import Secret
from epd_portable.errors import RequestError
from epd_portable.front.metrics import InstanceCollector
from epd_portable.front.peers import Peer
from epd_portable.placement import output_check
from epd_portable.placement.assignment import Busy, EncodeFailure
from epd_portable.placement.estimates import CacheSizes
from epd_portable.placement.instances import (
    MAX_INSTANCES,
    EndpointPool,
    EngineSettings,
    Instance,
    LoadReport,
    Seen,
    WentDownError,
    while_up,
)
from epd_portable.placement.output_check import Comparison
from epd_portable.responses import unavailable
from epd_portable.wire.fingerprint import differences
from epd_portable.wire.jobs import Here
from epd_portable.wire.params import OutputSample

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.metrics.stats import SchedulerStats

logger = logging.getLogger(__name__)

FORGET_S = 600.0
"""An engine that has joined and stays away so long is forgotten."""
_CLOSE_AFTER_S = 1.0
"""Time between the end of an engine and that of the sockets to it."""
_LOOK_EVERY_S = 1.0
_MAX_LINE_BYTES = 1 << 20
"""Longest line of an API server to another one: settings of an engine that joins."""


class EngineClient(AsyncMPClient):
    """vLLM's client of one engine, which leaves no descriptor when it is shut down.

    vLLM leaves its ZMQ context, of seven descriptors, to the garbage collector.

    A socket that is closed at the moment in which its peer's connection breaks off can abort the
    process, or keep its context from ending (libzmq 4.3.5, zeromq/libzmq#3442). So sockets are
    closed later, when ZMQ has taken in the end of the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            _end_context(self.resources.ctx)
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """Take no more calls, and close all sockets later; from the loop's thread."""
        self.resources.engine_dead = True
        asyncio.get_running_loop().call_later(_CLOSE_AFTER_S, self._close)
        # If the loop ends first, vLLM before 0.32 leaves sockets open, and their context waits.
        weakref.finalize(self, _close_sockets, self.resources)

    def _close(self) -> None:
        super().shutdown()
        _end_context(self.resources.ctx)


def _close_sockets(resources: Any) -> None:
    for each in vars(resources).values():
        if isinstance(each, zmq.Socket):
            each.close(linger=0)


def _end_context(context: zmq.Context[Any]) -> None:
    """End a context, all of whose sockets are closed, without waiting for it."""
    threading.Thread(target=context.term, name="epd-zmq-context", daemon=True).start()


class FrontEngine:
    """An engine of the plan, up or not.

    Attributes:
        index: Its label in vLLM's metrics.
        client: vLLM's client of its present process; ``None`` while it is down.
        holds: Items in its encoder cache, as far as it has reported (`CacheNews`).
        fingerprint: See `epd_portable.wire.fingerprint`; empty before its first process.
        namespace: Of the store's entries that it loads; empty for none.
        incompatible: Engines whose items and KV it refuses, because of their fingerprints.
        samples: Encoder outputs of one item, as it got them from other engines, by their name, and
            as it encoded them, by its own.
        compared: Outputs of other engines next to the right ones, by name of the engine.
        unchecked: Engines whose outputs are to be compared.
        running: Requests that it computes, of all senders, by its last report; vLLM reports to
            one API server how many, others whether there are any.
        follower: Follows one on another machine, until it has left; ``None`` for others.
        leaving: It is forgotten when nothing of it is needed.
        warming: Number of its pairs that are warmed up at present.
    """

    def __init__(self, settings: EngineSettings, instance: Instance, index: int) -> None:
        self.settings = self.joined_as = settings
        self.instance = instance
        self.index = index
        self.client: Any = None
        self.holds: set[str] = set()
        self.fingerprint = self.namespace = ""
        self.incompatible: set[str] = set()
        self.samples: dict[str, OutputSample] = {}
        self.compared: dict[str, Comparison] = {}
        self.unchecked: set[str] = set()
        self.running = 0
        self.follower: asyncio.Task[None] | None = None
        self.leaving = False
        self.warming = 0

    @property
    def refused(self) -> list[str]:
        """Engines whose encoder outputs it refuses."""
        return [name for name, each in self.compared.items() if each.problem]

    @property
    def busy(self) -> Busy:
        """Return whether tokens of requests wait while it encodes."""
        return "queue" if max(self.instance.responses.running, self.running) else "idle"

    def report(self, stats: SchedulerStats) -> None:
        """Process its load report, which holds until the next one."""
        running, waiting = stats.num_running_reqs, stats.num_waiting_reqs
        if self.encodes_only:
            report = LoadReport(items=running + waiting)
        else:
            report = LoadReport(running=running, waiting=waiting, kv_used=stats.kv_cache_usage)
        self.instance.take_report(report)

    @property
    def name(self) -> str:
        """Return the name of its instance."""
        return self.instance.name

    @property
    def encodes_only(self) -> bool:
        """Return whether it serves no requests."""
        return self.instance.role == "encode"

    @property
    def generates(self) -> bool:
        """Return whether it generates responses."""
        return DUTIES[self.instance.role] == "decode"

    @property
    def is_full(self) -> bool:
        """Return whether it has as many jobs as it takes."""
        one = self.instance
        jobs = one.jobs + one.elsewhere if self.follower is None else one.load
        return jobs >= self.settings.max_queued_items

    async def add(self, request: EngineCoreRequest) -> None:
        """Send it a request.

        Raises:
            WentDownError: It is down, or is about to end.
        """
        if self.client is None:
            raise WentDownError("is down")
        try:
            await self.client.add_request_async(request)
        except EngineDeadError as error:
            self.instance.seen_gone("it has failed")
            raise WentDownError("has failed") from error

    async def abort(self, client: Any, request_id: str) -> None:
        """End a request that was sent to it, if it is still in the process that `client` is of."""
        if client is not None and client is self.client:
            with contextlib.suppress(EngineDeadError):  # The request has ended with it.
                await client.abort_requests_async([request_id])

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of it; return the result, or nothing if it is down or goes down."""
        if self.client is None:
            return []
        # vLLM's client would wait for ever.
        gone = contextlib.suppress(WentDownError, EngineDeadError)
        with gone, while_up(self.instance.retained()):
            return [await self.client.call_utility_async(method, *args)]
        return []

    async def responds(self, timeout_s: float) -> bool:
        """Return whether its loop takes calls, and it is warmed up."""
        if self.client is None or self.warming:
            return False
        with contextlib.suppress(TimeoutError, EngineDeadError):
            call = self.client.call_utility_async("is_scheduler_paused")
            await asyncio.wait_for(call, timeout_s)
            return True
        return False


def _together(seen: Sequence[Seen]) -> Seen:
    """Return what all API servers see of the engines that all of them have: others join or leave.

    Each takes others for like it, so what one expects of an engine is what all give it.
    """
    views = [{each["name"]: each for each in one.instances} for one in seen]
    names = [name for name in views[0] if all(name in view for view in views)]
    came_s: defaultdict[tuple[Role, str, int], float] = defaultdict(float)
    for one in seen:
        for kind, seconds in one.came_s:
            came_s[kind] += seconds / len(seen)
    return Seen([_worst([view[name] for view in views]) for name in names], [*came_s.items()])


def _worst(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an engine as the API server sees it for which it is least there."""
    worst = min(same, key=lambda each: (each["state"] == "up", each["healthy"]))
    return {
        **worst,
        "idle": all(each["idle"] for each in same),
        "in_flight": sum(each["in_flight"] for each in same),
        "backlog_s": sum(each["backlog_s"] for each in same) / len(same),
        "output_difference": max(
            (each["output_difference"] for each in same if each["output_difference"] is not None),
            default=None,
        ),
    }


class Engines:
    """Waits for engines, and follows each through its restarts.

    Args:
        paths: Unix socket of each API server, to which engines connect; others are made next to
            this one's.
        config: Of the front; the first engine that generates completes it.
        failed: Takes why an engine of another machine has not done a job.
        caches: Sizes of what engines are taken to have in their caches.

    Attributes:
        pool: The engines as instances, to choose from.
        compare: Begins to compare the encoder outputs of all engines again.
    """

    def __init__(
        self,
        settings: list[EngineSettings],
        paths: Sequence[Path],
        index: int,
        config: VllmConfig,
        outputs: Callable[[FrontEngine, EngineCoreOutputs], None],
        failed: Callable[[str, EncodeFailure], None],
        secret: Secret,
        caches: CacheSizes | None = None,
    ) -> None:
        self.pool = EndpointPool(caches=caches)
        self.compare: Callable[[], None] = lambda: None
        self.by_name = {
            each.name: FrontEngine(each, self.pool.add(each), number)
            for number, each in enumerate(settings)
        }
        self._path = paths[index]
        self._peers = [*paths[:index], *paths[index + 1 :]]
        self._index = index
        self._config = config
        self._complete = False
        self._outputs = outputs
        self._failed = failed
        self._secret = secret
        self._name = f"{socket.gethostname()}:{paths[0]}"
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Take engines in from now on."""
        self._loop = asyncio.get_running_loop()
        self._path.unlink(missing_ok=True)
        self._remove_sockets(self._path)
        self._server = await asyncio.start_unix_server(
            self._answer, self._path, limit=_MAX_LINE_BYTES
        )

    async def join(self, settings: EngineSettings) -> bool:
        """Take in an engine of another machine, at each API server; return whether it is new.

        Raises:
            RequestError: There is another one of that name, or a server is not there.
        """
        known = self.by_name.get(settings.name)
        if known is not None and (
            not known.follower or (known.settings.url != settings.url and known.client is not None)
        ):
            raise RequestError(
                f"instance {settings.name!r} is at {known.settings.url or 'this front'}: take "
                "another name, or let that one leave first",
                status=HTTPStatus.CONFLICT,
                code="name_taken",
            )
        if known is None and len(self.pool) >= MAX_INSTANCES:
            raise RequestError(
                f"there are {MAX_INSTANCES} instances: let some leave",
                status=HTTPStatus.CONFLICT,
                code="too_many_instances",
            )
        await self._ask_all("join", msgspec.json.encode(settings).decode())
        return known is None

    def _join(self, settings: EngineSettings) -> None:
        known = self.by_name.get(settings.name)
        if known is not None and known.joined_as != settings:
            self._remove(known)
            known = None
        if known is not None:
            known.leaving = False
            known.instance.health.drain(False)
            return
        instance = self.pool.add(settings, registered=True)
        engine = FrontEngine(settings, instance, len(self.by_name))
        self.by_name[engine.name] = engine
        logger.info("engine %s at %s joins", engine.name, settings.url)
        engine.follower = self._hold(asyncio.create_task(self._follow(engine)))

    def _hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Keep a task until it ends, or this front does; log why it failed."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("an engine is sent away", exc_info=error)

    def _leave(self, engine: FrontEngine) -> None:
        """Give an engine nothing more, and forget it when nothing of it is needed."""
        if engine.leaving or engine.follower is None:
            return
        engine.leaving = True
        engine.instance.health.drain()
        self._hold(asyncio.create_task(self._see_off(engine)))

    async def _see_off(self, engine: FrontEngine) -> None:
        await engine.instance.wait_idle()
        if engine.leaving and self.by_name.get(engine.name) is engine:
            logger.info("engine %s has left", engine.name)
            self._remove(engine)

    def _remove(self, engine: FrontEngine) -> None:
        assert engine.follower is not None
        engine.follower.cancel()
        del self.by_name[engine.name]
        self._forget_samples(engine)
        self.pool.remove(engine.name)

    async def _follow(self, engine: FrontEngine) -> None:
        settings = engine.joined_as
        while True:
            peer = Peer(
                engine.name,
                settings.url,
                self._secret,
                self._config,
                self._name,
                failed=self._failed,
                loaded=lambda load: engine.instance.note_elsewhere(load.jobs, load.seconds),
            )
            try:
                here = await self._met(engine, peer)
                engine.settings = msgspec.structs.replace(settings, max_queued_items=here.most)
                engine.fingerprint = here.fingerprint
                self._note_problems()
                await self._serve(engine, peer, peer.gone())
            except TimeoutError:
                logger.warning("engine %s stays away, and is forgotten", engine.name)
                self._remove(engine)
                return
            except Exception:
                logger.exception("engine %s: its outputs cannot be taken", engine.name)
            finally:
                peer.shutdown()

    async def _met(self, engine: FrontEngine, peer: Peer) -> Here:
        async with asyncio.timeout(FORGET_S):
            met = asyncio.create_task(peer.met())
            try:
                while not met.done():
                    await asyncio.wait([met], timeout=_LOOK_EVERY_S)
                    if peer.problem and peer.problem != engine.instance.health.reason:
                        engine.instance.seen_gone(peer.problem)
                return met.result()
            finally:
                met.cancel()

    async def one_up(self) -> None:
        """Return when an engine is up that serves requests."""
        waits = [asyncio.create_task(each.health.wait_up()) for each in self.pool.of_duty("decode")]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    def close(self) -> None:
        """Let every engine end; from any thread, once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._server.close()
        for each in self._tasks:
            each.cancel()

    async def seen(self, verb: str = "", name: str = "") -> list[dict[str, Any]]:
        """Return the engines as all API servers together see them; waits for each of them.

        Args:
            verb: ``drain``, ``resume`` or ``leave``: the engine of that name first, at each server.
                ``compare``: encoder outputs again, as weights may be others.

        Raises:
            RequestError: 503, a server is not there.
        """
        return _together(await self._ask_all(verb, name)).instances

    async def page(self) -> bytes:
        """Return the metrics of all API servers in Prometheus' format; there are several."""
        together, registry = _together(await self._ask_all()), CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(InstanceCollector(lambda: together))
        return generate_latest(registry)

    async def _ask_all(self, verb: str = "", name: str = "") -> list[Seen]:
        asked = f"{verb} {name}\n".encode()
        try:
            others = await asyncio.gather(*(_ask(each, asked) for each in self._peers))
        except (OSError, msgspec.DecodeError) as error:
            raise unavailable(
                f"an API server of this front starts, or has ended: {error}"
            ) from error
        return [self._act(verb, name), *others]

    def _act(self, verb: str, name: str) -> Seen:
        engine = self.by_name.get(name)
        if verb == "compare":
            self.compare()
        elif verb == "join":
            self._join(msgspec.json.decode(name, type=EngineSettings))
        elif engine is not None and verb == "leave":
            self._leave(engine)
        elif engine is not None and verb == "drain":
            engine.instance.health.drain()
        elif engine is not None and verb == "resume":
            engine.leaving = False
            engine.instance.health.drain(False)
        return self.pool.seen()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._hold(task)
        # Cancelled by `_close` alone, which asyncio's streams would report as an error.
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):
            verb, _, name = (await reader.readline()).decode().strip().partition(" ")
            engine = self.by_name.get(name)
            if verb != "meet":
                writer.write(msgspec.json.encode(self._act(verb, name)))
            elif engine is None:
                logger.warning("an engine of the unknown name %r is sent away", name)
            else:
                await self._connect(engine, reader, writer)

    async def _connect(
        self, engine: FrontEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = Path(f"{self._path}-{engine.name}-{next(self._numbers)}")
        place = f"ipc://{path}"
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._remove_sockets, path)
            writer.write(f"{place}\n".encode())
            if not (ready := await reader.readline()):
                return  # It has ended before it was ready.
            _, namespace, engine.fingerprint = ready.decode().rstrip("\n").split(" ", 2)
            engine.namespace = namespace.strip("-")
            self._note_problems()
            config = self._config
            if self._complete or not engine.generates:
                # vLLM's client adds up what its engines report.
                config = copy.copy(config)
                config.cache_config = copy.copy(config.cache_config)
            else:
                self._complete = True
            gone = asyncio.create_task(reader.read())
            at_end.callback(gone.cancel)
            if (client := await self._client_at(place, config, gone)) is not None:
                await self._serve(engine, client, gone)

    @staticmethod
    def _remove_sockets(path: Path) -> None:
        """Remove files of sockets, which ZMQ leaves, also those of a killed front."""
        for each in path.parent.glob(f"{path.name}-*"):
            each.unlink(missing_ok=True)

    async def _client_at(
        self, place: str, config: VllmConfig, gone: asyncio.Task[bytes]
    ) -> AsyncMPClient | None:
        """Return vLLM's client of an engine; ``None`` if the engine has ended before it was met."""
        making = asyncio.create_task(
            asyncio.to_thread(
                EngineClient,
                config,
                Executor.get_class(config),
                True,
                {"input_address": f"{place}-in", "output_address": f"{place}-out"},
                client_count=1 + len(self._peers),
                client_index=self._index,
            )
        )
        await asyncio.wait({making, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            # It would wait for minutes, and ends at a message of an engine that it does not know.
            context = zmq.Context()
            with context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.IDENTITY, b"stranger")
                # Else the end of the context would wait for a client that has closed.
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(f"{place}-in")
                stranger.send(b"")
                await asyncio.wait({making})
            _end_context(context)
        if making.exception() is not None and gone.done():
            return None
        return await making

    def end_check(self, taker: str, encoder: str, sample: OutputSample | None) -> None:
        """Compare an encoder output with what other engines make of the same item.

        Args:
            sample: ``None`` if there is none: the engines work together unchecked.
        """
        engine = self.by_name.get(taker)
        if engine is None:
            return  # It has left.
        engine.unchecked.discard(encoder)
        if sample is not None:
            engine.samples[encoder] = sample
        self._refuse_others(engine)

    def _forget_samples(self, engine: FrontEngine) -> None:
        """Forget what an engine has computed and got: it may be another one from now on."""
        engine.samples.clear()
        for each in self.by_name.values():
            each.samples.pop(engine.name, None)
            self._refuse_others(each)

    def _refuse_others(self, taker: FrontEngine) -> None:
        if taker.name in taker.unchecked:
            return  # Its own output, with which others are compared, is on its way.
        others = {name: each for name, each in taker.samples.items() if name != taker.name}
        found = output_check.compare(taker.samples.get(taker.name), others)
        if found != taker.compared:
            taker.compared = found
            self._note_problems()

    def _note_problems(self) -> None:
        """Note of each engine which others refuse its items or KV, and why."""
        known = [each for each in self.by_name.values() if each.fingerprint]
        kinds = ("items", ENCODES, TAKES_ITEMS), ("KV", SENDS_KV, TAKES_KV)
        for sender in known:
            found = []
            differs: list[float] = []
            for what, receiver in [
                (what, each)
                for what, sends, takes in kinds
                for each in known
                if sender.instance.role in sends and each.instance.role in takes
            ]:
                receiver.incompatible.discard(sender.name)
                if differing := differences(receiver.fingerprint, sender.fingerprint):
                    receiver.incompatible.add(sender.name)
                    found.append(f"{receiver.name} refuses its {what}, which differ in {differing}")
                elif what == "items" and sender.name in receiver.compared:
                    apart, refused = receiver.compared[sender.name]
                    differs.append(apart)
                    if refused:
                        found.append(f"{receiver.name} refuses its items: {refused}")
            problem = "; ".join(found)
            if problem and problem != sender.instance.health.problem:
                logger.warning("%s: %s", sender.name, problem)
            sender.instance.output_difference = max(differs, default=None)
            sender.instance.health.note(problem)

    async def _serve(
        self, engine: FrontEngine, client: AsyncMPClient | Peer, gone: Awaitable[object]
    ) -> None:
        if engine.client is not None:
            engine.instance.seen_gone("its process was started again")
        self._forget_samples(engine)
        engine.client = client
        engine.holds = set()
        engine.running = 0
        engine.instance.health.seen_up()
        try:
            async with asyncio.TaskGroup() as group:
                pump = group.create_task(self._pump(engine, client))
                await gone
                pump.cancel()
        finally:
            if engine.client is client:
                engine.client = None
                gone_for = client.ended if isinstance(client, Peer) else "its process has ended"
                engine.instance.seen_gone(gone_for)
            client.shutdown()

    async def _pump(self, engine: FrontEngine, client: AsyncMPClient | Peer) -> None:
        try:
            while True:
                self._outputs(engine, await client.get_output_async())
        except EngineDeadError:
            # Its process ends later: it gets no request meanwhile.
            if engine.client is client:
                engine.instance.seen_gone("it has failed")


async def _ask(path: Path, asked: bytes) -> Seen:
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.closing(writer):
        writer.write(asked)
        if not (answer := await reader.read()):
            raise ConnectionResetError(f"the API server at {path} has ended")
        return msgspec.json.decode(answer, type=Seen)

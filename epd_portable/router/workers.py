"""Several processes of one router: workers serve clients on one port, a keeper does all else.

The keeper alone probes, introduces and registers instances, and starts a worker again that has
ended. Each worker has a listening socket of its own on the port, so the connections that wait at a
dead one are lost and no others. What is in flight and how many bytes are held is counted in one
memory, `Tally`; how instances are goes over a socket between the keeper and each worker.

Workers are started as new programs, not forked: they must count for Prometheus from their first
import on, and one that is started late must have nothing of the keeper's loop, threads and sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

import anyio
import msgspec
from prometheus_client.multiprocess import mark_process_dead

from epd_portable.config.secret import SIGNATURE_SCHEME
from epd_portable.errors import LaunchError, RequestError
from epd_portable.router.fleet.control import ControlChannels
from epd_portable.router.fleet.instances import Failure, Fleet, Instance
from epd_portable.router.fleet.members import States
from epd_portable.router.fleet.tally import Tally
from epd_portable.router.fleet.view import InstanceView
from epd_portable.router.http.replies import Reply, error_reply, json_reply, unavailable
from epd_portable.router.http.upstream_connection import Fault
from epd_portable.router.observability.status import Gathered, ProcessStatus, StatusPage
from epd_portable.router.server import Router
from epd_portable.router.serving import Stopping, listen, serve
from epd_portable.router.settings import RouterSettings

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
MOST_DEATHS = 5
"""A worker that ends as often in a row, each time soon after its start, ends the router."""
WELL_AFTER_S = 30.0
ALIVE_EVERY_S = 1.0
HUNG_AFTER_S = 30.0
STARTS_WITHIN_S = 120.0
"""A worker that does nothing for as long, or does not serve by then, is started again."""
ASK_TIMEOUT_S = 60.0
STATUS_WITHIN_S = 0.5
"""A worker that takes longer to tell its part of the status page is left out, and that is said."""
STOP_SLACK_S = 5.0
"""Beyond ``drain_s``, until workers that have not ended are killed."""
WRONG_SETTINGS = 2
"""Exit status of a process to which trying again would not help."""
_MAX_WAITING_BYTES = 64 << 20
"""A worker for which more waits than this does not read what it is told."""


# What the keeper and a worker tell each other.


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First of all: what a worker has to know."""

    settings: bytes
    port: int
    column: int
    columns: int
    metrics_folder: str


class Changes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How instances are: all of them at first, then those that changed."""

    version: int
    views: tuple[InstanceView, ...]
    gone: tuple[str, ...] = ()


class StopAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let answers that have begun end, or end them at once."""

    at_once: bool = False


class StatusWanted(msgspec.Struct, frozen=True, tag=True):
    """Somebody looks at the status page: what is there to tell?"""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Asked`.

    Of ``states`` it is JSON, ``null`` to who does not hold the secret; of ``status`` a `Gathered`.
    """

    number: int
    reply: Reply


class Serving(msgspec.Struct, frozen=True, tag=True):
    """A worker takes requests."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request failed, see `Instance.failed`; ``None``: one that was suspected has answered."""

    name: str
    failure: str | None


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody asked a worker what the keeper answers."""

    number: int
    what: Literal["states", "operate", "status"]
    method: str = ""
    target: str = ""
    authorization: str = ""
    body: bytes = b""


class StatusTold(msgspec.Struct, frozen=True, tag=True):
    """The answer to `StatusWanted`."""

    status: ProcessStatus


ToWorker = Begin | Changes | StopAsked | Answered | StatusWanted
ToKeeper = Serving | Seen | Asked | StatusTold
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Channel(Generic[_In, _Out]):
    """One end of the socket between the keeper and a worker. To send never waits."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[_In],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def over(
        cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[_In]
    ) -> Channel[_In, _Out]:
        """Return a channel over one end of a socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    @property
    def waiting_bytes(self) -> int:
        """How much the other end has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: _Out) -> None:
        """Send a message; lost if the other end has gone."""
        data = msgspec.msgpack.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def receive(self) -> _In | None:
        """Return the next message, or ``None`` when the other end has gone."""
        try:
            nbytes = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decoder.decode(await self._reader.readexactly(nbytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_keeper = msgspec.msgpack.Decoder(ToKeeper)


# The keeper.


class _Worker:
    """A worker that runs."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel[ToKeeper, ToWorker]
    ) -> None:
        self.process = process
        self.channel = channel
        self.serves = False
        self.telling: asyncio.Future[ProcessStatus] | None = None

    def status(self) -> asyncio.Future[ProcessStatus]:
        """Return what it will tell; who asks while others wait gets what they get."""
        if self.telling is None or self.telling.done():
            self.telling = asyncio.get_running_loop().create_future()
            self.channel.send(StatusWanted())
        return self.telling

    def told(self, status: ProcessStatus) -> None:
        if self.telling is not None and not self.telling.done():
            self.telling.set_result(status)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
            self.process.kill()


class Workers:
    """Keeps the workers, tells them how instances are, and answers what they are asked for that.

    Args:
        router: Of this process; its tally has a column for each worker, after the first.
        port: At which they serve.
        tally_file: Descriptor of the tally's memory.
        metrics_folder: Where they count.
    """

    def __init__(self, router: Router, *, port: int, tally_file: int, metrics_folder: str) -> None:
        self._router = router
        self._instances = router.instances
        self._settings = router.settings
        self._port = port
        self._tally_file = tally_file
        self._metrics_folder = metrics_folder
        self._running: dict[int, _Worker] = {}
        self._ending = False
        self._changed: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._instances.watch(self._note)
        router.status.gather = self._gather

    async def run(self, stop: Stopping) -> None:
        """Keep the workers until told to stop; return when all of them have ended.

        Raises:
            LaunchError: One cannot be kept running.
        """
        keeping = [
            asyncio.create_task(self._keep(column))
            for column in range(1, self._settings.workers + 1)
        ]
        watching = asyncio.create_task(self._end_hung())
        asked = asyncio.create_task(stop.asked.wait())
        try:
            await asyncio.wait([*keeping, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._router.draining = True
            await self._end(stop, keeping)
            for task in (watching, asked, *self._answering):
                task.cancel()
        for task in keeping:
            if not task.cancelled():
                task.result()

    async def _keep(self, column: int) -> None:
        """Run one worker after the other."""
        deaths = 0
        while not self._ending:
            started = time.monotonic()
            status = await self._run_one(column)
            if self._ending:
                break
            deaths = 1 if time.monotonic() - started > WELL_AFTER_S else deaths + 1
            if deaths == MOST_DEATHS or status == WRONG_SETTINGS:
                raise LaunchError(
                    f"worker {column} of the router ended with {status}, {deaths} times in a row: "
                    "its own lines above say why"
                )
            pause_s = min(FIRST_PAUSE_S * 2.0 ** (deaths - 1), LONGEST_PAUSE_S)
            logger.warning(
                "worker %d has ended with %d, and is started again in %g s", column, status, pause_s
            )
            await asyncio.sleep(pause_s)

    async def _run_one(self, column: int) -> int:
        """Run a worker; return its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            files = (theirs.fileno(), self._tally_file)
            process = await asyncio.create_subprocess_exec(
                *_command(*files),
                pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
                # Ctrl-C is for the keeper: a worker that is just starting could not heed it.
                preexec_fn=os.setpgrp,
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics_folder},
            )
        worker = _Worker(process, await Channel.over(ours, _to_keeper))
        tally = self._instances.tally
        tally.open_column(column)
        self._running[column] = worker
        worker.channel.send(
            Begin(
                settings=self._settings.model_dump_json().encode(),
                port=self._port,
                column=column,
                columns=self._settings.workers + 1,
                metrics_folder=self._metrics_folder,
            )
        )
        if self._ending:
            worker.kill()
        everybody = tuple(instance.view for instance in self._instances.all)
        worker.channel.send(Changes(version=self._instances.version, views=everybody))
        reading = asyncio.create_task(self._read(worker))
        try:
            return await process.wait()
        finally:
            worker.kill()
            reading.cancel()
            del self._running[column]
            worker.channel.close()
            tally.clear_column(column)
            mark_process_dead(process.pid, self._metrics_folder)  # type: ignore[no-untyped-call]

    async def _end_hung(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            for column, worker in self._running.items():
                silent_s = time.monotonic() - self._instances.tally.alive_at(column)
                waiting = worker.channel.waiting_bytes
                limit_s = HUNG_AFTER_S if worker.serves else STARTS_WITHIN_S
                if silent_s > limit_s or waiting > _MAX_WAITING_BYTES:
                    logger.error("worker %d has done nothing for %.0f s: killed", column, silent_s)
                    worker.kill()

    async def _end(self, stop: Stopping, keeping: list[asyncio.Task[None]]) -> None:
        """Let workers end their answers; kill those that have none yet, or take too long."""
        self._ending = True
        for worker in self._running.values():
            if not worker.serves:
                worker.kill()
        at_once = asyncio.create_task(stop.at_once.wait())
        ended = asyncio.gather(*keeping, return_exceptions=True)
        for now, within_s in ((False, self._settings.drain_s + STOP_SLACK_S), (True, STOP_SLACK_S)):
            for worker in self._running.values():
                worker.channel.send(StopAsked(at_once=now))
            waiting: set[asyncio.Future[Any]] = {ended} if now else {ended, at_once}
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                break
        for task in keeping:
            task.cancel()
        for worker in self._running.values():
            logger.error("a worker has not ended: killed")
            worker.kill()
        at_once.cancel()
        await ended

    # Telling and being told.

    def _note(self, instance: Instance) -> None:
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._tell)
        self._changed.add(instance.name)

    def _tell(self) -> None:
        """Tell all workers what has changed since they were told."""
        found = {name: self._instances.get(name) for name in self._changed}
        self._changed.clear()
        changes = Changes(
            version=self._instances.version,
            views=tuple(each.view for each in found.values() if each is not None),
            gone=tuple(name for name, each in found.items() if each is None),
        )
        for worker in self._running.values():
            worker.channel.send(changes)

    async def _read(self, worker: _Worker) -> None:
        while (message := await worker.channel.receive()) is not None:
            if isinstance(message, Serving):
                worker.serves = True
            elif isinstance(message, Seen):
                self._see(message)
            elif isinstance(message, StatusTold):
                worker.told(message.status)
            else:
                task = asyncio.create_task(self._answer(worker, message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    def _see(self, seen: Seen) -> None:
        instance = self._instances.get(seen.name)
        if instance is None:
            return
        if seen.failure is None:
            instance.answered()
        else:
            instance.failed("error" if seen.failure == "error" else Fault(seen.failure))

    async def _answer(self, worker: _Worker, asked: Asked) -> None:
        members, headers = self._router.members, {"authorization": asked.authorization}
        try:
            if asked.what == "status":
                reply = json_reply(await self._gather())
            elif asked.what == "states":
                reply = json_reply(await members.states(asked.method, asked.target, headers))
            else:
                reply = await members.handle(asked.method, asked.target, headers, asked.body)
        except RequestError as error:
            reply = error_reply(error)
        worker.channel.send(Answered(number=asked.number, reply=reply))

    async def _gather(self) -> Gathered:
        """Return what the processes know that the status page shows."""
        own = self._router.status.of_this_process()
        waiting = [worker.status() for worker in self._running.values() if worker.serves]
        if waiting:
            await asyncio.wait(waiting, timeout=STATUS_WITHIN_S)
        told = [each.result() for each in waiting if each.done()]
        return Gathered(
            processes=[own, *told], serving=len(told), silent=self._settings.workers - len(told)
        )


def _command(channel: int, tally: int) -> list[str]:
    safe = ["-P"] if getattr(sys.flags, "safe_path", False) else []
    return [sys.executable, *safe, "-m", "epd_portable.router", "--worker", f"{channel},{tally}"]


async def keep(
    settings: RouterSettings, address: socket.socket, admin: list[socket.socket], stop: Stopping
) -> None:
    """Be the keeper of a router until told to stop.

    Args:
        settings: Of the router; `RouterSettings.workers` is how many.
        address: Keeps the port at which the workers serve.
        admin: Where this process itself serves.
        stop: Ends it.

    Raises:
        ConfigError: A file or an address of the settings cannot be used.
        LaunchError: A worker cannot be kept running.
    """
    columns = settings.workers + 1
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-router-metrics-"))
        tally_file = os.memfd_create("epd-router-tally")
        stack.callback(os.close, tally_file)
        os.ftruncate(tally_file, Tally.nbytes(columns))
        memory = mmap.mmap(tally_file, Tally.nbytes(columns))
        tally = Tally(memoryview(memory), columns=columns)
        for column in range(1, columns):
            tally.clear_column(column)
        router = Router(settings, instances=Fleet(tally), metrics_folder=folder)
        workers = Workers(
            router, port=address.getsockname()[1], tally_file=tally_file, metrics_folder=folder
        )
        if admin:
            await _keep_and_serve(router, workers, admin, stop)
            return
        try:
            await router.open()
            await workers.run(stop)
        finally:
            await router.close()


async def _keep_and_serve(
    router: Router, workers: Workers, listeners: list[socket.socket], stop: Stopping
) -> None:
    """Keep workers, and answer operators at an address of their own."""
    last, started = Stopping(), asyncio.Event()
    serving = asyncio.create_task(serve(router, listeners, last, started=started.set))
    begun = asyncio.create_task(started.wait())
    try:
        await asyncio.wait({serving, begun}, return_when=asyncio.FIRST_COMPLETED)
        if started.is_set():
            await workers.run(stop)
    finally:
        begun.cancel()
        last.ask()
        await serving


# A worker.


class RemoteMembers:
    """The instances as the keeper knows them, for a worker; see `MemberList`.

    Args:
        channel: To the keeper.
        stop: Asked when the keeper says so, and when it has gone.
        instances: Follow what the keeper says.
        control: Gets a channel to each prefill+decode instance.
    """

    def __init__(
        self,
        channel: Channel[ToWorker, ToKeeper],
        stop: Stopping,
        instances: Fleet,
        control: ControlChannels,
    ) -> None:
        self._channel = channel
        self._stop = stop
        self._instances = instances
        self._control = control
        self._number = itertools.count()
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._known = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._page: StatusPage | None = None

    async def open(self) -> None:
        """See `MemberList`."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._show_life())]
        await self._known.wait()

    async def close(self) -> None:
        """See `MemberList`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()

    async def states(self, method: str, target: str, headers: Mapping[str, str]) -> States | None:
        """See `MemberList`."""
        authorization = headers.get("authorization", "")
        if not authorization.startswith(SIGNATURE_SCHEME):
            return None
        reply = await self._ask("states", method=method, target=target, authorization=authorization)
        return msgspec.json.decode(reply.body, type=States | None)

    async def handle(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """See `MemberList`."""
        return await self._ask(
            "operate",
            method=method,
            target=target,
            authorization=headers.get("authorization", ""),
            body=body,
        )

    def show_by(self, page: StatusPage) -> None:
        """Let the status page of this process show what all of them know, and theirs what it does.

        Args:
            page: Of this process.
        """
        self._page = page
        page.gather = self._gather

    async def _gather(self) -> Gathered:
        reply = await self._ask("status")
        return msgspec.json.decode(reply.body, type=Gathered)

    async def _ask(
        self,
        what: Literal["states", "operate", "status"],
        *,
        method: str = "",
        target: str = "",
        authorization: str = "",
        body: bytes = b"",
    ) -> Reply:
        number = next(self._number)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._channel.send(
            Asked(
                number=number,
                what=what,
                method=method,
                target=target,
                authorization=authorization,
                body=body,
            )
        )
        try:
            with anyio.fail_after(ASK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise unavailable("the router's keeper does not answer; try again later") from None
        finally:
            del self._asked[number]

    async def _show_life(self) -> None:
        while True:
            self._instances.tally.is_alive()
            await asyncio.sleep(ALIVE_EVERY_S)

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, Changes):
                await self._follow(message)
            elif isinstance(message, Answered):
                if (waiting := self._asked.get(message.number)) and not waiting.done():
                    waiting.set_result(message.reply)
            elif isinstance(message, StatusWanted):
                if self._page is not None:
                    self._channel.send(StatusTold(self._page.of_this_process()))
            elif isinstance(message, StopAsked):
                self._stop.asked.set()
                if message.at_once:
                    self._stop.at_once.set()
        logger.error("the router's keeper has gone: this worker ends its answers and stops")
        self._known.set()
        self._stop.abandon()

    async def _follow(self, changes: Changes) -> None:
        for name in changes.gone:
            await self._forget(name)
        for view in changes.views:
            known = self._instances.get(view.name)
            if known is not None and known.row != view.row:
                await self._forget(view.name)
                known = None
            if known is None and view.control:
                self._control.connect(view.name, view.control)
            self._instances.take(view)
        self._instances.tally.saw(changes.version)
        self._known.set()

    async def _forget(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        self._instances.remove(name)
        if instance.control:
            await self._control.disconnect(name)


async def work(channel_file: int, tally_file: int) -> None:
    """Be a worker until the keeper says that it is enough.

    Args:
        channel_file: Descriptor of the socket to the keeper.
        tally_file: Descriptor of the tally's memory.

    Raises:
        ConfigError: A file or an address of the settings cannot be used.
    """
    stop = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Who sends them to every process of a router means the keeper, which says what to do.
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    channel: Channel[ToWorker, ToKeeper] = await Channel.over(
        socket.socket(fileno=channel_file), _to_worker
    )
    start = await channel.receive()
    if not isinstance(start, Begin):
        return
    settings = RouterSettings.model_validate_json(start.settings)
    memory = mmap.mmap(tally_file, Tally.nbytes(start.columns))
    os.close(tally_file)
    tally = Tally(memoryview(memory), columns=start.columns, column=start.column)

    def report(instance: Instance, failure: Failure | None) -> None:
        told = failure.value if isinstance(failure, Fault) else failure
        channel.send(Seen(name=instance.name, failure=told))

    router = Router(
        settings,
        instances=Fleet(tally, report=report),
        members=lambda instances, control: RemoteMembers(channel, stop, instances, control),
        metrics_folder=start.metrics_folder,
    )
    assert isinstance(router.members, RemoteMembers)
    router.members.show_by(router.status)
    listener = listen(settings.host, start.port, shared=True)
    await serve(router, [listener], stop, started=lambda: channel.send(Serving()))
    if stop.abandoned:
        shutil.rmtree(start.metrics_folder, ignore_errors=True)

"""Engines of other machines, as a front has them: a client of the hub of each.

`Peer` is to `epd_portable.front.engines.FrontEngine` what vLLM's client of a local engine is. It
lasts until the hub is gone, or has forgotten this front, and is replaced then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from epd_portable.config.secret import Secret
from epd_portable.errors import ProtocolError
from epd_portable.front.calls import call_elsewhere
from epd_portable.placement.assignment import EncodeFailure, FailureKind
from epd_portable.transfer.curve import CurveKeys, connect_client
from epd_portable.transfer.sessions import new_session
from epd_portable.vllm_plugin.agreement import kv_form
from epd_portable.vllm_plugin.job_items import to_job
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire import jobs

logger = logging.getLogger(__name__)

_FIRST_BEAT_S = 0.1
_REASONS = {str(each): each for each in FinishReason}


@dataclass(eq=False)
class Peer:
    """Connection to a hub, from its start to its end.

    Attributes:
        address: ZMQ address of its hub, after ``plain+`` where nothing is encrypted.
        front: Name that API servers of one front have in common.
        failed: Called with a job and why it was not done.
        loaded: Called with the backlog of the engine for other fronts.
        here: What the hub last reported of its engine.
        problem: Why the engine cannot be used, or empty.
        ended: Why this connection is over, or empty.
    """

    name: str
    address: str
    secret: Secret
    config: VllmConfig
    front: str
    failed: Callable[[str, EncodeFailure], None]
    loaded: Callable[[jobs.Load], None]
    here: jobs.Here | None = None
    problem: str = ""
    ended: str = ""

    def __post_init__(self) -> None:
        self._session = new_session()
        self._hub_session = ""
        self._missed = 0
        self._resets = itertools.count()
        self._awaited: dict[str, asyncio.Future[None]] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._met, self._gone = asyncio.Event(), asyncio.Event()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        # What waits for a hub that is away must not reach the next process there.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # Open requests hold these bytes anyway.
        self._socket.setsockopt(zmq.MAXMSGSIZE, jobs.CHUNK_BYTES)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(12))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if self.address.startswith("plain+"):
            self._socket.connect(self.address.removeprefix("plain+"))
        else:
            keys = CurveKeys.derive(self.secret)
            connect_client(self._socket, self.address, keys, what="hub of an engine")
        self._tasks = [asyncio.create_task(x) for x in (self._beat(), self._take(), self._watch())]

    async def met(self) -> jobs.Here:
        """Return the hub's description of its engine, when that can be used."""
        await self._met.wait()
        assert self.here is not None
        return self.here

    async def gone(self) -> None:
        """Return when the hub or its engine has gone, or is silent, or has forgotten this front."""
        await self._gone.wait()

    # What a front calls of vLLM's clients.

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the end of a job, or news of the engine's encoder cache."""
        return await self._outputs.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a job.

        Raises:
            EngineDeadError: The hub is gone.
        """
        try:
            job, tensors = to_job(request, self.config, self.secret)
            head = jobs.encode_head(job, self._session)
        except ProtocolError as error:
            failure = EncodeFailure(kind=FailureKind.ERROR, reason=str(error))
            self.failed(request.request_id, failure)
            return
        begins, _ = jobs.offsets(job.tensors)
        await self._send_parts([head])
        end = 0
        for begin, data in zip(begins, tensors, strict=True):
            if begin > end:
                await self._send_chunk(bytes(begin - end))
            for part in range(0, data.nbytes, jobs.CHUNK_BYTES):
                await self._send_chunk(data[part : part + jobs.CHUNK_BYTES])
            end = begin + data.nbytes

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End jobs; there is no reply."""
        with contextlib.suppress(EngineDeadError):
            await self._send(jobs.Cancel(jobs=tuple(request_ids)))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method, as far as that goes, see `call_elsewhere`.

        Raises:
            EngineDeadError: The hub is gone.
        """
        if self._gone.is_set():
            raise EngineDeadError
        if call_elsewhere(method, *args):
            name = f"reset-{self._session}-{next(self._resets)}"
            done = self._awaited[name] = asyncio.get_running_loop().create_future()
            try:
                await self._send(jobs.Reset(job=name))
                await done
            finally:
                del self._awaited[name]
        return False

    def get_kv_event_sources(self, *_: Any, **__: Any) -> dict[int, Any]:
        """Return nothing: it publishes where it runs."""
        return {}

    def shutdown(self) -> None:
        """Leave the hub; open calls fail."""
        if self._socket.closed:
            return
        farewell = jobs.encode(jobs.Leave(), self._session)
        with contextlib.suppress(zmq.ZMQError):
            zmq.Socket.shadow(self._socket).send(farewell, zmq.NOBLOCK)
        self._gone.set()
        for each in self._tasks:
            each.cancel()
        for call in self._awaited.values():
            if not call.done():
                call.set_exception(EngineDeadError())
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close()

    # Messages.

    async def _send(self, message: jobs.FromFront) -> None:
        await self._send_parts([jobs.encode(message, self._session)])

    async def _send_chunk(self, data: bytes | memoryview) -> None:
        await self._send_parts([b"", data])

    async def _send_parts(self, parts: list[Any]) -> None:
        if self._gone.is_set():
            raise EngineDeadError
        try:
            # Never waits: so no cancelled request leaves half a job in the middle of another.
            await self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            raise EngineDeadError from None

    async def _beat(self) -> None:
        while not self._gone.is_set():
            if self._met.is_set():
                # By beats, not by the clock: this loop may have been held up itself.
                self._missed += 1
                if self._missed > jobs.MISSED_BEATS:
                    self._end("it is silent")
                    return
            with contextlib.suppress(EngineDeadError):
                await self._send(jobs.Beat(front=self.front))
            await asyncio.sleep(jobs.BEAT_S if self._met.is_set() else _FIRST_BEAT_S)

    async def _watch(self) -> None:
        while True:
            await self._events.recv_multipart()
            if self._met.is_set():
                self._end("its connection has ended")

    async def _take(self) -> None:
        while True:
            data = await self._socket.recv()
            self._missed = 0
            try:
                message, session = jobs.decode_from_hub(data)
            except ProtocolError as error:
                self._complain(str(error))
                continue
            if isinstance(message, jobs.VersionRefused):
                self._complain(message.reason)
            elif isinstance(message, jobs.Here):
                self._take_here(message, session)
            elif self._met.is_set() and session == self._hub_session:
                self._take_answer(message)

    def _take_here(self, here: jobs.Here, session: str) -> None:
        if here.name != self.name:
            self._complain(f"engine {here.name} is there")
        elif self._met.is_set() and session != self._hub_session:
            self._end("it has forgotten this front")
        elif here.kv and here.kv != (own := kv_form(self.config)):
            self._complain(f"its KV is {here.kv}; read here is {own}")
        elif here.well:
            self.here, self._hub_session = here, session
            self.loaded(here.load)
            self._met.set()
        elif self._met.is_set():
            self._end("its engine does not respond")

    def _take_answer(self, message: jobs.News | jobs.Done | jobs.Full | jobs.Failed) -> None:
        if isinstance(message, jobs.News):
            self._put(EngineCoreOutput("", []), msgspec.to_builtins(message.news))
            return
        if isinstance(message, jobs.Failed):
            reason = f"refuses the job: {message.reason}"
            self.failed(message.job, EncodeFailure(kind=FailureKind.ERROR, reason=reason))
            return
        self.loaded(message.load)
        if isinstance(message, jobs.Full):
            failure = EncodeFailure(
                kind=FailureKind.FULL, reason="is full", full_for_s=message.retry_s
            )
            self.failed(message.job, failure)
        elif (call := self._awaited.get(message.job)) is not None:
            if not call.done():
                call.set_result(None)
        else:
            reason = _REASONS.get(message.reason, FinishReason.ERROR)
            output = EngineCoreOutput(
                message.job, [], finish_reason=reason, kv_transfer_params=message.kv
            )
            self._put(output, message.params)

    def _put(self, output: EngineCoreOutput, params: dict[str, Any] | None) -> None:
        if params is not None:
            put_params(output, params)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("engine %s: %s", self.name, problem)
            self.problem = problem

    def _end(self, why: str) -> None:
        if not self._gone.is_set():
            logger.warning("engine %s: %s", self.name, why)
            self.ended = why
            self._gone.set()

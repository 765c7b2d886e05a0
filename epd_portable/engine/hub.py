"""Jobs of fronts on other machines, see `epd_portable.wire.jobs`, for one engine.

The hub is one more local client of vLLM's engine core, in a thread of the engine's process. Fronts
connect by TCP (ROUTER, encrypted), come and go at any time, and are counted by their heartbeats.
Nothing here waits for a front: what one does not read is dropped, and its jobs end when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import vllm
import zmq
import zmq.asyncio
from vllm.v1.engine.exceptions import EngineDeadError

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.roles import Role
from epd_portable.config.secret import Secret
from epd_portable.errors import ProtocolError
from epd_portable.placement.estimates import Pace
from epd_portable.transfer.curve import CurveKeys, Listener
from epd_portable.transfer.sessions import new_session
from epd_portable.vllm_plugin.job_items import JobReader, is_proved
from epd_portable.vllm_plugin.requests import take_params
from epd_portable.wire import jobs
from epd_portable.wire.messages import MAX_REASON
from epd_portable.wire.params import CacheNews

logger = logging.getLogger(__name__)

MAX_FRONTS = 1000
_WAITING_MESSAGES = 32
"""Most messages of one front, each at most `CHUNK_BYTES` long, before they are read."""
_NEWS_ITEMS = 4096
"""In one message."""
_RESPONDS_WITHIN_BEATS = 30
"""Beats after which an engine that has not responded is not well: a large item takes a CPU long."""


@dataclass(eq=False, slots=True)
class _Arriving:
    """A job whose bytes come in."""

    job: jobs.Job
    data: np.ndarray[Any, Any]
    filled: int = 0


@dataclass(eq=False, slots=True)
class _Front:
    """Connection of one API server of a front.

    Attributes:
        session: Of all messages to it: another one if it was forgotten meanwhile.
        missed: Beats since its last message.
        jobs: At the engine; bytes of each.
    """

    name: str
    session: str
    missed: int = 0
    jobs: dict[str, int] = field(default_factory=dict)
    arriving: _Arriving | None = None


@dataclass(eq=False)
class Hub:
    """See the module; used in one thread's event loop.

    Attributes:
        config: Names the engine and what it takes.
        role: Of the engine.
        kv: Form of its KV; empty where it prefills for none.
        plain: Nothing is encrypted. A job is still proved to be a holder's of the secret.
        well: The engine responds.

    Raises:
        ConfigError: There is no secret.
        TransportError: The address cannot be bound.
    """

    address: str
    config: InstanceConfig
    role: Role
    fingerprint: str
    reader: JobReader
    kv: str = ""
    plain: bool = False
    well: bool = False

    def __post_init__(self) -> None:
        self._session = new_session()
        self._fronts: dict[bytes, _Front] = {}
        self._owners: dict[str, bytes] = {}
        self._sessions = self._unanswered = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._held: set[str] = set()
        self._pace = Pace()
        self._secret = Secret.read(self.config.secret_file)
        self._listener = Listener(
            self.address,
            None if self.plain else CurveKeys.derive(self._secret),
            name="job channel",
            max_bytes=jobs.CHUNK_BYTES,
            waiting=_WAITING_MESSAGES,
        )
        self._socket = zmq.asyncio.Socket.from_socket(self._listener.socket)

    async def serve(self, client: Any) -> None:
        """Take jobs until the engine ends."""
        self._client = client
        self.well = True
        logger.info("%s takes jobs of other machines", self.config.instance)
        tasks = [asyncio.create_task(each) for each in (self._take(), self._pump(), self._tick())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.well = False
            for each in tasks:
                each.cancel()
            self._listener.close()
        for each in tasks:
            if each.done() and not each.cancelled() and (error := each.exception()) is not None:
                raise error

    @property
    def open_jobs(self) -> int:
        """Jobs at the engine."""
        return len(self._owners)

    # From fronts.

    async def _take(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart(copy=False)
            await self._take_message(identity.bytes, parts)

    async def _take_message(self, identity: bytes, parts: list[zmq.Frame]) -> None:
        front = self._fronts.get(identity)
        if front is not None:
            front.missed = 0
        try:
            if len(parts) == 2 and not len(parts[0]):
                if front is not None and front.arriving is not None:
                    await self._take_chunk(identity, front, front.arriving, parts[1].buffer)
                return
            if len(parts) != 1:
                raise ProtocolError(f"a message of {len(parts)} parts")
            message, _ = jobs.decode_from_front(parts[0].buffer)
        except jobs.OtherVersionError as error:
            self._send(identity, jobs.VersionRefused(version=jobs.JOBS_VERSION, reason=str(error)))
            return
        except ProtocolError as error:
            logger.warning("message of front %r dropped: %s", front and front.name, error)
            return
        if isinstance(message, jobs.Beat):
            self._beat(identity, message)
        elif front is None:
            pass  # Forgotten: its next heartbeat shows it another session.
        elif isinstance(message, jobs.EncodeJob | jobs.KvJob):
            await self._begin(identity, front, message)
        elif isinstance(message, jobs.Cancel):
            await self._abort(front, set(message.jobs))
        elif isinstance(message, jobs.Reset):
            self._calls.add(call := asyncio.create_task(self._reset(identity, message)))
            call.add_done_callback(self._calls.discard)
        else:
            await self._forget(identity, "it has left")

    def _beat(self, identity: bytes, beat: jobs.Beat) -> None:
        if identity not in self._fronts:
            if len(self._fronts) >= MAX_FRONTS:
                logger.warning("front %s is not served: there are %d", beat.front, MAX_FRONTS)
                return
            self._sessions += 1
            self._fronts[identity] = _Front(beat.front, f"{self._session}-{self._sessions}")
            logger.info("front %s is here", beat.front)
            self._send_here(identity)
            held = [*self._held]
            for begin in range(0, len(held), _NEWS_ITEMS):
                items = dict.fromkeys(held[begin : begin + _NEWS_ITEMS], True)
                self._send(identity, jobs.News(news=CacheNews(entries=items)))

    async def _begin(self, identity: bytes, front: _Front, job: jobs.Job) -> None:
        front.arriving = None
        _, nbytes = jobs.offsets(job.tensors)
        if not is_proved(job, self._secret):
            reason = "its proof is wrong: is it the same secret_file at both ends?"
            self._refuse(identity, job, reason)
        elif job.job in self._owners:
            self._refuse(identity, job, "a job of this name is open")
        elif nbytes > self.config.max_queued_bytes:
            reason = f"{nbytes} bytes: at most {self.config.max_queued_bytes}"
            self._refuse(identity, job, reason)
        elif self._is_full(front, nbytes):
            retry_s = max(jobs.BEAT_S, self._load_of(None).seconds)
            self._send(identity, jobs.Full(job=job.job, retry_s=retry_s, load=self._load_of(front)))
        else:
            front.arriving = _Arriving(job, np.empty(nbytes, np.uint8))
            if not nbytes:
                await self._whole(identity, front, front.arriving)

    def _is_full(self, front: _Front, nbytes: int) -> bool:
        """Return whether a front must wait: there is enough, and it has its share of that.

        So a front without work is served next to one that sends without end. There is never more
        than twice the limit.
        """
        fronts = [each for each in self._fronts.values() if each.jobs or each.arriving]
        sharing = len(fronts) + (front not in fronts)
        arriving = [each.arriving.data.nbytes for each in fronts if each.arriving]
        count, most = self.open_jobs + len(arriving), self.config.max_queued_items
        own_bytes, most_bytes = sum(front.jobs.values()) + nbytes, self.config.max_queued_bytes
        total = sum(sum(each.jobs.values()) for each in fronts) + sum(arriving) + nbytes
        too_many = count >= most and (len(front.jobs) * sharing >= most or count >= 2 * most)
        too_large = total > most_bytes and (
            own_bytes * sharing > most_bytes or total > 2 * most_bytes
        )
        return too_many or too_large

    async def _take_chunk(
        self, identity: bytes, front: _Front, arriving: _Arriving, chunk: memoryview
    ) -> None:
        data, begin = arriving.data, arriving.filled
        if begin + len(chunk) > data.nbytes:
            front.arriving = None
            self._refuse(identity, arriving.job, "more bytes than its head")
            return
        arriving.filled = begin + len(chunk)
        data[begin : arriving.filled] = np.frombuffer(chunk, np.uint8)
        if arriving.filled == data.nbytes:
            await self._whole(identity, front, arriving)

    async def _whole(self, identity: bytes, front: _Front, arriving: _Arriving) -> None:
        front.arriving = None
        job = arriving.job
        try:
            request = self.reader.request(job, arriving.data, time.time())
        except Exception as error:
            # Any: an engine's input thread would end by it.
            if not isinstance(error, ProtocolError):
                logger.exception("job %s of front %s", job.job, front.name)
            reason = str(error) if isinstance(error, ProtocolError) else repr(error)
            self._refuse(identity, job, reason[:MAX_REASON])
            return
        self._pace.see(time.monotonic(), busy=bool(self._owners))
        self._owners[job.job] = identity
        front.jobs[job.job] = arriving.data.nbytes
        await self._client.add_request_async(request)

    async def _abort(self, front: _Front, names: Collection[str]) -> None:
        """End jobs of a front; vLLM reports nothing of those."""
        if front.arriving is not None and front.arriving.job.job in names:
            front.arriving = None
        if own := [each for each in names if each in front.jobs]:
            self._pace.see(time.monotonic(), busy=True)
            for each in own:
                del front.jobs[each], self._owners[each]
            await self._client.abort_requests_async(own)

    async def _reset(self, identity: bytes, message: jobs.Reset) -> None:
        """Let the engine use nothing that it has cached: weights have changed at a front."""
        self.reader.resets += 1
        await self._client.call_utility_async("reset_encoder_cache")
        load = self._load_of(self._fronts.get(identity))
        self._send(identity, jobs.Done(job=message.job, reason="stop", load=load))

    async def _forget(self, identity: bytes, why: str) -> None:
        front = self._fronts.pop(identity)
        if front.jobs:
            logger.warning("front %s: %s; its %d jobs end", front.name, why, len(front.jobs))
        front.arriving = None
        await self._abort(front, [*front.jobs])

    # To fronts.

    def _load_of(self, front: _Front | None) -> jobs.Load:
        """Return what others than a front have open, or what all have."""
        count = self.open_jobs
        if front is not None:
            same = (each for each in self._fronts.values() if each.name == front.name)
            count -= sum(len(each.jobs) for each in same)
        return jobs.Load(jobs=count, seconds=count * self._pace.seconds_each)

    def _send_here(self, identity: bytes) -> None:
        here = jobs.Here(
            name=self.config.instance,
            role=self.role,
            vllm=vllm.__version__,
            fingerprint=self.fingerprint,
            kv=self.kv,
            most=self.config.max_queued_items,
            well=self.well,
            load=self._load_of(self._fronts.get(identity)),
        )
        self._send(identity, here)

    def _refuse(self, identity: bytes, job: jobs.Job, reason: str) -> None:
        self._send(identity, jobs.Failed(job=job.job, reason=reason))

    def _send(self, identity: bytes, message: jobs.FromHub) -> None:
        """Send; dropped where the front does not read, or has gone."""
        front = self._fronts.get(identity)
        data = jobs.encode(message, front.session if front else self._session)
        self._socket.send_multipart([identity, data], zmq.NOBLOCK)

    # Of the engine.

    async def _pump(self) -> None:
        with contextlib.suppress(EngineDeadError):
            while True:
                for each in (await self._client.get_output_async()).outputs:
                    if not each.request_id:
                        self._pass_on(msgspec.convert(take_params(each), CacheNews))
                    elif each.finish_reason is not None:
                        self._end(each)

    def _pass_on(self, news: CacheNews) -> None:
        """Send news to every front; transfers are those of one, by their names."""
        for item, is_here in news.entries.items():
            (self._held.add if is_here else self._held.discard)(item)
        for identity in self._fronts:
            self._send(identity, jobs.News(news=news))

    def _end(self, output: Any) -> None:
        identity = self._owners.get(output.request_id)
        if identity is None:
            return  # It was cancelled.
        self._pace.see(time.monotonic(), busy=True)
        self._pace.count_end()
        del self._owners[output.request_id]
        front = self._fronts[identity]
        del front.jobs[output.request_id]
        done = jobs.Done(
            job=output.request_id,
            reason=str(output.finish_reason),
            params=take_params(output),
            kv=output.kv_transfer_params,
            load=self._load_of(front),
        )
        self._send(identity, done)

    async def _tick(self) -> None:
        """Send heartbeats; count those without a reply, of fronts and of the engine."""
        question: asyncio.Future[Any] | None = None
        while True:
            await asyncio.sleep(jobs.BEAT_S)
            self._listener.log_refusals()
            if question is None or question.done():
                self._unanswered = 0
                question = asyncio.ensure_future(
                    self._client.call_utility_async("is_scheduler_paused")
                )
            self._unanswered += 1
            self.well = self._unanswered < _RESPONDS_WITHIN_BEATS
            # Ticks, not seconds: this process may have stood still itself.
            for identity, front in [*self._fronts.items()]:
                front.missed += 1
                if front.missed > jobs.MISSED_BEATS:
                    await self._forget(identity, "no message came")
                else:
                    self._send_here(identity)

"""The engines behind the engine front: each has a client of its own, replaced when it starts again.

An engine (`epd_portable.vllm_plugin.engine_core`) connects to the front's Unix socket and says its
name. The front answers vLLM's handshake for it and makes vLLM's client, which lives as long as the
connection: what it closes by is the death of either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor

from epd_portable.config.roles import Role
from epd_portable.delivery.instances import EndpointPool, Instance, WentDownError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the launcher plans it; an `InstanceSpec`.

    Attributes:
        max_queued_items: Jobs that an encode engine takes at a time.
    """

    name: str
    role: Role
    url: str = ""
    control: str = ""
    weight: float = 1.0
    labels: dict[str, str] = {}
    max_queued_items: int = 256


class FrontEngine:
    """One engine of the plan, up or not.

    Attributes:
        instance: Its state and what is counted of it.
        index: Its label in vLLM's metrics.
        client: vLLM's client of its present life; ``None`` while it is down.
    """

    def __init__(self, settings: EngineSettings, instance: Instance, index: int) -> None:
        self.settings = settings
        self.instance = instance
        self.index = index
        self.client: Any = None

    @property
    def name(self) -> str:
        """Of its instance."""
        return self.instance.name

    @property
    def encodes_only(self) -> bool:
        """Whether it answers no requests."""
        return self.instance.duty == "encode"

    @property
    def is_full(self) -> bool:
        """Whether it has as many jobs as it takes."""
        return self.encodes_only and self.instance.load >= self.settings.max_queued_items

    async def add(self, request: EngineCoreRequest) -> None:
        """Send it a request.

        Raises:
            WentDownError: It is down, or has said that it ends.
        """
        if self.client is None:
            raise WentDownError("is down")
        try:
            await self.client.add_request_async(request)
        except EngineDeadError as error:
            raise WentDownError("has failed") from error

    async def abort(self, client: Any, request_id: str) -> None:
        """End a request that was sent to it, if it is still in the life that `client` is of."""
        if client is not None and client is self.client:
            await client.abort_requests_async([request_id])

    async def responds(self, timeout_s: float) -> bool:
        """Return whether its loop takes calls."""
        if self.client is None:
            return False
        with contextlib.suppress(TimeoutError, EngineDeadError):
            call = self.client.call_utility_async("is_scheduler_paused")
            await asyncio.wait_for(call, timeout_s)
            return True
        return False


class Engines:
    """Waits for engines, and follows each through its lives.

    Args:
        settings: Of each engine.
        path: Unix socket to which engines connect; others are made beside it.
        config: Of the front; the first prefill+decode engine completes it.
        outputs: Takes what an engine puts out.

    Attributes:
        pool: The engines as instances, to choose from.
    """

    def __init__(
        self,
        settings: list[EngineSettings],
        path: Path,
        config: VllmConfig,
        outputs: Callable[[FrontEngine, EngineCoreOutputs], None],
    ) -> None:
        self.pool = EndpointPool()
        self.by_name = {
            each.name: FrontEngine(each, self.pool.add(each), index)
            for index, each in enumerate(settings)
        }
        self._path = path
        self._config = config
        self._complete = False
        self._outputs = outputs
        self._numbers = itertools.count()
        self._lives: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Take engines in from now on."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._life, self._path)

    async def one_up(self) -> None:
        """Return when an engine is up that answers requests."""
        waits = [asyncio.create_task(each.wait_up()) for each in self.pool.of_duty("answer")]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    def close(self) -> None:
        """Let every engine end; from any thread, once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._server.close()
        for each in self._lives:
            each.cancel()

    async def _life(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)
        name = (await reader.readline()).decode().strip()
        engine = self.by_name.get(name)
        if engine is None:
            logger.warning("an engine of the unknown name %r is sent away", name)
            writer.close()
            return
        place = f"ipc://{self._path}-{name}-{next(self._numbers)}"
        gone = asyncio.create_task(reader.read())
        meeting = asyncio.create_task(self._meet(engine, place, writer))
        try:
            await asyncio.wait({gone, meeting}, return_when=asyncio.FIRST_COMPLETED)
            if meeting.done():
                await self._serve(engine, meeting.result(), gone)
        finally:
            meeting.cancel()
            gone.cancel()
            writer.close()

    async def _meet(self, engine: FrontEngine, place: str, writer: Any) -> AsyncMPClient:
        """Answer vLLM's handshake; return a client when the engine is ready."""
        address = EngineZmqAddresses(inputs=[f"{place}-in"], outputs=[f"{place}-out"])
        welcome = EngineHandshakeMetadata(addresses=address, parallel_config={})
        with self._context.socket(zmq.ROUTER) as handshake:
            handshake.bind(place)
            writer.write(f"{place}\n".encode())
            identity, _ = await handshake.recv_multipart()  # hello
            await handshake.send_multipart([identity, msgspec.msgpack.encode(welcome)])
            await handshake.recv_multipart()  # ready
        config = self._config
        if self._complete or engine.encodes_only:
            # vLLM's client adds up what its engines say.
            config = copy.copy(config)
            config.cache_config = copy.copy(config.cache_config)
        else:
            self._complete = True
        addresses = {"input_address": address.inputs[0], "output_address": address.outputs[0]}
        return await asyncio.to_thread(
            AsyncMPClient, config, Executor.get_class(config), True, addresses
        )

    async def _serve(
        self, engine: FrontEngine, client: AsyncMPClient, gone: asyncio.Task[bytes]
    ) -> None:
        if engine.client is not None:
            engine.instance.seen_gone("its process was started again")
        engine.client = client
        engine.instance.seen_well()
        pump = asyncio.create_task(self._pump(engine, client))
        try:
            await gone
        finally:
            pump.cancel()
            client.shutdown()
            if engine.client is client:
                engine.client = None
                engine.instance.seen_gone("its process has ended")

    async def _pump(self, engine: FrontEngine, client: AsyncMPClient) -> None:
        # What an engine says last is that it is dead: the connection tells that, too.
        with contextlib.suppress(EngineDeadError):
            while True:
                self._outputs(engine, await client.get_output_async())

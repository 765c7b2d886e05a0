"""The front: ``python -m epd_portable.front.server --settings JSON ARGUMENTS``.

vLLM's own OpenAI server over `SplitClient`: what a request needs of tokenizing and preprocessing is
done once, here. ``ARGUMENTS`` are those of vLLM's server and of the prefill+decode engines. Several
API servers are processes that are forked from one that only waits, and listen on one socket.
"""

from __future__ import annotations

from epd_portable.vllm_plugin import imports

# isort: split

import argparse
import asyncio
import inspect
import logging
import multiprocessing
import secrets
import signal
import socket
import sys
from collections.abc import MutableSequence
from multiprocessing.connection import wait
from typing import Any

import uvloop
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.parse import parse_mm_uuids
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from epd_portable.front import connections
from epd_portable.front.client import FrontSettings, SplitClient
from epd_portable.front.exchange import current
from epd_portable.front.request import StoppedError
from epd_portable.front.warm_up import WarmUp
from epd_portable.vllm_plugin import compat, exposition

logger = logging.getLogger(__name__)
build_and_serve, setup_server = compat.server()

_END_WITHIN_S = 5.0
"""After one of several API servers has ended."""
_NOT_ACCEPTING = 2**31 - 1
"""More connections than any server has, to vLLM."""


class Front(compat.passing_errors(AsyncLLM)):  # type: ignore[misc]
    """vLLM's engine over a `SplitClient`.

    Attributes:
        own_items: Beginning of the names that the front gives items itself; clients cannot know it.
    """

    engine_core: SplitClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine_core.fail = self._fail
        if (tokenizer := self.tokenizer) is not None:
            self.engine_core.words = lambda text: tokenizer.encode(text, add_special_tokens=False)
        process = self.renderer._process_mm_uuids
        self.own_items = secrets.token_hex(16)

        def process_uuids(data: Any, items: Any, uuids: Any, *args: Any, **kwargs: Any) -> Any:
            given = [str(name) for names in uuids.values() for name in names]
            if not all(name.startswith(self.own_items) for name in given):
                # A client's name for an item could be that of another client's image.
                uuids = parse_mm_uuids(None)
            return process(data, items, uuids, *args, **kwargs)

        self.renderer._process_mm_uuids = process_uuids

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Add a request; 503 if the front was stopped while it was rendered (vLLM: 500)."""
        try:
            return await super().add_request(*args, **kwargs)
        except EngineDeadError:
            if not self.engine_core.is_draining:
                raise  # vLLM's output handler has failed: vLLM ends the server.
            error = StoppedError()
            current().refuse(error)
            raise error from None

    def shutdown(self, timeout: float | None = None) -> None:
        """Let open requests end, and then all that they need: vLLM ends its renderer first."""
        if client := getattr(self, "engine_core", None):
            client.drain(timeout)
        super().shutdown()

    def _fail(self, request_id: str, error: BaseException) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None:
            if state.queue is not None and isinstance(error, Exception):
                state.queue.put(error)
            # With it its siblings, where several choices were requested: theirs are not read.
            whole = state.parent_req.request_id if state.parent_req else request_id
            ended = self.output_processor.abort_requests((whole,), internal=True)
            self.engine_core.give_up(each for each in ended if each != request_id)


def configuration(arguments: AsyncEngineArgs, index: int = 0, count: int = 1) -> VllmConfig:
    """Return the configuration of one of a front's API servers with vLLM's arguments."""
    # As for several servers of one engine, also of one: vLLM's cache of processed items is then
    # whole here, and mirrors no engine's.
    arguments._api_process_count = max(2, count)
    arguments._api_process_rank = index
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if (media := config.model_config.multimodal_config) is not None:
        # Engines take items without their media, by name: clients must not name those of others.
        media.enable_mm_embeds = media.allow_missing_mm_embeddings = False
    return config


async def serve(
    settings: FrontSettings,
    args: argparse.Namespace,
    address: str,
    sock: socket.socket,
    index: int,
    loads: MutableSequence[int],
) -> None:
    """Serve until a signal ends it.

    Args:
        address: Of ``sock``, for the log.
        sock: Where all API servers of the front listen.
        loads: Open connections of each, for the next one to go to the least loaded.
    """
    count = len(loads)
    config = configuration(AsyncEngineArgs.from_cli_args(args), index, count)
    client = SplitClient(config, settings, index)
    await client.engines.listen()
    loop = asyncio.get_running_loop()

    def when_up(*_: Any, renderer: Any = None, **__: Any) -> SplitClient:
        if renderer is not None:
            renderer.start_mm_warmup_in_background()
        asyncio.run_coroutine_threadsafe(client.engines.one_up(), loop).result()
        return client

    EngineCoreClient.make_async_mp_client = staticmethod(when_up)
    front = await asyncio.to_thread(
        Front.from_vllm_config,
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=args.enable_log_requests,
        disable_log_stats=args.disable_log_stats,
        client_count=count,
        client_index=index,
    )
    shares = count > 1 and "peer_loads" in inspect.signature(build_and_serve).parameters
    more: dict[str, Any] = {"peer_loads": (loads, index)} if shares else {}
    try:
        await front.reset_mm_cache()
        await WarmUp(front, client).start()
        ended = await build_and_serve(front, address, sock, args, **more)
    finally:
        front.shutdown()
    try:
        await ended
    finally:
        sock.close()


def _serve_all(settings: FrontSettings, *given: Any) -> int:
    """Serve with several processes until a signal, or the end of one, ends all; return the status.

    As vLLM's: engines get their clients when they start, so none can be replaced.
    """
    exposition.publish()
    fork, count = multiprocessing.get_context("fork"), len(settings.sockets)
    loads = fork.RawArray("i", [_NOT_ACCEPTING] * count)
    servers = [
        fork.Process(
            target=_serve_one, args=(settings, *given, index, loads), name=f"ApiServer_{index}"
        )
        for index in range(count)
    ]
    for each in servers:
        each.start()
    asked = False

    def stop(*_: Any) -> None:
        nonlocal asked
        asked = True
        for each in servers:
            each.terminate()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    wait([each.sentinel for each in servers])
    failed = not asked
    if failed:
        logger.error("an API server has ended: all do")
        stop()
        for each in servers:
            each.join(_END_WITHIN_S)
            each.kill()
    for each in servers:
        each.join()
    return int(failed)


def _serve_one(*given: Any) -> None:
    uvloop.run(serve(*given))


def main() -> None:
    """Run the front in this process."""
    arguments, startup = compat.server_commands()
    imports.done()
    startup.cli_env_setup()
    connections.install()
    _, _, found, *argv = sys.argv
    settings = FrontSettings.read(found)
    args = arguments.make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    arguments.validate_parsed_serve_args(args)
    address, sock = setup_server(args)
    if len(settings.sockets) > 1:
        sys.exit(_serve_all(settings, args, address, sock))
    _serve_one(settings, args, address, sock, 0, [0])


if __name__ == "__main__":
    main()

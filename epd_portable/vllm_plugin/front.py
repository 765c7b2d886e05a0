"""The engine front: ``python -m epd_portable.vllm_plugin.front --settings JSON ARGUMENTS``.

vLLM's own OpenAI server over `SplitClient`: what a request needs of tokenizing and preprocessing is
done once, here. ``ARGUMENTS`` are those of vLLM's server and of the prefill+decode engines.
"""

from __future__ import annotations

from epd_portable.vllm_plugin import imports

# isort: split

import argparse
import asyncio
import sys
from typing import Any

import msgspec
import uvloop
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.multimodal.parse import parse_mm_uuids
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from epd_portable.vllm_plugin import compat
from epd_portable.vllm_plugin.front_client import FrontSettings, SplitClient


class Front(AsyncLLM):
    """vLLM's engine over a `SplitClient`."""

    engine_core: SplitClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine_core.fail = self._fail
        process = self.renderer._process_mm_uuids
        # A client's name for an item could be that of another client's picture.
        self.renderer._process_mm_uuids = lambda data, items, uuids, request: process(
            data, items, parse_mm_uuids(None), request
        )

    async def _add_request(self, request: Any, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    def _fail(self, request_id: str, error: Exception) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None:
            if state.queue is not None:
                state.queue.put(error)
            self.output_processor.abort_requests((request_id,), internal=True)


def configuration(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return the configuration of a front with vLLM's arguments."""
    # As for several servers of one engine: vLLM's cache of processed items is then whole here, and
    # mirrors no engine's.
    arguments._api_process_count = 2
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if (media := config.model_config.multimodal_config) is not None:
        # Engines take items without their media, by name: clients must not name those of others.
        media.enable_mm_embeds = media.allow_missing_mm_embeddings = False
    return config


async def serve(settings: FrontSettings, args: argparse.Namespace) -> None:
    """Serve until a signal ends it."""
    address, sock = setup_server(args, reuse_port=False)
    config = configuration(AsyncEngineArgs.from_cli_args(args))
    client = SplitClient(config, settings)
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
    )
    try:
        await front.reset_mm_cache()
        ended = await build_and_serve(front, address, sock, args)
    finally:
        front.shutdown()
    try:
        await ended
    finally:
        sock.close()


def main() -> None:
    """Run the front in this process."""
    arguments, startup = compat.server_commands()
    imports.done()
    startup.cli_env_setup()
    _, _, settings, *argv = sys.argv
    args = arguments.make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    arguments.validate_parsed_serve_args(args)
    uvloop.run(serve(msgspec.json.decode(settings, type=FrontSettings), args))


if __name__ == "__main__":
    main()

"""A stop of the front, over a played engine: what is open ends, and nothing new is taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from epd_portable.errors import RequestError
from epd_portable.front.client import SplitClient
from epd_portable.front.exchange import FrontExchange, GracefulHTTPError, exchange
from epd_portable.front.server import Front
from tests.integration.front.played_front import Engine
from tests.waiting import until_async

TEXT: Any = {"prompt_token_ids": [1, 2, 3]}


async def ask(front: Front, name: str) -> str | None:
    """Return the finish reason of a request."""
    reason = None
    async for output in front.generate(TEXT, SamplingParams(max_tokens=2), name):
        reason = output.outputs[0].finish_reason
    return reason


async def test_new_request_during_a_stop_gets_503_and_open_ones_end(
    client: SplitClient, front: Front
) -> None:
    engine, open_at_close = Engine(client, "pd-0"), []
    engine.may_end.clear()
    client.engines.close = lambda: open_at_close.append(len(client._open))
    asked = asyncio.create_task(ask(front, "open"))
    await until_async(lambda: engine.sent)
    stopping = asyncio.create_task(asyncio.to_thread(front.shutdown, 60))
    await until_async(lambda: client.is_draining)
    with pytest.raises(GracefulHTTPError, match="this server is being stopped"):
        await ask(front, "new")
    # vLLM had registered it, and its siblings.
    assert len(front.output_processor.request_states) == 1
    # vLLM renders prompts in a thread, which it ends at a stop.
    renderer = front.renderer
    await renderer.tokenize_prompts_async([{"prompt": "a"}], renderer.default_cmpl_tok_params)
    engine.may_end.set()
    assert await asked == "stop"
    await stopping
    assert {*open_at_close} == {0}


async def test_request_rendered_during_a_stop_gets_503(client: SplitClient, front: Front) -> None:
    one = FrontExchange()
    exchange.set(one)
    await asyncio.to_thread(front.shutdown)
    with pytest.raises(GracefulHTTPError, match="this server is being stopped"):
        await ask(front, "rendered")
    assert isinstance(one.failure, RequestError)
    assert one.failure.status == 503


async def test_failed_output_handler_is_no_stop(client: SplitClient, front: Front) -> None:
    """vLLM then ends its server."""
    Engine(client, "pd-0")

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a fault of vLLM's output processor")

    front.output_processor.process_outputs = fail
    with pytest.raises(EngineGenerateError):
        await ask(front, "first")
    with pytest.raises(EngineDeadError):
        await ask(front, "second")


@pytest.mark.parametrize(
    ("begun", "end"),
    [
        ("", "no engine that generates is up: try again"),
        ("generated", "its process has ended: try again"),
        ("sent", "error"),
    ],
)
async def test_request_beyond_the_grace_of_a_stop_ends_with_an_error(
    client: SplitClient, front: Front, begun: str, end: str
) -> None:
    exchange.set(FrontExchange(begun=begun == "sent"))
    engine = Engine(client, "pd-0")
    engine.may_end.clear()
    loop, instance = asyncio.get_running_loop(), client.engines.by_name["pd-0"].instance

    def close() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(instance.seen_gone, "its process has ended")

    client.engines.close = close
    asked = asyncio.create_task(ask(front, "open"))
    await until_async(lambda: engine.sent)
    if begun:
        engine.says(engine.sent[0].request_id, None)
    stopping = asyncio.create_task(asyncio.to_thread(front.shutdown, 0.1))
    async with asyncio.timeout(30):
        if begun == "sent":
            assert await asked == end
        else:
            with pytest.raises(GracefulHTTPError, match=end):
                await asked
    await stopping

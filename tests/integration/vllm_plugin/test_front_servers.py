"""Two API servers of one front over the sockets of one engine, which speaks as vLLM's does."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from epd_portable.vllm_plugin import engine_core
from epd_portable.vllm_plugin.front_client import SplitClient
from epd_portable.wire.params import CacheNews, to_params
from tests.integration.vllm_plugin.played_front import client_of, config_of_front, request

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.timeout(120),
    # vLLM's client leaves its context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

IDENTITY = (0).to_bytes(2, "little")


class Engine:
    """Meets every server as `engine_core` does, and answers each request with one token."""

    def __init__(self, paths: list[str], name: str) -> None:
        self.asked: list[tuple[int, str]] = []
        self.fronts = [engine_core._connect(path) for path in paths]
        self._places = [engine_core._meet(front, name) for front in self.fronts]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        for front in self.fronts:
            front.close()

    def _run(self) -> None:
        address = f"{self._places[0]}-handshake"
        given = (address, self._places, self.fronts)
        shaking = threading.Thread(target=engine_core._shake_hands, args=given)
        shaking.start()
        with zmq.Context() as context:
            with context.socket(zmq.DEALER) as handshake:
                handshake.connect(address)
                addresses = EngineCoreProc.startup_handshake(handshake, True, False)
                handshake.send(b"ready")
                shaking.join()
            inputs, outputs = [], []
            for each in addresses.inputs:
                inputs.append(context.socket(zmq.DEALER))
                inputs[-1].setsockopt(zmq.IDENTITY, IDENTITY)
                inputs[-1].connect(each)
                inputs[-1].send(b"")
            for each in addresses.outputs:
                outputs.append(context.socket(zmq.PUSH))
                outputs[-1].connect(each)
            while not self._end.is_set():
                for index, each in enumerate(inputs):
                    if each.poll(10):
                        self._take(index, each.recv_multipart(), outputs)
            for each in (*inputs, *outputs):
                each.close(0)

    def _take(self, index: int, frames: list[bytes], outputs: list[zmq.Socket[bytes]]) -> None:
        kind, *data = frames
        if kind != EngineCoreRequestType.ADD.value:
            return
        core = MsgpackDecoder(EngineCoreRequest).decode(data)
        assert core.client_index == index
        self.asked.append((core.client_index, core.request_id))
        end = EngineCoreOutput(core.request_id, [index], finish_reason=FinishReason.STOP)
        news = to_params(CacheNews(entries={core.request_id: True}))
        told = EngineCoreOutput("", [], ec_transfer_params=news)
        parts = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[told, end]))
        outputs[core.client_index].send_multipart(parts)


Story = Callable[[list[SplitClient], Callable[[str], Engine]], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[Story], None]]:
    engines: list[Engine] = []
    sockets = [str(tmp_path / f"front-{index}") for index in range(2)]

    def start(name: str) -> Engine:
        engines.append(Engine(sockets, name))
        return engines[-1]

    async def told(story: Story) -> None:
        servers = [
            client_of(config_of_front(), tmp_path, "e-0", "pd-0", sockets=sockets, index=index)
            for index in range(2)
        ]
        for each in servers:
            await each.engines.listen()
        try:
            async with asyncio.timeout(60):
                await story(servers, start)
        finally:
            for each in servers:
                each.shutdown()
            for engine in engines:
                await asyncio.to_thread(engine.end)

    yield lambda story: asyncio.run(told(story))
    gc.collect()


async def up(servers: list[SplitClient], name: str) -> None:
    for each in servers:
        await each.engines.by_name[name].instance.wait_up()


def test_each_server_gets_the_answers_of_its_own_requests(run: Any) -> None:
    async def story(servers: list[SplitClient], start: Callable[[str], Engine]) -> None:
        engine = await asyncio.to_thread(start, "pd-0")
        await up(servers, "pd-0")
        for index, each in enumerate(servers):
            await each.add_request_async(request(f"r-{index}", ""))
        for index, each in enumerate(servers):
            (answer,) = (await each.get_output_async()).outputs
            assert (answer.request_id, answer.new_token_ids) == (f"r-{index}", [index])
            assert each.engines.by_name["pd-0"].holds == {f"r-{index}"}
        assert sorted(engine.asked) == [(0, "r-0"), (1, "r-1")]

    run(story)


def test_what_one_server_is_told_of_an_engine_holds_at_each(run: Any) -> None:
    async def story(servers: list[SplitClient], start: Callable[[str], Engine]) -> None:
        await asyncio.to_thread(start, "pd-0")
        await up(servers, "pd-0")
        first, second = (each.engines for each in servers)
        with second.by_name["pd-0"].instance.working():
            *_, pd = await first.seen("drain", "pd-0")
            assert (pd["state"], pd["in_flight"], pd["idle"]) == ("draining", 1, False)
            assert not second.pool.any_usable("answer")
        *_, pd = await first.seen()
        assert (pd["in_flight"], pd["idle"]) == (0, True)
        *_, pd = await second.seen("resume", "pd-0")
        assert pd["state"] == "up"
        assert first.pool.any_usable("answer") and second.pool.any_usable("answer")

    run(story)


def test_an_engine_that_ends_is_gone_for_each_and_comes_back_to_each(run: Any) -> None:
    async def story(servers: list[SplitClient], start: Callable[[str], Engine]) -> None:
        for _ in range(2):
            engine = await asyncio.to_thread(start, "pd-0")
            await up(servers, "pd-0")
            await asyncio.to_thread(engine.end)
            for each in servers:
                await each.engines.by_name["pd-0"].instance.wait_down()

    run(story)


def test_an_engine_whose_outputs_cannot_be_taken_is_sent_away_and_the_log_says_why(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a fault of the front")

    async def story(servers: list[SplitClient], start: Callable[[str], Engine]) -> None:
        engine = await asyncio.to_thread(start, "pd-0")
        await up(servers, "pd-0")
        instance = servers[0].engines.by_name["pd-0"].instance
        servers[0]._take_output = fail  # type: ignore[method-assign]
        await servers[0].add_request_async(request("r", ""))
        await instance.wait_down()
        assert await asyncio.to_thread(engine.fronts[0].recv, 1) == b""

    run(story)
    (found,) = (each for each in caplog.records if each.message == "an engine is sent away")
    assert found.exc_info and "a fault of the front" in repr(found.exc_info[1])


def test_a_server_that_is_away_makes_the_engines_unknown(run: Any) -> None:
    async def story(servers: list[SplitClient], start: Callable[[str], Engine]) -> None:
        servers[1].engines._server.close()
        with pytest.raises(OSError):
            await servers[0].engines.seen()
        async with await asyncio.start_unix_server(
            lambda _, writer: writer.close(), servers[1].settings.sockets[1]
        ):
            with pytest.raises(OSError):
                await servers[0].engines.seen()

    run(story)

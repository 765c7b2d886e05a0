"""Two API servers of one front over the sockets of one engine, which speaks as vLLM's does."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry, values
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from epd_portable.engine import core
from epd_portable.errors import RequestError
from epd_portable.front import engines as engines_module
from epd_portable.front.client import SplitClient
from epd_portable.front.http import FrontMiddleware
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import CacheNews, to_params
from tests.integration.front.played_front import (
    client_of,
    config_of_front,
    http_to,
    request,
    within,
)
from tests.metrics_page import total
from tests.waiting import until_async

pytestmark = [
    pytest.mark.timeout(120),
    # vLLM's client leaves its context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

IDENTITY = (0).to_bytes(2, "little")


async def went_down(client: SplitClient, name: str) -> None:
    """Return as soon as an engine is down."""
    down = asyncio.Event()
    with client.engines.by_name[name].instance.retained() as use:
        use.on_down(down.set)
        await down.wait()


class Engine:
    """Meets every server as `engine_core` does, and answers each request with one token."""

    def __init__(self, paths: list[str], name: str, fingerprint: str = "") -> None:
        self.asked: list[tuple[int, str]] = []
        self.fronts = [core._connect(path) for path in paths]
        self._places = [core._meet(front, name) for front in self.fronts]
        self._fingerprint = fingerprint
        self._end, self._failed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def fail(self) -> None:
        """Report a failure, as vLLM's engine does some time before its process ends."""
        self._failed.set()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        for front in self.fronts:
            front.close()

    def _run(self) -> None:
        address = f"{self._places[0]}-handshake"
        given = (address, self._places, self.fronts, self._fingerprint)
        shaking = threading.Thread(target=core._shake_hands, args=given)
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
                if self._failed.is_set():
                    for each in outputs:
                        each.send(EngineCoreProc.ENGINE_CORE_DEAD)
                    self._failed.clear()
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
        told = EngineCoreOutput("", [])
        put_params(told, news)
        parts = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[told, end]))
        outputs[core.client_index].send_multipart(parts)


@dataclass(frozen=True)
class Front:
    """Two servers, which listen, and the engines that were started at them."""

    servers: list[SplitClient]
    engines: list[Engine]

    async def start(self, name: str = "pd-0", fingerprint: str = "") -> Engine:
        """Start an engine; return when both know of it."""
        sockets = self.servers[0].settings.sockets
        self.engines.append(await asyncio.to_thread(Engine, sockets, name, fingerprint))
        for each in self.servers:
            await each.engines.by_name[name].instance.health.wait_up()
        return self.engines[-1]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    sockets = [str(tmp_path / f"front-{index}") for index in range(2)]
    servers = [
        client_of(config_of_front(), tmp_path, "e-0", "pd-0", sockets=sockets, index=index)
        for index in range(2)
    ]
    for each in servers:
        await each.engines.listen()
    made = Front(servers, [])
    yield made
    for each in servers:
        each.shutdown()
    for engine in made.engines:
        await asyncio.to_thread(engine.end)
    gc.collect()


async def test_each_server_gets_the_answers_of_its_own_requests(front: Front) -> None:
    engine = await front.start()
    for index, each in enumerate(front.servers):
        await each.add_request_async(request(f"r-{index}", ""))
    for index, each in enumerate(front.servers):
        (answer,) = (await each.get_output_async()).outputs
        assert (answer.request_id, answer.new_token_ids) == (f"r-{index}", [index])
        assert each.engines.by_name["pd-0"].holds == {f"r-{index}"}
    assert sorted(engine.asked) == [(0, "r-0"), (1, "r-1")]


async def test_engine_whose_items_are_refused_says_why_at_start(front: Front) -> None:
    await front.start("pd-0", "dtype=bfloat16 processor=a")
    encoder = await front.start("e-0", "dtype=float16 processor=a")
    e, pd = await front.servers[0].engines.seen()
    assert e["problem"] == (
        "pd-0 refuses its items, which differ in the dtype (--dtype): float16 at the sender, "
        "bfloat16 at the receiver"
    )
    assert pd["problem"] == ""
    await asyncio.to_thread(encoder.end)
    front.engines.remove(encoder)
    for each in front.servers:
        await went_down(each, "e-0")
    await front.start("e-0", "dtype=bfloat16 processor=a")
    assert [each["problem"] for each in await front.servers[0].engines.seen()] == ["", ""]


async def test_engine_report_reaches_every_api_server(front: Front) -> None:
    await front.start()
    first, second = (each.engines for each in front.servers)
    with second.by_name["pd-0"].instance.in_flight():
        *_, pd = await first.seen("drain", "pd-0")
        assert (pd["state"], pd["in_flight"], pd["idle"]) == ("draining", 1, False)
        assert not second.pool.usable("decode")
    *_, pd = await first.seen()
    assert (pd["in_flight"], pd["idle"]) == (0, True)
    *_, pd = await second.seen("resume", "pd-0")
    assert pd["state"] == "up"
    assert first.pool.usable("decode") and second.pool.usable("decode")


async def test_config_is_completed_by_the_first_generating_engine_only(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    make = engines_module.EngineClient

    def noted(config: Any, *args: Any, **options: Any) -> Any:
        given.append(config)
        return make(config, *args, **options)

    monkeypatch.setattr(engines_module, "EngineClient", noted)
    own, found = [each.vllm_config for each in front.servers], []
    for name in ("e-0", "pd-0", "pd-0"):
        engine = await front.start(name)
        found.append(sum(config is each for config in given for each in own))
        given.clear()
        await asyncio.to_thread(engine.end)
        for each in front.servers:
            await went_down(each, name)
    assert found == [0, len(own), 0]


@contextmanager
def descriptors_without_collector() -> Iterator[Callable[[], int]]:
    """Yield a count of open descriptors; what is closed is closed by the code, not by `gc`."""
    gc.collect()
    gc.disable()
    try:
        yield lambda: len(os.listdir("/proc/self/fd"))
    finally:
        gc.enable()


async def test_engine_that_ends_before_it_is_met_leaves_no_descriptor(
    front: Front, tmp_path: Path
) -> None:
    paths = [str(tmp_path / f"front-{number}") for number in range(len(front.servers))]
    with descriptors_without_collector() as count:
        before = count()
        engine = [await asyncio.to_thread(core._connect, path) for path in paths]
        for each in engine:
            await asyncio.to_thread(core._meet, each, "pd-0")
            each.sendall(b"ready - \n")
        # vLLM's client waits for the engine.
        await until_async(lambda: count() > before + len(engine))
        for each in engine:
            each.close()
        await until_async(lambda: count() <= before)


async def test_failing_client_of_an_ended_engine_blocks_nothing(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, failed = threading.Event(), threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        ended.wait(60)
        time.sleep(0.2)  # Until the front has seen the end, and has sent what nothing reads.
        failed.set()
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr("epd_portable.front.engines.EngineClient", fail)
        engine = await asyncio.to_thread(core._connect, str(tmp_path / "front-0"))
        await asyncio.to_thread(core._meet, engine, "pd-0")
        engine.sendall(b"ready - \n")
        await asyncio.sleep(0.1)
        engine.close()
        ended.set()
        await asyncio.to_thread(failed.wait, 60)
    await front.start()  # Its server goes on.


@pytest.mark.parametrize("fails", [False, True])
async def test_engine_that_ends_leaves_no_descriptor_or_file(
    front: Front, tmp_path: Path, fails: bool
) -> None:
    files = {*tmp_path.iterdir()}
    with descriptors_without_collector() as count:
        before = count()
        engine = await front.start()
        assert {*tmp_path.iterdir()} > files
        # As the traceback of an error does.
        held = [each.engines.by_name["pd-0"].client for each in front.servers]
        if fails:
            engine.fail()
            for each in front.servers:
                await went_down(each, "pd-0")
        await asyncio.to_thread(engine.end)
        del engine
        await until_async(lambda: count() <= before)
    assert all(held)
    await until_async(lambda: {*tmp_path.iterdir()} == files)


async def test_sockets_of_an_ended_engine_are_closed_later(front: Front) -> None:
    """ZMQ must have taken in the end of the connection."""
    engine = await front.start()
    clients = [each.engines.by_name["pd-0"].client for each in front.servers]
    await asyncio.to_thread(engine.end)
    for each, client in zip(front.servers, clients, strict=True):
        await went_down(each, "pd-0")
        assert client.resources.engine_dead
        assert not client.input_socket.closed
    await until_async(lambda: all(each.input_socket.closed for each in clients))


async def test_context_that_does_not_end_blocks_nothing(front: Front) -> None:
    engine = await front.start()
    client = front.servers[0].engines.by_name["pd-0"].client
    with client.resources.ctx.socket(zmq.PAIR):  # An end waits for it.
        await asyncio.to_thread(engine.end)
        await until_async(lambda: client.input_socket.closed)
        engine = await front.start()
    await asyncio.to_thread(engine.end)


async def test_socket_files_of_a_killed_front_are_removed_at_start(tmp_path: Path) -> None:
    left = tmp_path / "front-0-pd-0-7-in"
    left.touch()
    sockets = [str(tmp_path / "front-0")]
    server = client_of(config_of_front(), tmp_path, "pd-0", sockets=sockets)
    await server.engines.listen()
    assert not left.exists()
    server.shutdown()


async def test_the_page_of_one_server_adds_up_what_all_see(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    values.MultiProcessValue()("counter", "a_total", "a_total", (), (), "").inc(2)
    first, second = (each.engines.by_name["e-0"].instance for each in front.servers)
    with first.in_flight(), second.in_flight(), second.in_flight():
        page = (await front.servers[0].engines.page()).decode()
    assert [total(page, each) for each in ("epd_front_instance_in_flight", "a_total")] == [3, 2]


async def test_engine_with_invalid_outputs_is_rejected_and_logged(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a fault of the front")

    engine = await front.start()
    front.servers[0]._take_output = fail
    await front.servers[0].add_request_async(request("r", ""))
    await went_down(front.servers[0], "pd-0")
    assert await asyncio.to_thread(engine.fronts[0].recv, 1) == b""
    (found,) = (each for each in caplog.records if each.message == "an engine is sent away")
    assert found.exc_info and "a fault of the front" in repr(found.exc_info[1])


async def test_a_server_that_is_away_makes_the_engines_unknown(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.servers[1].engines._server.close()
    with pytest.raises(RequestError, match="starts, or has ended"):
        await front.servers[0].engines.seen()

    parts = [b"", b'[[{"name":']

    def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(parts.pop())
        writer.close()

    while parts:
        async with await asyncio.start_unix_server(end, front.servers[1].settings.sockets[1]):
            with pytest.raises(RequestError, match="starts, or has ended"):
                await front.servers[0].engines.seen()
    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    app = within(FrontMiddleware(lambda *_: pytest.fail("vLLM's")), front.servers[0])
    sign = front.servers[0].secret.sign
    async with http_to(app) as http:
        for path in ("/health", "/metrics", "/epd/instances"):
            headers = {"authorization": sign("GET", path, b"")}
            assert (await http.get(path, headers=headers)).status_code == 503

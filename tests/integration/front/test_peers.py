"""Engines of other machines: a front's client over real hubs, whose engines the tests play."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx
import msgspec
import torch
import zmq
import zmq.asyncio
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.engine import hub as hub_module
from epd_portable.engine.hub import Hub
from epd_portable.front import peers as peers_module
from epd_portable.front.client import SplitClient
from epd_portable.front.engines import EngineSettings
from epd_portable.front.request import GracefulHTTPError
from epd_portable.transfer.curve import CurveGate, read_keys, secure_client
from epd_portable.vllm_plugin.job_items import ItemReader, encode_request, to_job
from epd_portable.wire import jobs
from epd_portable.wire.params import EncodeTransfer
from tests.integration.front.played_front import Played, client_of, settle
from tests.integration.front.test_front_http import server_of

pytestmark = [pytest.mark.needs_vllm, pytest.mark.timeout(120)]

BEAT_S = 0.05
WITHIN_S = 20.0
CONSUMER = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module")
def reader(config: Any) -> ItemReader:
    return ItemReader(config)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hub_module, peers_module):
        monkeypatch.setattr(module, "BEAT_S", BEAT_S)
    monkeypatch.setattr(peers_module, "_FIRST_BEAT_S", BEAT_S)


class Core(Played):
    """The engine below a hub: holds jobs until the test ends them."""

    def __init__(self) -> None:
        super().__init__("e")
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    def end(self, job: str, reason: FinishReason = FinishReason.STOP) -> None:
        ended = EngineCoreOutput(job, [], finish_reason=reason)
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[ended]))

    def open(self) -> list[str]:
        return [each for each in self.requests if each not in self.aborted]


class Elsewhere:
    """An engine on another machine: a real hub over a played engine."""

    def __init__(self, folder: Path, reader: ItemReader, port: int = 0, **settings: Any) -> None:
        self.secret_file = str(folder / "secret")
        instance = InstanceConfig(
            instance="e-far", platform="cpu", secret_file=self.secret_file, **settings
        )
        self.port = port or free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.hub = Hub(self.url, instance, "encode", "", reader)
        self.core = Core()
        self._task = asyncio.create_task(self.hub.serve(self.core))

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(name="e-far", role="encode", url=self.url)

    async def die(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Begin = Callable[..., Elsewhere]


@pytest.fixture
async def elsewhere(tmp_path: Path, reader: ItemReader) -> AsyncIterator[Begin]:
    """Return what starts an engine elsewhere; all end with the test."""
    begun: list[Elsewhere] = []

    def begin(**settings: Any) -> Elsewhere:
        begun.append(Elsewhere(tmp_path, reader, **settings))
        return begun[-1]

    yield begin
    for each in begun:
        await each.die()


@pytest.fixture
def front(config: Any, tmp_path: Path) -> Iterator[Callable[..., SplitClient]]:
    """Return what makes a front with one engine that answers."""
    made: list[SplitClient] = []

    def make(index: int = 0, **settings: Any) -> SplitClient:
        client = client_of(config, tmp_path, "pd-0", index=index, **settings)
        engine = client.engines.by_name["pd-0"]
        engine.client = Played("pd-0")
        engine.instance.health.seen_up()
        made.append(client)
        return client

    yield make
    for each in made:
        for task in each.engines._lives:
            task.cancel()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


def image(name: str, side: int = 8, still: bool = True) -> MultiModalFeatureSpec:
    """Return an image as the bundled model's processor makes it; a side has patches."""
    frames = torch.randint(0, 255, (side * side, 3, 1 if still else 2, 196), dtype=torch.uint8)
    pixels = frames.expand(-1, 3, 2, 196).reshape(side * side, 1176).contiguous()
    data = MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(
                pixels, MultiModalFlatField(slices=[slice(0, side * side)])
            ),
            "image_grid_thw": MultiModalFieldElem(
                torch.tensor([1, side, side]), MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )
    place = PlaceholderRange(0, side * side // 4)
    return MultiModalFeatureSpec(data, "image", name, place, name)


def asked(name: str, *items: MultiModalFeatureSpec) -> EngineCoreRequest:
    count, placed = 0, []
    for each in items:
        length = each.mm_position.length
        placed.append(msgspec_replace(each, PlaceholderRange(count, length)))
        count += length
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[5] * (count + 3),
        mm_features=placed,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def msgspec_replace(item: MultiModalFeatureSpec, place: PlaceholderRange) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(item.data, item.modality, item.identifier, place, item.mm_hash)


class Raw:
    """A front that sends what it likes."""

    def __init__(self, elsewhere: Elsewhere, name: str = "raw") -> None:
        self.name = name
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(8))
        self.socket.linger = 0
        self._secret = Secret.read(elsewhere.secret_file)
        secure_client(self.socket, read_keys(elsewhere.secret_file))
        self.socket.connect(elsewhere.url)

    async def send(self, message: Any) -> None:
        await self.socket.send(jobs.encode(message, "raw"))

    async def beat(self) -> jobs.Here:
        await self.send(jobs.Beat(front=self.name))
        return await self.next(jobs.Here)

    async def next(self, kind: type[Any] = object) -> Any:
        """Return the next message of a kind, or of any but heartbeats."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                message, _ = jobs.decode_from_hub(await self.socket.recv())
                is_beat = isinstance(message, jobs.Here)
                if isinstance(message, kind) and (kind is jobs.Here or not is_beat):
                    return message

    def job(self, config: Any, name: str, side: int = 8, **changed: Any) -> tuple[jobs.Job, bytes]:
        proof = self._secret.sign_transfer(name, name, CONSUMER)
        transfer = EncodeTransfer(transfer_id=name, item_uuid=name, consumer=CONSUMER, proof=proof)
        request = encode_request(
            name, [5] * (side * side // 4), image(name, side), transfer, arrival_time=0.0
        )
        job, data = to_job(request, config)
        begins, count = jobs.offsets(job.tensors)
        whole = bytearray(count)
        for begin, each in zip(begins, data, strict=True):
            whole[begin : begin + each.nbytes] = each
        return msgspec.structs.replace(job, **changed), bytes(whole)

    async def send_job(self, job: jobs.Job, data: bytes) -> None:
        await self.send(job)
        await self.socket.send_multipart([b"", data])

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(elsewhere: Elsewhere, name: str = "raw") -> Raw:
        made.append(Raw(elsewhere, name))
        return made[-1]

    yield make
    for each in made:
        each.close()


# -- a front and an engine elsewhere --------------------------------------------------------------


@pytest.mark.parametrize("still", [True, False])
async def test_remote_engine_gets_the_item_as_it_is(
    front: Any, elsewhere: Begin, still: bool
) -> None:
    client, far = front(), elsewhere()
    await client.engines.join(far.settings)
    await until(lambda: client.engines.by_name["e-far"].instance.health.usable)
    item = image("A", 8, still)
    await client.add_request_async(asked("r", item))
    await until(lambda: far.core.requests)
    (got,) = far.core.last.mm_features
    assert got.identifier == "A"
    assert {k: v.data.tolist() for k, v in got.data.items()} == {
        k: v.data.tolist() for k, v in item.data.items()
    }
    assert [each.data.dtype for _, each in sorted(got.data.items())] == [
        each.data.dtype for _, each in sorted(item.data.items())
    ]
    pd = client.engines.by_name["pd-0"].client
    assert "pixel_values" not in pd.last.mm_features[0].data
    far.core.end(far.core.last.request_id)
    await until(lambda: not client._jobs.open)
    assert not client._open["r"].awaited


async def test_pixels_of_a_still_image_are_sent_once(
    config: Any, elsewhere: Begin, raw: Any, front: Any
) -> None:
    front()  # Makes the secret.
    job, data = raw(elsewhere()).job(config, "A")
    assert len(data) < 64 * 1176 * 0.6
    assert sorted(each.repeats for each in job.tensors) == [1, 2]


async def test_full_engine_is_followed_by_the_next(
    front: Any, elsewhere: Begin, raw: Any, config: Any
) -> None:
    client = front()
    far = elsewhere(max_queued_items=1)
    other = raw(far)
    await other.beat()
    await other.send_job(*other.job(config, "X"))
    await until(lambda: far.core.requests)
    await client.engines.join(far.settings)
    await until(lambda: client.engines.by_name["e-far"].client)
    engine = client.engines.by_name["e-far"]
    # Known to be full by what other fronts have there: nothing is sent, and this one encodes.
    await until(lambda: engine.instance.backlog.elsewhere == 1)
    assert engine.is_full
    assert engine.instance.load == 1
    await client.add_request_async(asked("r", image("A")))
    await settle()
    assert "pixel_values" in client.engines.by_name["pd-0"].client.last.mm_features[0].data
    far.core.end("X")
    await until(lambda: engine.instance.backlog.elsewhere == 0)
    assert engine.instance.load == 0


async def test_engine_that_comes_back_gets_jobs_again(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await client.engines.join(far.settings)
    engine = client.engines.by_name["e-far"]
    await until(lambda: engine.instance.health.usable)
    await client.add_request_async(asked("r", image("A")))
    await until(lambda: far.core.requests)
    await far.die()
    await until(lambda: not engine.instance.health.healthy)
    # The item is encoded by the engine that answers: the request was sent again.
    await until(lambda: len(client.engines.by_name["pd-0"].client.requests) == 2)
    again = elsewhere(port=far.port)
    await until(lambda: engine.instance.health.usable)
    await client.add_request_async(asked("s", image("B")))
    await until(lambda: again.core.requests)
    assert again.core.last.mm_features[0].identifier == "B"


async def test_front_that_leaves_ends_its_jobs(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await client.engines.join(far.settings)
    await until(lambda: client.engines.by_name["e-far"].instance.health.usable)
    await client.add_request_async(asked("r", image("A")))
    await until(lambda: far.core.requests)
    for task in client.engines._lives:
        task.cancel()
    await until(lambda: not far.core.open())
    assert far.hub.jobs == 0


async def test_engine_leaves_when_nothing_needs_it(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    assert await client.engines.join(far.settings)
    assert not await client.engines.join(far.settings)
    engine = client.engines.by_name["e-far"]
    await until(lambda: engine.instance.health.usable)
    await client.add_request_async(asked("r", image("A")))
    await until(lambda: far.core.requests)
    (shown,) = [x for x in await client.engines.seen("leave", "e-far") if x["name"] == "e-far"]
    assert (shown["state"], shown["idle"]) == ("draining", False)
    client.give_up(["r"])
    await until(lambda: "e-far" not in client.engines.by_name)
    assert len(client.engines.pool) == 1


async def test_reset_reaches_remote_engine_and_weights_do_not(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await client.engines.join(far.settings)
    await until(lambda: client.engines.by_name["e-far"].instance.health.usable)
    await client.call_utility_async("reset_encoder_cache")
    await client.call_utility_async("pause_scheduler", "abort", True)
    assert [each[1] for each in far.core.calls if each[1] != "is_scheduler_paused"] == [
        "reset_encoder_cache", "reset_encoder_cache"
    ]  # fmt: skip
    with pytest.raises(GracefulHTTPError, match="change their weights where they run"):
        await client.call_utility_async("collective_rpc", "update_weights")
    assert not any(
        each[1] == "collective_rpc" for each in client.engines.by_name["pd-0"].client.calls
    )


async def test_other_engine_at_the_address_is_not_used(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await client.engines.join(EngineSettings(name="e-near", role="encode", url=far.url))
    instance = client.engines.by_name["e-near"].instance
    await until(lambda: "engine e-far is there" in instance.health.reason)
    assert not instance.health.healthy


def as_version_2(message: Any) -> bytes:
    return msgspec.msgpack.encode([2, *msgspec.msgpack.decode(jobs.encode(message, "x"))[1:]])


async def test_other_version_is_refused_by_hub(elsewhere: Begin, raw: Any, front: Any) -> None:
    front()
    sender = raw(elsewhere())
    await sender.socket.send(as_version_2(jobs.Beat(front="x")))
    refused = await sender.next()
    assert isinstance(refused, jobs.VersionRefused)
    assert "version 2 of jobs at the sender, 1 at the receiver" in refused.reason


@contextlib.asynccontextmanager
async def played_hub(
    client: SplitClient, folder: Path
) -> AsyncIterator[tuple[zmq.asyncio.Socket, bytes]]:
    """Let a socket join as the hub of ``e-far``; gives it, and who has sent the first heartbeat."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        gate = CurveGate(plain, address, read_keys(str(folder / "secret")), name="hub")
        plain.bind(address)
        hub = zmq.asyncio.Socket.from_socket(plain)
        try:
            await client.engines.join(EngineSettings(name="e-far", role="encode", url=address))
            identity, _ = await hub.recv_multipart()
            yield hub, identity
        finally:
            gate.close()
            hub.close(linger=0)


async def test_other_version_of_hub_is_why_an_engine_is_down(front: Any, tmp_path: Path) -> None:
    client = front()
    async with played_hub(client, tmp_path) as (hub, identity):
        instance = client.engines.by_name["e-far"].instance
        refused = jobs.VersionRefused(version=2, reason="version 1 of jobs at the sender")
        await hub.send_multipart([identity, as_version_2(refused)])
        await until(lambda: "version 1 of jobs" in instance.health.reason)
        assert not instance.health.healthy


async def test_silent_hub_is_gone_and_its_jobs_are_not_awaited(front: Any, tmp_path: Path) -> None:
    client = front()
    async with played_hub(client, tmp_path) as (hub, identity):
        instance = client.engines.by_name["e-far"].instance
        here = jobs.Here(
            name="e-far", role="encode", vllm="0", fingerprint="", most=9, well=True,
            load=jobs.Load(),
        )  # fmt: skip
        await hub.send_multipart([identity, jobs.encode(here, "life")])
        await until(lambda: instance.health.usable)
        await client.add_request_async(asked("r", image("A")))
        await until(lambda: not instance.health.healthy)
        assert instance.health.reason == "it is silent"
        pd = client.engines.by_name["pd-0"].client
        await until(lambda: len(pd.requests) == 2)
        assert "pixel_values" in pd.last.mm_features[0].data


async def test_engine_joins_every_api_server(front: Any, elsewhere: Begin, tmp_path: Path) -> None:
    sockets = [str(tmp_path / f"server-{index}") for index in range(2)]
    servers = [front(index, sockets=sockets) for index in range(2)]
    for each in servers:
        await each.engines.listen()
    far = elsewhere()
    await servers[0].engines.join(far.settings)
    for each in servers:
        await until(lambda each=each: each.engines.by_name["e-far"].instance.health.usable)
    assert len(far.hub._fronts) == 2
    # They are one front: what one has open is not work of others to the other.
    await servers[0].add_request_async(asked("r", image("A")))
    await until(lambda: far.core.requests)
    await asyncio.sleep(3 * BEAT_S)
    assert [each.engines.by_name["e-far"].instance.backlog.elsewhere for each in servers] == [0, 0]
    (shown,) = [x for x in await servers[1].engines.seen() if x["name"] == "e-far"]
    assert (shown["state"], shown["in_flight"]) == ("up", 1)
    await servers[1].engines.seen("leave", "e-far")
    servers[0].give_up(["r"])
    for each in servers:
        await until(lambda each=each: "e-far" not in each.engines.by_name)
        each.engines._server.close()


# -- fronts that the hub must not trust ------------------------------------------------------------


def spoiled(config: Any, job: jobs.Job, data: bytes) -> dict[str, tuple[jobs.Job, bytes, str]]:
    """Return bad jobs, and what is said of each."""
    replace = msgspec.structs.replace
    grid, pixels = (
        next(i for i, each in enumerate(job.tensors) if (each.repeats == 2) is large)
        for large in (False, True)
    )

    def with_tensor(index: int, **changed: Any) -> jobs.Job:
        tensors = [*job.tensors]
        tensors[index] = replace(tensors[index], **changed)
        return replace(job, tensors=tuple(tensors))

    float_pixels = with_tensor(pixels, dtype="float32", shape=(16, 1176))
    begin = jobs.offsets(job.tensors)[0][grid]
    other_grid = data[:begin] + torch.tensor([1, 6, 10]).numpy().tobytes() + data[begin + 24 :]
    narrow = with_tensor(pixels, shape=(192, 392), run=196)
    flat = with_tensor(grid, shape=(3,))
    wrong_index = {**job.fields, "pixel_values": {"tensor": 9}}
    wrong_type = {**job.fields, "pixel_values": "x"}
    adapter = jobs.JobLora(name="a", number=1, path="/x")
    unproved = replace(job.transfer, proof="x")
    return {
        "dtype": (float_pixels, data, "torch.uint8"),
        "rows": (job, other_grid, "shape (64, 1176): its item has"),
        "width": (narrow, data, "width 392: 1176 here"),
        "dimensions": (flat, data, "in 1 dimensions"),
        "tokens": (replace(job, token_ids=(5,) * 9), data, "not 9 groups of 2 x 2"),
        "most": (replace(job, token_ids=(5,) * 100_000), data, "at most max_model_len"),
        "modality": (replace(job, modality="audio"), data, "audio: the model takes"),
        "fields": (replace(job, fields={"x": 1}), data, "fields x:"),
        "index": (replace(job, fields=wrong_index), data, "tensor 9"),
        "type": (replace(job, fields=wrong_type), data, "a str, not a Tensor"),
        "embeds": (replace(job, embeds=b"\0" * 16), data, "some not 0"),
        "adapter": (replace(job, lora=adapter), data, "serves none"),
        "proof": (replace(job, transfer=unproved), data, "proof is wrong"),
        "item": (replace(job, item="another"), data, "proof is wrong"),
        "longer": (job, data + b"x", "more bytes"),
    }


async def test_bad_jobs_never_reach_the_engine(
    config: Any, elsewhere: Begin, raw: Any, front: Any
) -> None:
    front()
    far = elsewhere()
    sender = raw(far)
    await sender.beat()
    for what in spoiled(config, *sender.job(config, "A")):
        job, data, said = spoiled(config, *sender.job(config, "A"))[what]
        await sender.send_job(job, data)
        failed = await sender.next()
        assert isinstance(failed, jobs.Failed), (what, failed)
        assert said in failed.reason, (what, failed.reason)
    for garbage in ([b"x"], [b"\xc1\x00"], [b"", b"x"], [b"a", b"b", b"c"], [b""]):
        await sender.socket.send_multipart(garbage)
    assert not far.core.requests
    await sender.send_job(*sender.job(config, "A"))
    await until(lambda: far.core.requests)
    await sender.send_job(*sender.job(config, "A"))
    assert (await sender.next()).reason == "a job of this name is open"
    far.core.end("A")
    assert (await sender.next()).reason == "stop"


async def test_job_larger_than_all_that_may_wait_is_refused(
    config: Any, elsewhere: Begin, raw: Any, front: Any
) -> None:
    front()
    far = elsewhere(max_queued_bytes=1000)
    sender = raw(far)
    await sender.beat()
    await sender.send_job(*sender.job(config, "A"))
    assert "at most 1000" in (await sender.next()).reason


@pytest.mark.parametrize("limit", [{"max_queued_items": 10}, {"max_queued_bytes": 10 * 40_000}])
async def test_many_jobs_are_full_beyond_the_limit_and_end_with_their_front(
    config: Any, elsewhere: Begin, raw: Any, front: Any, limit: dict[str, int]
) -> None:
    front()
    far = elsewhere(**limit)
    sender, other = raw(far), raw(far, "other")
    made = [sender.job(config, f"job-{number}") for number in range(400)]
    await sender.beat()
    for job, data in made:
        await sender.send_job(job, data)
    answers = [await sender.next() for _ in range(390)]
    assert {type(each) for each in answers} == {jobs.Full}
    assert all(each.retry_s > 0 for each in answers)
    assert far.hub.jobs == 10
    # Another front has its share all the same.
    await other.beat()
    await other.send_job(*other.job(config, "mine"))
    await until(lambda: "mine" in far.core.requests)
    here = await other.beat()
    assert here.load.jobs == 10
    # Nobody may cancel the jobs of others.
    await other.send(jobs.Cancel(jobs=tuple(far.core.requests)))
    await until(lambda: far.core.aborted == ["mine"])
    # The first one falls silent; the other does not.
    while far.hub.jobs:
        await other.beat()
    assert len(far.core.aborted) == 11


async def test_messages_of_a_front_without_a_key_are_not_read(elsewhere: Begin, front: Any) -> None:
    front()
    far = elsewhere()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(far.url)
        await plain.send(jobs.encode(jobs.Beat(front="x"), "x"))
        await until(lambda: far.hub._gate.refused)
    assert not far.hub._fronts


# -- joining by HTTP -------------------------------------------------------------------------------


@pytest.fixture
def http(front: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from prometheus_client import CollectorRegistry

    from epd_portable.front.http import FrontMiddleware

    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    client = front()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not vLLM's")

    middleware, server = FrontMiddleware(app), server_of(client)

    async def within(scope: Any, receive: Any, send: Any) -> None:
        await middleware({**scope, "app": server}, receive, send)

    def ask(method: str, path: str, body: Any = None, *, signed: bool = True) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        headers = {"authorization": client.secret.sign(method, path, data)} if signed else {}
        transport = httpx.ASGITransport(within)
        asking = httpx.AsyncClient(transport=transport, base_url="http://front")
        return asking.request(method, path, content=data, headers=headers)

    ask.client = client  # type: ignore[attr-defined]
    return ask


async def test_engines_join_and_leave_by_signed_requests(http: Any, elsewhere: Begin) -> None:
    far, path = elsewhere(), "/epd/instances"
    body = {"name": "e-far", "role": "encode", "url": far.url, "labels": {"zone": "b"}}
    assert (await http("POST", path, body, signed=False)).status_code == 401
    joined = await http("POST", path, body)
    assert (joined.status_code, joined.json()["name"]) == (201, "e-far")
    assert joined.json()["front"] == (await http("GET", path)).json()["front"]
    assert (await http("POST", path, body)).status_code == 200
    await until(lambda: http.client.engines.by_name["e-far"].instance.health.usable)
    taken = await http("POST", path, {**body, "url": "tcp://127.0.0.1:1"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    own = await http("POST", path, {**body, "name": "pd-0"})
    assert own.status_code == 409
    assert (await http("DELETE", f"{path}/pd-0")).status_code == 409
    assert (await http("DELETE", f"{path}/e-far")).status_code == 200
    await until(lambda: "e-far" not in http.client.engines.by_name)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"role": "prefill-decode"}, "encode engines at tcp://"),
        ({"url": "http://10.0.0.1:80"}, "url"),
        ({"url": ""}, "encode engines at tcp://"),
        ({"url": "plain+tcp://10.0.0.1:80"}, "transfer.trusted_network"),
        ({"name": "a/b"}, "name"),
        ({"weight": 0}, "weight"),
        ({"labels": {"x": "y" * 70_000}}, "65536 bytes"),
    ],
)
async def test_unusable_registrations_are_refused(
    http: Any, changed: dict[str, Any], said: str
) -> None:
    body = {"name": "e-far", "role": "encode", "url": "tcp://127.0.0.1:1", **changed}
    refused = await http("POST", "/epd/instances", body)
    assert 400 <= refused.status_code < 500
    assert said in refused.json()["error"]["message"]
    assert len(http.client.engines.pool) == 1

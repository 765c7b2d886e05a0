"""Engines of other machines: a front's client over real hubs, whose engines the tests play."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry
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
from epd_portable.config.roles import Role
from epd_portable.config.secret import Secret
from epd_portable.demo.servers import free_port
from epd_portable.engine.hub import Hub
from epd_portable.front import peers as peers_module
from epd_portable.front.client import SplitClient
from epd_portable.front.engines import EngineSettings, FrontEngine
from epd_portable.front.exchange import FrontExchange, GracefulHTTPError, exchange
from epd_portable.front.http import FrontMiddleware
from epd_portable.transfer.curve import Listener, read_keys, secure_client
from epd_portable.transfer.stores.lookup import StoredItem
from epd_portable.vllm_plugin.agreement import kv_form
from epd_portable.vllm_plugin.job_items import JobReader, to_job
from epd_portable.vllm_plugin.requests import KV, encode_request, prefill_sampling, put_params
from epd_portable.wire import jobs
from epd_portable.wire.params import CacheNews, EncodeTransfer, ExpectedTransfer, to_params
from tests.integration.front.played_front import (
    Played,
    client_of,
    core_of,
    http_to,
    settle,
    within,
)
from tests.waiting import until_async

pytestmark = pytest.mark.timeout(120)

BEAT_S = 0.05
WITHIN_S = 20.0
CONSUMER = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module")
def readers(config: Any) -> dict[Role, JobReader]:
    roles: tuple[Role, ...] = ("encode", "prefill", "encode-prefill")
    return {role: JobReader(config, role) for role in roles}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BEAT_S", BEAT_S)
    monkeypatch.setattr(peers_module, "_FIRST_BEAT_S", BEAT_S)


class Core(Played):
    """The engine below a hub: holds jobs until the test ends them."""

    def __init__(self) -> None:
        super().__init__("e")
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    def end(
        self, job: str, reason: FinishReason = FinishReason.STOP, kv: dict[str, Any] | None = None
    ) -> None:
        ended = EngineCoreOutput(job, [], finish_reason=reason, kv_transfer_params=kv)
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[ended]))

    def news(self, *requested: str, **entries: bool) -> None:
        news = EngineCoreOutput("", [])
        put_params(news, to_params(CacheNews(entries=entries, requested=requested)))
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[news]))

    def open(self) -> list[str]:
        return [each for each in self.requests if each not in self.aborted]


class Elsewhere:
    """An engine on another machine: a real hub over a played engine."""

    def __init__(
        self,
        folder: Path,
        reader: JobReader,
        role: Role,
        kv: str,
        fingerprint: str,
        port: int = 0,
        **settings: Any,
    ) -> None:
        self.secret_file = str(folder / "secret")
        instance = InstanceConfig(
            instance="e-far", platform="cpu", secret_file=self.secret_file, **settings
        )
        self.port = port or free_port()
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.role = role
        self.hub = Hub(self.url, instance, role, fingerprint, reader, kv=kv)
        self.core = Core()
        self._task = asyncio.create_task(self.hub.serve(self.core))

    @property
    def settings(self) -> EngineSettings:
        control = "" if self.role == "encode" else "tcp://far:1"
        return EngineSettings(name="e-far", role=self.role, url=self.url, control=control)

    async def die(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


Begin = Callable[..., Elsewhere]


@pytest.fixture
async def elsewhere(
    config: Any, tmp_path: Path, readers: dict[Role, JobReader]
) -> AsyncIterator[Begin]:
    """Return what starts an engine elsewhere; all end with the test."""
    begun: list[Elsewhere] = []

    def begin(
        role: Role = "encode", kv: str | None = None, fingerprint: str = "", **settings: Any
    ) -> Elsewhere:
        if kv is None:
            kv = "" if role == "encode" else kv_form(config)
        begun.append(Elsewhere(tmp_path, readers[role], role, kv, fingerprint, **settings))
        return begun[-1]

    yield begin
    for each in begun:
        await each.die()


@pytest.fixture
def front(config: Any, tmp_path: Path) -> Iterator[Callable[..., SplitClient]]:
    """Return what makes a front with one engine that answers."""
    made: list[SplitClient] = []

    def make(index: int = 0, name: str = "pd-0", **settings: Any) -> SplitClient:
        client = client_of(config, tmp_path, name, index=index, **settings)
        engine = client.engines.by_name[name]
        engine.client = Played(name)
        engine.instance.health.seen_up()
        made.append(client)
        return client

    yield make
    for each in made:
        for task in each.engines._tasks:
            task.cancel()


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
        placed.append(replace(each, mm_position=PlaceholderRange(count, length)))
        count += length
    return core_of(name, [5] * (count + 3), placed)


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

    def job(
        self, config: Any, name: str, side: int = 8, **changed: Any
    ) -> tuple[jobs.EncodeJob, bytes]:
        proof = self._secret.sign_transfer(name, name, CONSUMER)
        transfer = EncodeTransfer(transfer_id=name, item_uuid=name, consumer=CONSUMER, proof=proof)
        tokens, others = [5] * (side * side // 4), {"arrival_time": 0.0, "lora_request": None}
        request = encode_request(name, tokens, image(name, side), transfer, **others)
        job, data = self._as_job(request, config)
        assert isinstance(job, jobs.EncodeJob)
        return msgspec.structs.replace(job, **changed), data

    def prefill_job(
        self, config: Any, name: str, *items: MultiModalFeatureSpec, tokens: int = 0
    ) -> tuple[jobs.KvJob, bytes]:
        request = asked(name, *items)
        request.sampling_params = prefill_sampling()
        if tokens:
            request.prompt_token_ids = [5] * tokens
        job, data = self._as_job(request, config)
        assert isinstance(job, jobs.KvJob)
        return job, data

    def _as_job(self, request: EngineCoreRequest, config: Any) -> tuple[jobs.Job, bytes]:
        job, data = to_job(request, config, self._secret)
        begins, count = jobs.offsets(job.tensors)
        whole = bytearray(count)
        for begin, each in zip(begins, data, strict=True):
            whole[begin : begin + each.nbytes] = each
        return job, bytes(whole)

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


Meet = Callable[..., Awaitable[tuple[Elsewhere, Raw]]]


@pytest.fixture
def meet(front: Callable[..., SplitClient], elsewhere: Begin, raw: Callable[..., Raw]) -> Meet:
    """Return what starts an engine elsewhere, and a front that it has heard of."""
    front()  # Makes the secret.

    async def begin(role: Role = "encode", **settings: Any) -> tuple[Elsewhere, Raw]:
        sender = raw(far := elsewhere(role, **settings))
        await sender.beat()
        return far, sender

    return begin


# -- a front and an engine elsewhere --------------------------------------------------------------


async def joined(client: SplitClient, far: Elsewhere) -> FrontEngine:
    """Let an engine join a front; return it when it is up."""
    await client.engines.join(far.settings)
    await until_async(lambda: client.engines.by_name["e-far"].instance.health.usable)
    return client.engines.by_name["e-far"]


async def ask(client: SplitClient, far: Elsewhere, *given: MultiModalFeatureSpec) -> None:
    """Send a request ``r``; return when the engine elsewhere has a job of it."""
    await client.add_request_async(asked("r", *given))
    await until_async(lambda: far.core.requests)


@pytest.mark.parametrize("still", [True, False])
async def test_remote_engine_gets_the_item_as_it_is(
    front: Any, elsewhere: Begin, still: bool
) -> None:
    client, far = front(), elsewhere()
    await joined(client, far)
    item = image("A", 8, still)
    await ask(client, far, item)
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
    await until_async(lambda: not client._jobs.open)
    assert not client._open["r"].awaited


async def test_pixels_of_a_still_image_are_sent_once(config: Any, meet: Meet) -> None:
    _, sender = await meet()
    job, data = sender.job(config, "A")
    assert len(data) < 64 * 1176 * 0.6
    assert sorted(each.repeats for each in job.tensors) == [1, 1, 2]


async def test_full_engine_is_followed_by_the_next(
    front: Any, elsewhere: Begin, raw: Any, config: Any
) -> None:
    client = front()
    far = elsewhere(max_queued_items=1)
    other = raw(far)
    await other.beat()
    await other.send_job(*other.job(config, "X"))
    await until_async(lambda: far.core.requests)
    await client.engines.join(far.settings)
    await until_async(lambda: client.engines.by_name["e-far"].client)
    engine = client.engines.by_name["e-far"]
    # Known to be full by what other fronts have there: nothing is sent, and this one encodes.
    await until_async(lambda: engine.instance.elsewhere == 1)
    assert engine.is_full
    assert engine.instance.load == 1
    await client.add_request_async(asked("r", image("A")))
    await settle()
    assert "pixel_values" in client.engines.by_name["pd-0"].client.last.mm_features[0].data
    far.core.end("X")
    await until_async(lambda: engine.instance.elsewhere == 0)
    assert engine.instance.load == 0


async def test_item_that_a_full_engine_refuses_is_encoded_here(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(), elsewhere(max_queued_items=1)
    engine, pd = await joined(client, far), client.engines.by_name["pd-0"].client
    await ask(client, far, image("A"))
    # As when other fronts have sent jobs meanwhile.
    engine.settings = msgspec.structs.replace(engine.settings, max_queued_items=2)
    await client.add_request_async(asked("s", image("B")))
    await until_async(lambda: "pixel_values" in pd.last.mm_features[0].data)
    assert len(far.core.requests) == 1


async def test_engine_that_comes_back_gets_jobs_again(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    engine = await joined(client, far)
    await ask(client, far, image("A"))
    await far.die()
    await until_async(lambda: not engine.instance.health.healthy)
    # The item is encoded by the engine that answers: the request was sent again.
    await until_async(lambda: len(client.engines.by_name["pd-0"].client.requests) == 2)
    again = elsewhere(port=far.port)
    await until_async(lambda: engine.instance.health.usable)
    await client.add_request_async(asked("s", image("B")))
    await until_async(lambda: again.core.requests)
    assert again.core.last.mm_features[0].identifier == "B"


async def test_front_that_leaves_ends_its_jobs(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await joined(client, far)
    await ask(client, far, image("A"))
    for task in client.engines._tasks:
        task.cancel()
    await until_async(lambda: not far.core.open())
    assert far.hub.open_jobs == 0


async def test_engine_leaves_when_nothing_needs_it(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    assert await client.engines.join(far.settings)
    assert not await client.engines.join(far.settings)
    engine = client.engines.by_name["e-far"]
    await until_async(lambda: engine.instance.health.usable)
    await ask(client, far, image("A"))
    (shown,) = [x for x in await client.engines.seen("leave", "e-far") if x["name"] == "e-far"]
    assert (shown["state"], shown["idle"]) == ("draining", False)
    client.give_up(["r"])
    await until_async(lambda: "e-far" not in client.engines.by_name)
    assert len(client.engines.pool) == 1


async def test_reset_reaches_remote_engine_and_weights_do_not(front: Any, elsewhere: Begin) -> None:
    client, far = front(), elsewhere()
    await joined(client, far)
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
    await until_async(lambda: "engine e-far is there" in instance.health.reason)
    assert not instance.health.healthy


OTHER = jobs.JOBS_VERSION + 1


def as_other_version(message: Any) -> bytes:
    return msgspec.msgpack.encode([OTHER, *msgspec.msgpack.decode(jobs.encode(message, "x"))[1:]])


async def test_other_version_is_refused_by_hub(meet: Meet) -> None:
    _, sender = await meet()
    await sender.socket.send(as_other_version(jobs.Beat(front="x")))
    refused = await sender.next()
    assert isinstance(refused, jobs.VersionRefused)
    assert f"version {OTHER} of jobs at the sender, {jobs.JOBS_VERSION} at" in refused.reason


@contextlib.asynccontextmanager
async def played_hub(
    client: SplitClient, folder: Path
) -> AsyncIterator[tuple[zmq.asyncio.Socket, bytes]]:
    """Let a socket join as the hub of ``e-far``; gives it, and who has sent the first heartbeat."""
    address = f"tcp://127.0.0.1:{free_port()}"
    listener = Listener(
        address, read_keys(str(folder / "secret")), name="hub", max_bytes=1 << 20, waiting=1000
    )
    hub = zmq.asyncio.Socket.from_socket(listener.socket)
    try:
        await client.engines.join(EngineSettings(name="e-far", role="encode", url=address))
        identity, _ = await hub.recv_multipart()
        yield hub, identity
    finally:
        listener.close()


async def test_other_version_of_hub_is_why_an_engine_is_down(front: Any, tmp_path: Path) -> None:
    client = front()
    async with played_hub(client, tmp_path) as (hub, identity):
        instance = client.engines.by_name["e-far"].instance
        refused = jobs.VersionRefused(version=OTHER, reason="version 1 of jobs at the sender")
        await hub.send_multipart([identity, as_other_version(refused)])
        await until_async(lambda: "version 1 of jobs" in instance.health.reason)
        assert not instance.health.healthy


@pytest.mark.parametrize("responds", [True, False])
async def test_lost_hub_or_engine_is_down_and_its_jobs_are_not_awaited(
    front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, responds: bool
) -> None:
    client = front()
    async with played_hub(client, tmp_path) as (hub, identity):
        instance = client.engines.by_name["e-far"].instance
        here = jobs.Here(
            name="e-far", role="encode", vllm="0", fingerprint="", most=9, well=True,
            load=jobs.Load(),
        )  # fmt: skip
        if not responds:
            monkeypatch.setattr(jobs, "MISSED_BEATS", 1 << 30)
        await hub.send_multipart([identity, jobs.encode(here, "life")])
        await until_async(lambda: instance.health.usable)
        await client.add_request_async(asked("r", image("A")))
        if not responds:
            ill = msgspec.structs.replace(here, well=False)
            await hub.send_multipart([identity, jobs.encode(ill, "life")])
        await until_async(lambda: not instance.health.healthy)
        why = "it is silent" if responds else "its engine does not respond"
        assert instance.health.reason == why
        pd = client.engines.by_name["pd-0"].client
        await until_async(lambda: len(pd.requests) == 2)
        assert "pixel_values" in pd.last.mm_features[0].data


# -- prefill jobs ----------------------------------------------------------------------------------

PLACE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.2"}


def extra_of(core: EngineCoreRequest) -> dict[str, Any]:
    assert core.sampling_params is not None
    return core.sampling_params.extra_args or {}


@pytest.mark.parametrize("role", ["prefill", "encode-prefill"])
async def test_remote_engine_computes_the_prompt_as_it_is(
    front: Any, elsewhere: Begin, role: Role
) -> None:
    client, far = front(name="d-0"), elsewhere(role)
    await joined(client, far)
    core = asked("r", image("A"), image("B"))
    core.sampling_params = SamplingParams(max_tokens=7, min_tokens=3, stop=["x"], seed=1)
    core.cache_salt, core.priority = "salt", 3
    exchange.set(FrontExchange(samples={}))  # As of a warm-up.
    await client.add_request_async(core)
    await until_async(lambda: far.core.requests)
    job = far.core.last
    assert job.prompt_token_ids == core.prompt_token_ids
    assert (job.cache_salt, job.priority) == ("salt", 3)
    assert job.sampling_params.ignore_eos and not job.sampling_params.stop
    assert job.sampling_params.max_tokens == 1
    assert extra_of(job)[KV] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert extra_of(job)["ec_transfer_params"]["sample"]
    for got, sent in zip(job.mm_features, core.mm_features, strict=True):
        assert (got.identifier, got.mm_position) == (sent.identifier, sent.mm_position)
        for name, element in sent.data.items():
            assert torch.equal(got.data[name].data, element.data)
    decode = client.engines.by_name["d-0"].client
    assert not decode.requests
    far.core.end(job.request_id, FinishReason.LENGTH, PLACE)
    await until_async(lambda: decode.requests)
    assert extra_of(decode.last)[KV] == PLACE


async def test_items_of_a_remote_prefill_job_come_from_encoders(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    engine = await joined(client, far)
    client.engines.by_name["e-0"] = near = FrontEngine(
        EngineSettings(name="e-0", role="encode"),
        client.engines.pool.add(EngineSettings(name="e-0", role="encode")),
        9,
    )
    near.client = Played("e-0")
    near.instance.health.seen_up()
    await ask(client, far, image("A"))
    job, encode = far.core.last, near.client.last
    (given,) = extra_of(encode)["ec_transfer_params"]["transfers"]
    (expected,) = extra_of(job)["ec_transfer_params"]["transfers"]
    assert given["consumer"] == "tcp://far:1"
    assert expected["transfer_id"] == given["transfer_id"]
    assert not expected["media"]
    assert [*job.mm_features[0].data] == ["image_grid_thw"]
    # What an engine says of its cache reaches every front.
    far.core.news(A=True)
    await until_async(lambda: "A" in engine.holds)
    assert not client._jobs.requested[given["transfer_id"]].is_set()
    far.core.news(given["transfer_id"], A=False)
    await until_async(lambda: not engine.holds)
    assert client._jobs.requested[given["transfer_id"]].is_set()


async def test_front_that_comes_later_learns_what_an_engine_holds(
    front: Any, elsewhere: Begin, raw: Any
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    far.core.news(A=True, B=True)
    far.core.news(A=False)
    engine = await joined(client, far)
    await until_async(lambda: engine.holds == {"B"})


@pytest.mark.parametrize("known", [True, False])
async def test_full_remote_prefill_engine_is_passed_over(
    front: Any, elsewhere: Begin, known: bool
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill", max_queued_items=1)
    engine, decode = await joined(client, far), client.engines.by_name["d-0"].client
    await ask(client, far)
    assert engine.is_full
    if not known:  # As when other fronts have sent jobs meanwhile.
        engine.settings = msgspec.structs.replace(engine.settings, max_queued_items=2)
    await client.add_request_async(asked("s"))
    await until_async(lambda: "s" in decode.requests)
    assert extra_of(decode.last) == {}
    assert len(far.core.requests) == 1
    where = "unavailable" if known else "local"
    assert client.metrics.registry.get_sample_value("epd_front_prefills_total", {"where": where})
    far.core.end(far.core.last.request_id, FinishReason.LENGTH, PLACE)
    await until_async(lambda: "r" in decode.requests)
    assert not engine.is_full


async def test_lost_remote_prefill_engine_leaves_the_prompt_to_decode(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    engine, decode = await joined(client, far), client.engines.by_name["d-0"].client
    await ask(client, far, image("A"))
    await far.die()
    await until_async(lambda: decode.requests)
    assert extra_of(decode.last) == {}
    assert not engine.instance.health.usable


async def test_request_that_ends_cancels_its_remote_prefill_job(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    engine = await joined(client, far)
    await ask(client, far)
    client.give_up(["r"])
    await until_async(lambda: not far.core.open())
    await until_async(lambda: far.hub.open_jobs == engine.instance.load == 0)


@pytest.mark.parametrize(
    "spoiled", [{"cache_salt": "x" * (1 << 20)}, {"cache_salt": "\ud800"}, {"priority": 1 << 40}]
)
async def test_prompt_that_no_hub_takes_is_left_to_decode(
    front: Any, elsewhere: Begin, spoiled: dict[str, Any]
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    engine, decode = await joined(client, far), client.engines.by_name["d-0"].client
    core = asked("r", image("A"))
    for name, value in spoiled.items():
        setattr(core, name, value)
    await client.add_request_async(core)
    await until_async(lambda: decode.requests)
    assert not far.core.requests
    assert engine.instance.health.usable


async def test_kv_of_another_form_is_why_an_engine_is_down(front: Any, elsewhere: Begin) -> None:
    client, far = front(name="d-0"), elsewhere("prefill", kv="NixlConnector of vLLM 0.1")
    await client.engines.join(far.settings)
    instance = client.engines.by_name["e-far"].instance
    await until_async(
        lambda: "its KV is NixlConnector of vLLM 0.1; read here is" in instance.health.reason
    )
    assert not instance.health.usable


async def test_kv_of_a_misfit_is_not_read(front: Any, elsewhere: Begin) -> None:
    client, far = front(name="d-0"), elsewhere("prefill", fingerprint="dtype=float32")
    client.engines.by_name["d-0"].fingerprint = "dtype=bfloat16"
    engine, decode = await joined(client, far), client.engines.by_name["d-0"].client
    assert "d-0 refuses its KV, which differ in the dtype" in engine.instance.health.problem
    await client.add_request_async(asked("r"))
    await until_async(lambda: decode.requests)
    assert not far.core.requests


async def test_reset_lets_a_remote_engine_use_no_prefix_again(front: Any, elsewhere: Begin) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    await joined(client, far)
    await client.call_utility_async("reset_prefix_cache")
    assert [each[1] for each in far.core.calls if each[1] != "is_scheduler_paused"] == [
        "reset_encoder_cache"
    ]
    core = asked("r")
    core.cache_salt = "salt"
    await client.add_request_async(core)
    await until_async(lambda: far.core.requests)
    assert far.core.last.cache_salt == "1 salt"


async def test_engine_joins_every_api_server(front: Any, elsewhere: Begin, tmp_path: Path) -> None:
    sockets = [str(tmp_path / f"server-{index}") for index in range(2)]
    servers = [front(index, sockets=sockets) for index in range(2)]
    for each in servers:
        await each.engines.listen()
    far = elsewhere()
    await servers[0].engines.join(far.settings)
    for each in servers:
        await until_async(lambda each=each: each.engines.by_name["e-far"].instance.health.usable)
    assert len(far.hub._fronts) == 2
    # They are one front: what one has open is not work of others to the other.
    await servers[0].add_request_async(asked("r", image("A")))
    await until_async(lambda: far.core.requests)
    await asyncio.sleep(3 * BEAT_S)
    assert [each.engines.by_name["e-far"].instance.elsewhere for each in servers] == [0, 0]
    (shown,) = [x for x in await servers[1].engines.seen() if x["name"] == "e-far"]
    assert (shown["state"], shown["in_flight"]) == ("up", 1)
    await servers[1].engines.seen("leave", "e-far")
    servers[0].give_up(["r"])
    for each in servers:
        await until_async(lambda each=each: "e-far" not in each.engines.by_name)
        each.engines._server.close()


# -- fronts that the hub must not trust ------------------------------------------------------------


def spoiled(
    sender: Raw, config: Any
) -> dict[str, tuple[tuple[jobs.EncodeJob | jobs.KvJob, bytes], str]]:
    """Return bad jobs, and what is said of each."""
    replace = msgspec.structs.replace
    job, data = sender.job(config, "A")
    (item,) = job.items
    grid, pixels = (
        next(i for i, each in enumerate(job.tensors) if i and (each.repeats == 2) is large)
        for large in (False, True)
    )

    def with_tensor(index: int, **changed: Any) -> jobs.EncodeJob:
        tensors = [*job.tensors]
        tensors[index] = replace(tensors[index], **changed)
        return replace(job, tensors=tuple(tensors))

    def with_item(**changed: Any) -> tuple[jobs.EncodeJob, bytes]:
        return replace(job, items=(replace(item, **changed),)), data

    def prefill(
        *items: MultiModalFeatureSpec, words: Any = None, tokens: int = 0, **changed: Any
    ) -> tuple[jobs.KvJob, bytes]:
        made, content = sender.prefill_job(config, "P", *items, tokens=tokens)
        content = content if words is None else words.numpy().tobytes() + content[12:]
        return replace(made, **changed), content

    begin = jobs.offsets(job.tensors)[0][grid]
    other_grid = data[:begin] + torch.tensor([1, 6, 10]).numpy().tobytes() + data[begin + 24 :]
    adapter = jobs.JobLora(name="a", path="/x")
    unproved = replace(job.transfer, proof="x")
    expected = ExpectedTransfer(transfer_id="t", item_uuid="B", media=False)
    ids = torch.int32
    two = prefill(image("B"), image("C"))[0].items
    return {
        "dtype": ((with_tensor(pixels, dtype="float32", shape=(16, 1176)), data), "torch.uint8"),
        "rows": ((job, other_grid), "shape (64, 1176): its item has"),
        "width": ((with_tensor(pixels, shape=(192, 392), run=196), data), "width 392: 1176 here"),
        "dimensions": ((with_tensor(grid, shape=(3,)), data), "in 1 dimensions"),
        "places": (with_item(length=9), "in other places"),
        "offset": (with_item(offset=1, length=15), "in other places"),
        "outside": (with_item(offset=1), "within 16 tokens"),
        "kind of tokens": ((with_tensor(0, dtype="float32"), data), "of int32"),
        "modality": (with_item(modality="audio"), "audio: the model takes"),
        "fields": (with_item(fields={"x": 1}), "fields x:"),
        "index": (with_item(fields={**item.fields, "pixel_values": {"tensor": 9}}), "tensor 9"),
        "type": (with_item(fields={**item.fields, "pixel_values": "x"}), "a str, not a Tensor"),
        "embeds": (with_item(embeds=b"\0" * 16), "some not 0"),
        "adapter": ((replace(job, lora=adapter), data), "serves none"),
        "proof": ((replace(job, transfer=unproved), data), "proof is wrong"),
        "item": (with_item(item="another"), "proof is wrong"),
        "longer": ((job, data + b"x"), "more bytes"),
        "none": ((replace(job, items=()), data), "0 items"),
        "prefill's proof": (prefill(proof=job.transfer.proof), "proof is wrong"),
        "most": (prefill(tokens=config.model_config.max_model_len), "at most"),
        "word": (prefill(words=torch.tensor([1, 2, 1 << 30], dtype=ids)), "from 0 to"),
        "minus": (prefill(words=torch.tensor([-1, 2, 3], dtype=ids)), "from 0 to"),
        "bare": (prefill(bare(image("B"))), "fields image_grid_thw: "),
        "too much": (prefill(image("B"), expected=(expected,)), "image_grid_thw here"),
        "absent": (prefill(image("C"), expected=(expected,)), "in the prompt"),
        "twice": (prefill(bare(image("B")), expected=(expected, expected)), "each once"),
        "order": (prefill(image("B"), image("C"), items=two[::-1]), "in their order"),
    }


def bare(item: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    """Return an item with its metadata only."""
    assert item.data is not None
    data = MultiModalKwargsItem({"image_grid_thw": item.data["image_grid_thw"]})
    return replace(item, data=data)


async def test_bad_jobs_never_reach_the_engine(config: Any, meet: Meet) -> None:
    far, sender = await meet("encode-prefill")
    for what, (bad, said) in spoiled(sender, config).items():
        await sender.send_job(*bad)
        failed = await sender.next()
        assert isinstance(failed, jobs.Failed), (what, failed)
        assert said in failed.reason, (what, failed.reason)
    for garbage in ([b"x"], [b"\xc1\x00"], [b"", b"x"], [b"a", b"b", b"c"], [b""]):
        await sender.socket.send_multipart(garbage)
    assert not far.core.requests
    await sender.send_job(*sender.job(config, "A"))
    await until_async(lambda: far.core.requests)
    await sender.send_job(*sender.job(config, "A"))
    assert (await sender.next()).reason == "a job of this name is open"
    far.core.end("A")
    assert (await sender.next()).reason == "stop"


@pytest.mark.parametrize("role", ["encode", "prefill"])
async def test_job_of_another_role_is_refused(config: Any, meet: Meet, role: Role) -> None:
    _, sender = await meet(role)
    made = sender.job(config, "A") if role == "prefill" else sender.prefill_job(config, "A")
    await sender.send_job(*made)
    assert f"has the role {role}" in (await sender.next()).reason


async def test_items_of_a_store_are_not_sent_to_remote_engines(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(name="d-0"), elsewhere("encode-prefill")
    await joined(client, far)

    class Store:
        async def find_items(self, items: Any, namespace: str) -> dict[str, StoredItem]:
            return {"A": StoredItem("key")}

    client._store = Store()
    await ask(client, far, image("A"))
    assert "pixel_values" in far.core.last.mm_features[0].data
    assert "ec_transfer_params" not in extra_of(far.core.last)


async def test_job_larger_than_all_that_may_wait_is_refused(config: Any, meet: Meet) -> None:
    _, sender = await meet(max_queued_bytes=1000)
    await sender.send_job(*sender.job(config, "A"))
    assert "at most 1000" in (await sender.next()).reason


@pytest.mark.parametrize("limit", [{"max_queued_items": 10}, {"max_queued_bytes": 10 * 40_000}])
async def test_jobs_beyond_the_limit_are_full_and_end_with_the_front(
    config: Any, elsewhere: Begin, raw: Any, front: Any, limit: dict[str, int]
) -> None:
    front()
    far = elsewhere(**limit)
    sender, other = raw(far), raw(far, "other")
    made = [sender.job(config, f"job-{number}") for number in range(60)]
    await sender.beat()
    for job, data in made:
        await sender.send_job(job, data)
    answers = [await sender.next() for _ in range(50)]
    assert {type(each) for each in answers} == {jobs.Full}
    assert all(each.retry_s > 0 for each in answers)
    assert far.hub.open_jobs == 10
    # Another front has its share all the same.
    await other.beat()
    await other.send_job(*other.job(config, "mine"))
    await until_async(lambda: "mine" in far.core.requests)
    here = await other.beat()
    assert here.load.jobs == 10
    # Nobody may cancel the jobs of others.
    await other.send(jobs.Cancel(jobs=tuple(far.core.requests)))
    await until_async(lambda: far.core.aborted == ["mine"])
    # The first one falls silent; the other does not.
    while far.hub.open_jobs:
        await other.beat()
    assert len(far.core.aborted) == 11


async def test_jobs_that_arrive_take_at_most_twice_the_bytes(
    config: Any, elsewhere: Begin, raw: Any, front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first front is silent while the others come, which takes long on a busy machine.
    monkeypatch.setattr(jobs, "MISSED_BEATS", 10**6)
    front()
    _, largest = raw(elsewhere()).job(config, "X", side=24)
    far = elsewhere(max_queued_bytes=len(largest))
    # Each has its share of those that are there, and nothing but heads has come.
    for number, side in enumerate((24, 16, 12, 8, 8, 8)):
        sender = raw(far, f"raw-{number}")
        await sender.beat()
        await sender.send(sender.job(config, f"J{number}", side=side)[0])
        await sender.send(jobs.Reset(job="R"))
        message = await sender.next()
        assert isinstance(message, jobs.Full) == (number == 5)
    again = raw(far, "again")
    await again.beat()
    await again.send(again.job(config, "A", side=24)[0])
    assert isinstance(await again.next(), jobs.Full)


async def test_messages_of_a_front_without_a_key_are_not_read(elsewhere: Begin, front: Any) -> None:
    front()
    far = elsewhere()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(far.url)
        with contextlib.suppress(zmq.Again):  # The connection may be refused before.
            await plain.send(jobs.encode(jobs.Beat(front="x"), "x"), zmq.DONTWAIT)
        await until_async(lambda: far.hub._listener.refused)
    assert not far.hub._fronts


# -- joining by HTTP -------------------------------------------------------------------------------


@pytest.fixture
def http(front: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("epd_portable.front.http.REGISTRY", CollectorRegistry())
    client = front()

    asking = http_to(within(FrontMiddleware(lambda *_: pytest.fail("vLLM's")), client))

    def ask(method: str, path: str, body: Any = None, *, signed: bool = True) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        headers = {"authorization": client.secret.sign(method, path, data)} if signed else {}
        return asking.request(method, path, content=data, headers=headers)

    ask.client = client
    return ask


async def test_engine_whose_outputs_could_not_be_taken_comes_back(
    front: Any, elsewhere: Begin
) -> None:
    client, far = front(name="d-0"), elsewhere("prefill")
    engine = await joined(client, far)
    first = engine.client

    def fail(*_: Any) -> None:
        del client._take_output
        raise ValueError("a fault of the front")

    client._take_output = fail
    far.core.news(A=True)
    await until_async(lambda: engine.client is not first)
    await until_async(lambda: engine.holds == {"A"})


async def test_engines_join_and_leave_by_signed_requests(http: Any, elsewhere: Begin) -> None:
    far, path = elsewhere(), "/epd/instances"
    body = {"name": "e-far", "role": "encode", "url": far.url, "labels": {"zone": "b"}}
    assert (await http("POST", path, body, signed=False)).status_code == 401
    joined = await http("POST", path, body)
    assert (joined.status_code, joined.json()["name"]) == (201, "e-far")
    assert joined.json()["front"] == (await http("GET", path)).json()["front"]
    assert (await http("POST", path, body)).status_code == 200
    await until_async(lambda: http.client.engines.by_name["e-far"].instance.health.usable)
    moved = await http("POST", path, {**body, "labels": {"zone": "c"}, "weight": 2.0})
    engine = http.client.engines.by_name["e-far"].instance
    assert (moved.status_code, engine.labels["zone"], engine.weight) == (200, "c", 2.0)
    await until_async(lambda: http.client.engines.by_name["e-far"].instance.health.usable)
    taken = await http("POST", path, {**body, "url": "tcp://127.0.0.1:1"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    own = await http("POST", path, {**body, "name": "pd-0"})
    assert own.status_code == 409
    assert (await http("DELETE", f"{path}/pd-0")).status_code == 409
    assert (await http("DELETE", f"{path}/e-far")).status_code == 200
    await until_async(lambda: "e-far" not in http.client.engines.by_name)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"role": "prefill-decode"}, "encode engines at tcp://"),
        ({"role": "prefill", "control": "tcp://far:1"}, "with decode instances"),
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

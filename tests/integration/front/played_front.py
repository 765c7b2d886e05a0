"""A front's client over engines that tests play, and requests to it as vLLM makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from epd_portable.config.choice import ChoiceSection
from epd_portable.config.front import AdmissionSection, FrontSection, MediaSection
from epd_portable.config.roles import Role
from epd_portable.config.secret import make_secret_file
from epd_portable.front.client import FrontSettings, SplitClient
from epd_portable.front.engines import EngineSettings
from epd_portable.vllm_plugin.requests import put_params
from epd_portable.wire.params import CacheNews, to_params

CHAT = "/v1/chat/completions"
MODEL = Path(__file__).parents[3] / "epd_portable" / "demo" / "model"
CONTROL = {"pd-0": "tcp://127.0.0.1:1", "pd-1": "tcp://127.0.0.1:2"}
ROLES: dict[str, Role] = {
    "e": "encode",
    "p": "prefill",
    "d": "decode",
    "ep": "encode-prefill",
    "pd": "prefill-decode",
    "all": "encode-prefill-decode",
}
"""By the beginning of a name."""

SECTIONS = {"admission": AdmissionSection, "choice": ChoiceSection, "media": MediaSection}
"""Sections of the key ``front`` that tests give as data."""


def config_of_front() -> Any:
    """Return vLLM's configuration of a front of the bundled model."""
    return AsyncEngineArgs(model=str(MODEL), enforce_eager=True).create_engine_config()


def client_of(
    config: Any,
    folder: Path,
    *names: str,
    max_queued_items: int = 2,
    index: int = 0,
    **settings: Any,
) -> SplitClient:
    """Return a front's client of engines that are not up; their names begin with their role."""
    secret = folder / "secret"
    if not secret.exists():
        make_secret_file(str(secret))
    engines = [
        EngineSettings(
            name=name,
            role=ROLES[name.partition("-")[0]],
            control=CONTROL.get(name, "" if name.startswith("e-") else f"tcp://{name}"),
            max_queued_items=max_queued_items,
        )
        for name in names
    ]
    given = {"sockets": [str(folder / "front")], "secret_file": str(secret)}
    for name in FrontSettings.__struct_fields__:
        if name in settings:
            given[name] = settings.pop(name)
    front = {"elastic_encode": False, **settings}
    for name, kind in SECTIONS.items():
        if name in front:
            front[name] = kind.model_validate(front[name])
    # Not checked: tests have smaller limits than files may.
    section = FrontSection().model_copy(update=front)
    return SplitClient(config, FrontSettings(engines=engines, front=section, **given), index)


def within(middleware: ASGIApp, client: SplitClient) -> ASGIApp:
    """Return a middleware in the place that it has in vLLM's server of a front."""
    server = SimpleNamespace(
        state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=client))
    )

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await middleware({**scope, "app": server}, receive, send)

    return call


def http_to(app: ASGIApp) -> httpx.AsyncClient:
    """Return a client without a socket: there is nothing to close."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front")


Serve = Callable[..., tuple[httpx.AsyncClient, SplitClient]]


PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in a prompt of the bundled model."""
PAIRS = {"A": 1, "B": 2, "C": 5}
"""Videos, and how many pairs of frames they have."""
_EMBEDS = 4
"""Embeddings of an image, and of a pair of frames."""


def seen_of(name: str) -> list[int]:
    """Return what the picture of that name shows, or each pair of frames of a video or its part."""
    video, _, part = name.partition("#")
    shown = int.from_bytes(video.encode(), "big")
    if video not in PAIRS:
        return [shown]
    begin, _, end = part.partition("-")
    return [1000 * shown + pair for pair in range(int(begin or 0), int(end or PAIRS[video]))]


def content_of(feature: MultiModalFeatureSpec) -> list[int] | None:
    """Return what an item shows, by its pixels; ``None`` without them."""
    assert feature.data is not None
    found = [each.data for key, each in feature.data.items() if key.startswith("pixel_values")]
    return found[0][:: 4 * _EMBEDS, 0].int().tolist() if found else None


def feature(name: str, offset: int) -> MultiModalFeatureSpec:
    """Return an item; text stands around each pair of frames of ``C``."""
    shown = torch.tensor(seen_of(name), dtype=torch.float32)
    pixels = shown.repeat_interleave(4 * _EMBEDS)[:, None].expand(-1, 8)
    kind, pixels_of = ("video", "_videos") if name in PAIRS else ("image", "")
    grid = torch.tensor([len(shown), 4, 4])
    data = MultiModalKwargsItem(
        {
            f"pixel_values{pixels_of}": MultiModalFieldElem(pixels, MultiModalBatchedField()),
            f"{kind}_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
        }
    )
    around = [False] * (name == "C")
    mask = torch.tensor([*around, *[True] * _EMBEDS, *around] * len(shown))
    place = PlaceholderRange(offset, len(mask), mask if around else None)
    return MultiModalFeatureSpec(data, kind, name, place, name)


def request(name: str, pictures: Iterable[str], **extra: Any) -> EngineCoreRequest:
    """Return a request as vLLM makes it, with a picture, or a video, of each name."""
    features, end = [], 0
    for each in pictures:
        features.append(feature(each, end + 1))
        end += 1 + features[-1].mm_position.length
    return core_of(name, list(range(end + 2)), features, **extra)


def core_of(
    name: str, tokens: list[int], features: list[MultiModalFeatureSpec], **extra: Any
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tokens,
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=4, extra_args=extra or None),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


ENDED, FAILED = FinishReason.STOP, FinishReason.ERROR


async def sent_by(app: ASGIApp, scope: Scope, **message: Any) -> list[Any]:
    """Call an application with one message; return those that it sends after it is received."""
    received, sent = asyncio.Event(), list[Any]()

    async def receive() -> Any:
        received.set()
        return message

    async def send(message: Any) -> None:
        assert received.is_set()
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def stalled(begin: bytes = b"{") -> AsyncIterator[bytes]:
    """Yield the begin of a body whose end does not come."""
    yield begin
    await asyncio.Event().wait()


async def unread() -> AsyncIterator[bytes]:
    """Yield a body that no handler may read."""
    pytest.fail("it is read")
    yield b""


def keys_file(folder: Path, *keys: str) -> str:
    """Write a file of keys, or another one in its place; return its path."""
    path = folder / "keys"
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return str(path)


class Engine:
    """Ends what it is sent as soon as it may, and keeps it."""

    def __init__(self, client: SplitClient, name: str) -> None:
        self.takes_s = 0.0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.sent: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.name = name
        self._client, self._engine = client, client.engines.by_name[name]
        self._engine.client = self
        self._engine.instance.health.seen_up()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.sent.append(request)
        self.ends = asyncio.create_task(self._end(request.request_id))

    async def _end(self, request_id: str) -> None:
        await self.may_end.wait()
        await asyncio.sleep(self.takes_s)
        self.says(request_id, ENDED)

    def says(self, request_id: str, end: FinishReason | None) -> None:
        said = EngineCoreOutput(request_id, [1], finish_reason=end)
        self._client._take_outputs(self._engine, EngineCoreOutputs(outputs=[said]))

    async def call_utility_async(self, method: str) -> tuple[str, ...]:
        return ("generate",)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


class Played:
    """An engine: keeps what it is sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self.calls: list[Any] = []
        """Methods that were called, of all engines of a front."""
        self.silent = False

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call_utility_async(self, method: str, *args: Any) -> str:
        self.calls.append((self.name, method, *args))
        if self.silent:
            await asyncio.Event().wait()
        return f"{self.name} {method}"

    @property
    def last(self) -> EngineCoreRequest:
        return [*self.requests.values()][-1]

    @property
    def params(self) -> Any:
        return (self.last.sampling_params.extra_args or {}).get("ec_transfer_params")


class Front:
    """A `SplitClient` over played engines."""

    def __init__(self, config: Any, folder: Path, *names: str, **settings: Any) -> None:
        self.client = client_of(config, folder, *names, **settings)
        self.failed: dict[str, Exception] = {}
        self.client.fail = self.failed.__setitem__
        self.engines: dict[str, Played] = {}
        for name in names:
            self.comes(name)

    def comes(self, name: str) -> None:
        engine = self.client.engines.by_name[name]
        self.engines[name] = engine.client = Played(name)
        engine.instance.health.seen_up()

    def goes(self, name: str) -> None:
        engine = self.client.engines.by_name[name]
        engine.client = None
        engine.instance.seen_gone("its process has ended")

    async def ask(self, *pictures: str, name: str = "r", **extra: Any) -> None:
        await self.client.add_request_async(request(name, pictures, **extra))
        await settle()

    async def says(
        self,
        engine: str,
        request_id: str,
        *tokens: int,
        end: FinishReason | None = None,
        kv: dict[str, Any] | None = None,
    ) -> None:
        output = EngineCoreOutput(request_id, [*tokens], finish_reason=end, kv_transfer_params=kv)
        outputs = EngineCoreOutputs(outputs=[output])
        self.client._take_outputs(self.client.engines.by_name[engine], outputs)
        await settle()

    async def encoded(self, encoder: str = "e-0") -> None:
        """End the last job of an encoder."""
        await self.says(encoder, self.engines[encoder].last.request_id, end=ENDED)

    async def ends(self, engine: str = "pd-0", name: str = "r") -> None:
        """End the response of an engine's last request; check that it is passed on as the last."""
        await self.says(engine, self.engines[engine].last.request_id, 7, end=ENDED)
        assert await self.answers() == [(name, [7], ENDED)]
        assert not self.failed and self.is_empty()

    async def tells(self, engine: str, *requested: str, **entries: bool) -> None:
        await self.reports(engine, CacheNews(entries=entries, requested=requested))

    async def reports(self, engine: str, news: CacheNews) -> None:
        output = EngineCoreOutput("", [])
        put_params(output, to_params(news))
        outputs = EngineCoreOutputs(outputs=[output])
        self.client._take_outputs(self.client.engines.by_name[engine], outputs)
        await settle()

    def items(self) -> dict[str, float]:
        """Return what became of items, as it is counted."""
        (family,) = self.client.metrics.items.collect()
        counts = [each for each in family.samples if each.name.endswith("_total")]
        return {each.labels["outcome"]: each.value for each in counts if each.value}

    async def answers(self) -> list[tuple[str, list[int], FinishReason | None]]:
        found = []
        while not self.client._outputs.empty():
            for each in (await self.client.get_output_async()).outputs:
                found.append((each.request_id, each.new_token_ids, each.finish_reason))
        return found

    def with_job(self) -> str:
        """Return the only encoder that has a job that is not over."""
        (found,) = (
            name
            for name, engine in self.engines.items()
            if name.startswith("e") and engine.requests.keys() & self.client._jobs.open.keys()
        )
        return found

    def jobs(self, encoder: str) -> list[EngineCoreRequest]:
        """Return the jobs that an encoder was given, in their order."""
        return [*self.engines[encoder].requests.values()]

    def is_empty(self) -> bool:
        client = self.client
        loads = [each.instance.load for each in client.engines.by_name.values()]
        return not (client._open or client._at_engines or client._jobs.open or any(loads))


Make = Callable[..., Front]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)

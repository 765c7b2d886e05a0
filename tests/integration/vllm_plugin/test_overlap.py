"""Ways of overlapped encoding, and vLLM's parts that these use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.multimodal import utils
from vllm.utils.torch_utils import current_stream

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.background import BackgroundEncoder, StepEncoder
from epd_portable.encode.chunks import ChunkEncoder
from epd_portable.items.placer import EncodeOrder
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.cpu import CpuPlatform, PassedEvent
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.vllm_plugin import worker
from epd_portable.vllm_plugin.overlap import (
    captured_apart,
    encoder_measured,
    make_encoder,
    overlap_of,
)


def engine(*, ranks: int = 1, second: bool = False, mode: str = "weights", **more: Any) -> Any:
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_producer=more.get("encodes", False)),
        lora_config=more.get("lora"),
        parallel_config=SimpleNamespace(world_size=ranks),
        use_v2_model_runner=second,
        compilation_config=SimpleNamespace(compile_mm_encoder=more.get("compiled", False)),
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_encoder_tp_mode=mode)),
    )


def instance(platform: str = "npu", **more: Any) -> InstanceConfig:
    more = {"overlaps": True, **more}
    return InstanceConfig(instance="encode_prefill_decode-0", platform=platform, **more)


@pytest.mark.parametrize(
    ("platform", "engine_args", "more", "forced", "expected"),
    [
        ("cpu", {}, {}, "", "turns"),
        ("cpu", {"ranks": 2}, {}, "", "none"),
        ("cpu", {"second": True}, {}, "", "none"),
        ("cpu", {"second": True}, {}, "chunks", "chunks"),
        ("cpu", {}, {"encode_priority": "images"}, "", "turns"),
        ("cpu", {}, {"overlaps": False}, "", "turns"),
        ("npu", {}, {}, "", "chunks"),
        ("npu", {}, {"overlaps": False}, "", "none"),
        ("npu", {}, {"overlaps": False}, "chunks", "chunks"),
        ("npu", {"ranks": 2}, {}, "", "chunks"),
        ("npu", {"ranks": 2}, {}, "stream", "chunks"),
        ("npu", {"ranks": 2, "mode": "data"}, {}, "", "none"),
        ("npu", {"mode": "data"}, {}, "", "chunks"),
        ("npu", {"lora": object()}, {}, "", "none"),
        ("npu", {"encodes": True}, {}, "", "none"),
        ("npu", {}, {"can_encode": False}, "", "none"),
        ("npu", {}, {"encode_priority": "images"}, "stream", "none"),
        ("cuda", {"second": True}, {"encode_priority": "tokens"}, "", "chunks"),
        ("cuda", {}, {}, "stream", "stream"),
        ("cuda", {}, {}, "none", "none"),
    ],
)
def test_overlap_depends_on_platform_ranks_and_priority(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    engine_args: dict[str, Any],
    more: dict[str, Any],
    forced: str,
    expected: str,
) -> None:
    monkeypatch.setenv("EPD_ENCODE_OVERLAP", forced)
    assert overlap_of(engine(**engine_args), instance(platform, **more)) == expected


class Device(CpuPlatform):
    """The CPU as a device with two streams.

    Attributes:
        on: Name of the current stream.
        raised: The stream of steps goes first.
    """

    on = "engine"
    raised = False

    def raise_current_stream(self) -> None:
        self.raised = True

    @contextmanager
    def _on(self) -> Iterator[None]:
        self.on = "encode"
        yield
        self.on = "engine"

    def stream(self, index: int, use: str = "copy") -> Any:
        assert use in ("encode", "current")
        return self._on() if use == "encode" else nullcontext()


@pytest.fixture
def device() -> Device:
    return Device()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Module()
        inner = torch.nn.ModuleList([torch.nn.Identity()])
        self.visual.blocks = torch.nn.ModuleList([torch.nn.Sequential(inner), torch.nn.Identity()])
        self.language = torch.nn.Module()
        self.language.layers = torch.nn.ModuleList([torch.nn.Identity()])

    def get_language_model(self) -> Any:
        return self.language

    def embed_multimodal(self, **arguments: Any) -> Any:
        return ("eager", arguments)


@pytest.mark.parametrize(
    ("overlap", "kind", "raised"),
    [
        ("none", StepEncoder, False),
        ("turns", BackgroundEncoder, False),
        ("chunks", ChunkEncoder, False),
        ("stream", ChunkEncoder, True),
    ],
)
def test_encoder_stops_before_blocks_of_encoder_only(
    device: Device, overlap: Any, kind: type, raised: bool
) -> None:
    model = Model()
    runner = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
    copies = DeviceCopies(device, 0)
    encoder = make_encoder(overlap, runner, engine(), instance(), copies)
    assert type(encoder) is kind
    assert device.raised is raised
    hooked = {name for name, each in model.named_modules() if each._forward_pre_hooks}
    parts = {"0", "0.0", "0.0.0", "1"}
    assert hooked >= {f"visual.blocks.{each}" for each in parts if overlap != "none"}
    if kind is ChunkEncoder:
        assert len(hooked) == len(parts), "no module that is not within a block"
        assert encoder._blocks_embeds == 2 * 2 * device.traits.encode_chunk_embeds
    assert not model.language.layers[0]._forward_pre_hooks
    encoder.close()


def test_compiled_encoder_has_no_hooks(device: Device) -> None:
    model = Model()
    runner = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
    copies = DeviceCopies(device, 0)
    encoder = make_encoder("chunks", runner, engine(compiled=True), instance(), copies)
    assert not any(each._forward_pre_hooks for each in model.modules())
    encoder.close()


class Graphs:
    """Captured graphs for images of at most 64 embeddings."""

    graph_pool: object = "pool"

    def supports_modality(self, modality: str) -> bool:
        return modality == "image"

    def execute(self, arguments: dict[str, Any]) -> Any:
        return ("graph",)


@pytest.mark.parametrize(
    ("overlap", "modality", "captured", "expected"),
    [
        ("stream", "image", True, "graph"),
        ("stream", "image", False, "eager"),
        ("stream", "audio", True, "eager"),
        ("chunks", "image", True, "eager"),
    ],
)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_graph_of_encoder_is_replayed_on_its_stream(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    overlap: Any,
    modality: str,
    captured: bool,
    expected: str,
    second: bool,
) -> None:
    batches = [(modality, 1, {})]
    monkeypatch.setattr(utils, "group_and_batch_mm_kwargs", lambda *_, **__: batches)
    model, graphs = Model(), Graphs()
    monkeypatch.setattr(model, "embed_multimodal", lambda **_: ("eager",))
    if not captured:
        monkeypatch.setattr(graphs, "graph_pool", None)
    parts: dict[str, Any] = {"encoder_cudagraph_manager": graphs}
    if second:
        encoder_runner = SimpleNamespace(cudagraph_manager=graphs)
        parts = {"model_state": SimpleNamespace(encoder_runner=encoder_runner)}
    runner = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"), **parts)
    monkeypatch.setattr(device, "adopt", lambda _: None)
    encoder = make_encoder(overlap, runner, engine(), instance(), DeviceCopies(device, 0))
    encoder.submit(EncodeOrder(mm_hash="owl", modality=modality, media=None))
    cache: dict[str, Any] = {}
    for _ in range(2):
        encoder.place(cache)
    assert cache == {"owl": expected}
    encoder.close()


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of a device that tensors have, and their peak."""
    found = [0, 0]
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: found[0])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: found[1])
    return found


def test_peak_of_encoder_is_measured_without_steps(allocated: list[int]) -> None:
    model = Model()

    def encode(**arguments: Any) -> Any:
        allocated[:] = 150, 400
        return arguments

    model.embed_multimodal = encode
    allocated[:] = 100, 120
    with encoder_measured(model) as peak:
        assert peak() == 0
        assert model.embed_multimodal(pixels=1) == {"pixels": 1}
        allocated[:] = 100, 9000
    assert peak() == 300
    assert model.embed_multimodal is encode


def test_graphs_of_steps_and_encoder_have_own_streams(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    waits: list[str] = []

    class Event(PassedEvent):
        def wait(self) -> None:
            waits.append(device.on)

    def record_event() -> DeviceEvent:
        return Event()

    def capture(self: Any, graph_pool: Any) -> Any:
        return device.on, graph_pool

    monkeypatch.setattr(device, "record_event", record_event)
    monkeypatch.setattr(EncoderCudaGraphManager, "capture", capture)
    before = parallel_state.GraphCaptureContext
    plain: Any = object()
    manager = EncoderCudaGraphManager.__new__(EncoderCudaGraphManager)
    with captured_apart(device, 0):
        assert parallel_state.GraphCaptureContext(plain).stream is current_stream()
        assert manager.capture("pool") == ("encode", "pool")
        assert waits == ["encode"]
    assert parallel_state.GraphCaptureContext is before
    assert manager.capture("pool") == ("engine", "pool")


class WorkerOfPlatform:
    """A platform's worker that profiles a model, and captures its graphs."""

    captured: tuple[Any, ...] = ()

    def determine_available_memory(self) -> int:
        self.model_runner.model.embed_multimodal()
        return 1 << 30

    def compile_or_warm_up_model(self) -> str:
        self.captured = (parallel_state.GraphCaptureContext,)
        return "warm"


@pytest.mark.parametrize(
    ("overlap", "kv_bytes", "left"),
    [
        ("none", None, 1 << 30),
        ("chunks", None, (1 << 30) - (4 << 20)),
        ("stream", None, (1 << 30) - (4 << 20)),
        ("chunks", 1 << 20, 1 << 30),
    ],
)
def test_worker_leaves_memory_to_the_encoder(
    device: Device,
    allocated: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overlap: str,
    kv_bytes: int | None,
    left: int,
) -> None:
    monkeypatch.setattr(worker, "get_ec_transfer", lambda: SimpleNamespace(overlap=overlap))
    monkeypatch.setattr(worker.registry, "get", lambda _: device)
    kind = type("Made", (worker._WorkerMixin, WorkerOfPlatform), {"_traits": TRAITS["npu"]})
    made: Any = kind()
    model = Model()

    def encode() -> None:
        allocated[:] = 0, 4 << 20

    model.embed_multimodal = encode
    made.model_runner = SimpleNamespace(
        model=model, get_model=lambda: model, device=torch.device("cpu")
    )
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_bytes))
    with caplog.at_level(logging.INFO):
        assert made.determine_available_memory() == left
    assert ("4 MiB are left to the encoder" in caplog.text) == (left < 1 << 30)
    assert made.compile_or_warm_up_model() == "warm"
    apart = made.captured != (parallel_state.GraphCaptureContext,)
    assert apart == (overlap == "stream")

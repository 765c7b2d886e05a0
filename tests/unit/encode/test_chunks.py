"""Items that a worker encodes in chunks at the beginning of its steps."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from epd_portable.encode.chunks import ChunkEncoder, ResumableCalls
from epd_portable.items.placer import EncodeOrder
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.cpu import CpuPlatform
from epd_portable.transfer.copies import DeviceCopies

CHUNK = 8
"""Embeddings whose encoder is one chunk."""
LAYERS = 4


class RecordedEvent(DeviceEvent):
    """An event that is in the list of operations, and passes when a test says so."""

    def __init__(self, device: RecordingPlatform) -> None:
        self.device, self.number = device, device.events
        device.note(f"event {self.number}")

    def wait(self) -> None:
        self.device.note(f"wait {self.number}")

    def done(self) -> bool:
        return self.number < self.device.passed

    def block(self) -> None:
        raise AssertionError("the host never waits")


class RecordingPlatform(CpuPlatform):
    """The CPU as a device that notes each operation with its stream.

    Attributes:
        passed: Events with a smaller number have passed.
    """

    traits = dataclasses.replace(CpuPlatform.traits, encode_chunk_embeds=CHUNK)

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.events = 0
        self.passed = 1 << 30
        self._streams = threading.local()

    def note(self, operation: str) -> None:
        stream = getattr(self._streams, "name", "engine")
        self.operations.append(f"{stream}: {operation}")

    def take(self) -> list[str]:
        taken, self.operations = self.operations, []
        return taken

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before = getattr(self._streams, "name", "engine")
        self._streams.name = name
        yield
        self._streams.name = before

    def stream(self, index: int, use: str = "copy") -> Any:
        return self._on(getattr(self._streams, "name", "engine") if use == "current" else use)

    def record_event(self) -> DeviceEvent:
        event = RecordedEvent(self)
        self.events += 1
        return event

    def adopt(self, tensor: torch.Tensor) -> None:
        self.note("adopt")


class Part(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Layer(torch.nn.Module):
    """A block of several modules, called around torch's hooks if its number is even.

    Blocks share a module.
    """

    def __init__(self, platform: RecordingPlatform, number: int, shared: Part) -> None:
        super().__init__()
        self.platform, self.number = platform, number
        self.before, self.after, self.shared = Part(), Part(), shared

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) if self.number % 2 else self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        self.platform.note(f"layer {self.number}")
        if x.flatten()[0] == 100 + self.number:
            raise RuntimeError("a broken layer")
        if x.flatten()[0] == 200 + self.number:
            raise torch.OutOfMemoryError("a full device")
        return self.after(self.shared(x * 2) + self.number)


class Tower:
    def __init__(self, platform: RecordingPlatform) -> None:
        shared = Part()
        self.layers = [Layer(platform, number, shared) for number in range(LAYERS)]

    def encode(self, item: EncodeOrder) -> torch.Tensor:
        output = torch.full((item.num_embeds, 3), float(item.media))
        assert output.is_inference()
        for layer in self.layers:
            output = layer(output)
        return output


@pytest.fixture
def platform() -> RecordingPlatform:
    return RecordingPlatform()


@pytest.fixture
def tower(platform: RecordingPlatform) -> Tower:
    return Tower(platform)


def order(name: str, num_embeds: int = 2 * CHUNK, seed: float = 1) -> EncodeOrder:
    return EncodeOrder(mm_hash=name, modality="image", media=seed, num_embeds=num_embeds)


@contextmanager
def encoding(tower: Tower, platform: RecordingPlatform, **more: Any) -> Iterator[ChunkEncoder]:
    copies = DeviceCopies(platform, 0)
    encoder = ChunkEncoder(tower.encode, tower.layers, copies, "tokens", **more)
    try:
        yield encoder
    finally:
        encoder.close()
    assert not any(part._forward_pre_hooks for layer in tower.layers for part in layer.modules())
    assert "epd-encoder" not in [each.name for each in threading.enumerate()]


@pytest.fixture
def encoder(tower: Tower, platform: RecordingPlatform) -> Iterator[ChunkEncoder]:
    with encoding(tower, platform) as made:
        yield made


@pytest.fixture
def aside(tower: Tower, platform: RecordingPlatform) -> Iterator[ChunkEncoder]:
    with encoding(tower, platform, aside=True) as made:
        yield made


def layers(operations: list[str]) -> list[int]:
    return [int(each.split()[-1]) for each in operations if "layer" in each]


def expected(item: EncodeOrder, tower: Tower) -> torch.Tensor:
    with torch.inference_mode():
        return tower.encode(item)


@pytest.mark.parametrize(("num_embeds", "chunks"), [(1, 1), (8, 1), (16, 2), (24, 4), (999, 4)])
def test_step_computes_chunk_by_size_of_item(
    encoder: ChunkEncoder, tower: Tower, platform: RecordingPlatform, num_embeds: int, chunks: int
) -> None:
    item = order("owl", num_embeds)
    encoder.submit(item)
    cache: dict[str, torch.Tensor] = {}
    for left in reversed(range(chunks)):
        encoder.place(cache)
        assert len(layers(platform.take())) == LAYERS // chunks
        assert ("owl" in cache) == (left == 0)
        assert encoder.take_ended() == (set(), set() if left else {"owl"})
    assert torch.equal(cache["owl"], expected(item, tower))


def test_items_are_computed_one_after_the_other(
    encoder: ChunkEncoder, platform: RecordingPlatform
) -> None:
    encoder.submit(order("a"))
    encoder.submit(order("b"))
    cache: dict[str, torch.Tensor] = {}
    ended = []
    for _ in range(5):
        encoder.place(cache)
        ended.append(encoder.take_ended()[1])
    assert layers(platform.take()) == [0, 1, 2, 3] * 2
    assert ended == [set(), {"a"}, set(), {"b"}, set()]


def test_idle_engine_computes_an_item_as_a_whole(
    encoder: ChunkEncoder, platform: RecordingPlatform
) -> None:
    encoder.submit(order("a", 999))
    encoder.submit(order("b", 999))
    cache: dict[str, torch.Tensor] = {}
    platform.passed = 0
    encoder.place(cache, computes=False)
    encoder.place(cache, computes=False)
    assert list(cache) == ["a"], "the device has not computed it"
    platform.passed = 1
    encoder.place(cache, computes=False)
    assert list(cache) == ["a", "b"]


def test_several_ranks_compute_chunks_without_tokens(
    tower: Tower, platform: RecordingPlatform
) -> None:
    with encoding(tower, platform, ranks=2) as encoder:
        platform.passed = 0
        encoder.submit(order("a", 999))
        cache: dict[str, torch.Tensor] = {}
        for computes in (True, False, True, False):
            assert not cache
            encoder.place(cache, computes=computes)
        assert list(cache) == ["a"]


@pytest.mark.parametrize(
    ("seed", "message"), [(200, "a full device"), (100, "by one of 2 ranks")], ids=["memory", "any"]
)
def test_rank_that_fails_within_encoder_ends_several(
    tower: Tower, platform: RecordingPlatform, seed: int, message: str
) -> None:
    with encoding(tower, platform, ranks=2) as encoder:
        encoder.submit(order("a", 1, seed=seed))
        with pytest.raises(RuntimeError, match=message):
            encoder.place({})
        # A step that was queued before the engine ends.
        encoder.place({})
        assert encoder.take_ended() == ({"a"}, set())


def test_chunk_is_behind_steps_on_its_own_stream(
    aside: ChunkEncoder, tower: Tower, platform: RecordingPlatform
) -> None:
    item = order("owl")
    cache: dict[str, torch.Tensor] = {}
    platform.passed = 0
    aside.submit(item)
    aside.place(cache)
    assert platform.take() == [
        "engine: event 0",
        "encode: wait 0",
        "encode: layer 0",
        "encode: layer 1",
        "encode: event 1",
    ]
    aside.place(cache)
    assert platform.take() == [], "no chunk before the first is computed"
    platform.passed = 2
    aside.place(cache)
    assert platform.take() == ["encode: layer 2", "encode: layer 3", "encode: event 2"]
    aside.place(cache)
    assert (platform.take(), cache) == ([], {}), "no output before it is computed"
    platform.passed = 3
    aside.place(cache)
    assert platform.take() == ["engine: wait 2", "engine: adopt"]
    assert aside.take_ended() == (set(), {"owl"})
    assert torch.equal(cache["owl"], expected(item, tower))


def test_step_that_encodes_waits_for_chunk_on_device(
    aside: ChunkEncoder, platform: RecordingPlatform
) -> None:
    aside.wait()
    aside.submit(order("owl"))
    aside.place({})
    platform.take()
    aside.wait()
    assert platform.take() == ["engine: wait 1"]
    aside.place({})
    # The next chunk waits for that step in turn; one after it does not.
    assert platform.take()[:3] == ["engine: event 2", "encode: wait 2", "encode: layer 2"]
    aside.submit(order("elk"))
    aside.place({})
    assert "encode: wait 2" not in platform.take()


@pytest.mark.parametrize("is_aside", [False, True])
@pytest.mark.parametrize("layer", [0, 3])
def test_failed_item_is_reported_and_the_next_encoded(
    tower: Tower,
    platform: RecordingPlatform,
    caplog: pytest.LogCaptureFixture,
    layer: int,
    is_aside: bool,
) -> None:
    seed = float(100 + layer)
    for number in reversed(range(layer)):  # What becomes that in this layer.
        seed = (seed - number) / 2
    with encoding(tower, platform, aside=is_aside) as encoder:
        encoder.submit(order("broken", seed=seed))
        encoder.submit(order("b"))
        cache: dict[str, torch.Tensor] = {}
        failed: set[str] = set()
        for _ in range(6):
            encoder.place(cache)
            failed |= encoder.take_ended()[0]
    assert failed == {"broken"}
    assert list(cache) == ["b"]
    assert "a broken layer" in caplog.text


@pytest.mark.parametrize("is_aside", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_reset_fails_items_that_are_not_placed(
    tower: Tower, platform: RecordingPlatform, steps: int, is_aside: bool
) -> None:
    with encoding(tower, platform, aside=is_aside) as encoder:
        encoder.submit(order("old"))
        encoder.submit(order("queued"))
        for _ in range(steps):
            encoder.place({})
        encoder.reset()
        assert encoder.take_ended() == ({"old", "queued"}, set())
        item = order("new", seed=3)
        encoder.submit(item)
        cache: dict[str, torch.Tensor] = {}
        for _ in range(3):
            encoder.place(cache)
        assert encoder.take_ended() == (set(), {"new"})
        assert torch.equal(cache["new"], expected(item, tower))


def test_item_without_embeddings_fails_alone(encoder: ChunkEncoder) -> None:
    encoder.submit(order("empty", 0))
    encoder.place({})
    assert encoder.take_ended() == ({"empty"}, set())


def test_closing_ends_an_item_halfway(tower: Tower, platform: RecordingPlatform) -> None:
    with encoding(tower, platform) as encoder:
        encoder.submit(order("owl"))
        encoder.place({})
    assert layers(platform.take()) == [0, 1]


@pytest.mark.parametrize("error", [None, ValueError("while it ends")], ids=["ends", "fails"])
def test_call_is_cancelled_though_it_catches_exceptions(error: Exception | None) -> None:
    calls = ResumableCalls("test")
    ends: list[str] = []

    def call() -> None:
        try:
            calls.stop()
        except Exception:
            ends.append("caught")
        finally:
            ends.append("left")
            if error is not None:
                raise error

    calls.begin(call)
    assert not calls.resume()
    calls.cancel()
    assert ends == ["left"]
    calls.begin(calls.stop)
    assert [calls.resume(), calls.resume()] == [False, True], "the next call is not cancelled"
    assert calls.resume(), "no call is left"
    calls.close()
    calls.close()

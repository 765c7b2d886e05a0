"""An encoder on a stream of its own: each wait that is left out must show as wrong bytes.

The simulated runtime's streams are threads, and what they do takes effect late where a test says
so. Every fault is seeded here, by leaving out one wait of the real code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from ascend_sim.memory import delay

from epd_portable.encode.chunks import ChunkEncoder
from epd_portable.items.placer import EncodeOrder
from epd_portable.platforms import registry
from epd_portable.platforms.npu import NpuPlatform
from epd_portable.transfer.copies import DeviceCopies
from tests.npu_sim.transfer.forgetful import Forgetful
from tests.waiting import until

DELAY_US = 800_000
SHAPE = (64, 128)
INDEX = 0


def pinned(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value).pin_memory()


class Worker:
    """A worker whose encoder copies its weights, late.

    Attributes:
        late: The encoder's stream rests before.
    """

    def __init__(self, platform: NpuPlatform) -> None:
        platform.set_device(INDEX)
        self.platform = platform
        self.device = platform.device(INDEX)
        self.weights = torch.ones(SHAPE, device=self.device)
        self.late = True
        self.cache: dict[str, torch.Tensor] = {}
        copies = DeviceCopies(platform, INDEX)
        self.encoder = ChunkEncoder(self._encode, [], copies, aside=True)
        torch.npu.synchronize()

    def _encode(self, item: EncodeOrder) -> torch.Tensor:
        output = torch.empty(SHAPE, device=self.device)
        if self.late:
            delay(torch.npu.current_stream(), DELAY_US)
        return output.copy_(self.weights, non_blocking=True)

    def set_weights(self, value: float) -> None:
        """Queue a copy of other weights on the stream of the steps."""
        self.weights.copy_(pinned(value), non_blocking=True)

    def begin(self, name: str) -> None:
        """Begin an item with a step."""
        self.encoder.submit(EncodeOrder(mm_hash=name, modality="image", media=None))
        self.encoder.place(self.cache)

    def placed(self, name: str) -> torch.Tensor:
        """Return an item, from the first step that has it."""

        def is_there() -> bool:
            self.encoder.place(self.cache)
            return name in self.cache

        until(is_there)
        return self.cache[name]

    def close(self) -> None:
        torch.npu.synchronize()
        self.encoder.close()


MakeWorker = Callable[[NpuPlatform], Worker]


@pytest.fixture
def make() -> Iterator[MakeWorker]:
    made: list[Worker] = []

    def worker(platform: NpuPlatform) -> Worker:
        made.append(Worker(platform))
        return made[-1]

    yield worker
    for each in made:
        each.close()


@pytest.fixture
def worker(make: MakeWorker) -> Worker:
    platform = registry.get("npu")
    assert isinstance(platform, NpuPlatform)
    return make(platform)


@pytest.fixture
def forgetful(make: MakeWorker) -> Worker:
    return make(Forgetful())


def test_steps_are_computed_while_an_item_is_encoded(worker: Worker) -> None:
    begin_s = time.monotonic()
    worker.begin("owl")
    step = torch.ones(SHAPE, device=worker.device) + 1
    worker.platform.record_event().synchronize(60)
    worker.encoder.place(worker.cache)
    assert time.monotonic() - begin_s < DELAY_US / 1e6, "the host or the steps' stream waited"
    assert "owl" not in worker.cache
    assert step.eq(2).all()
    assert (worker.placed("owl") + 0).eq(1).all()


def test_step_before_the_event_reads_wrong_bytes(forgetful: Worker) -> None:
    forgetful.set_weights(2)
    torch.npu.synchronize()
    with forgetful.platform.stream(INDEX, "encode"):
        torch.full(SHAPE, -1.0).to(forgetful.device)
    torch.npu.synchronize()
    forgetful.begin("owl")
    assert not (forgetful.placed("owl") + 0).cpu().eq(2).all()


def weights_encoded(worker: Worker) -> torch.Tensor:
    """Return the output of an item that was begun right behind late weights."""
    worker.late = False
    delay(torch.npu.current_stream(worker.device), DELAY_US)
    worker.set_weights(3)
    worker.begin("owl")
    output = worker.placed("owl")
    torch.npu.synchronize()
    return output.cpu()


def test_encoder_has_the_weights_of_earlier_steps(worker: Worker) -> None:
    assert weights_encoded(worker).eq(3).all()


def test_encoder_before_earlier_steps_has_old_weights(forgetful: Worker) -> None:
    assert not weights_encoded(forgetful).eq(3).all()


def read_late(worker: Worker) -> torch.Tensor:
    """Return the content that a late step reads of an item that is forgotten meanwhile."""
    worker.late = False
    worker.begin("owl")
    placed = worker.placed("owl")
    torch.npu.synchronize()
    read = torch.empty(SHAPE, pin_memory=True)
    delay(torch.npu.current_stream(worker.device), DELAY_US)
    read.copy_(placed, non_blocking=True)
    del placed, worker.cache["owl"]
    with worker.platform.stream(INDEX, "encode"):
        torch.empty(SHAPE, device=worker.device).copy_(pinned(5), non_blocking=True)
    torch.npu.synchronize()
    return read


def test_output_memory_is_not_reused_before_its_readers_end(worker: Worker) -> None:
    assert read_late(worker).eq(1).all()


def test_output_without_adoption_is_reused_too_early(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NpuPlatform, "adopt", lambda *_: None)
    assert not read_late(worker).eq(1).all()

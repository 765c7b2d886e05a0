from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICE = torch.device("npu", 0)
DELAY_US = 500_000


@pytest.fixture(scope="module", autouse=True)
def _used_before() -> None:
    """Use the device and its streams once: the first use takes longer than the delay."""
    torch.npu.set_device(DEVICE)
    x = torch.ones(4).to(DEVICE).add_(1)
    with torch.npu.stream(torch.npu.Stream()):
        x * 2
    torch._foreach_add_([x], 1)
    read_on_another_stream(x, waits=True)
    torch.npu.synchronize()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from ascend_sim import dispatch  # It is imported by torch, not before it.

    monkeypatch.setattr(dispatch, "OP_US", DELAY_US)
    yield
    torch.npu.synchronize()


def event_after_everything() -> torch.npu.Event:
    event = torch.npu.Event()
    event.record()
    return event


def test_an_operator_is_complete_at_once_by_default() -> None:
    x = torch.ones(8, device=DEVICE) + 1
    event = event_after_everything()
    torch.npu.current_stream().synchronize()
    assert event.query()
    assert x.tolist() == [2.0] * 8


@pytest.mark.usefixtures("late")
def test_a_late_operator_is_not_complete_before_its_stream_is() -> None:
    x = torch.ones(8).to(DEVICE)
    y = x + 1
    event = event_after_everything()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert y.cpu().tolist() == [2.0] * 8


def read_on_another_stream(of: torch.Tensor, *, waits: bool) -> list[float]:
    """Copy to pinned memory on a side stream, and return what arrived there."""
    side, pinned = torch.npu.Stream(), torch.empty(of.shape, pin_memory=True)
    if waits:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        pinned.copy_(of, non_blocking=True)
    side.synchronize()
    return pinned.tolist()


@pytest.mark.usefixtures("late")
def test_a_side_stream_that_does_not_wait_reads_old_data() -> None:
    x = torch.zeros(4).to(DEVICE)
    x.add_(5)
    assert read_on_another_stream(x, waits=False) == [0.0] * 4
    assert read_on_another_stream(x, waits=True) == [5.0] * 4


@pytest.mark.usefixtures("late")
def test_operator_on_an_unsynchronized_stream_reads_old_data() -> None:
    x, side = torch.zeros(4).to(DEVICE), torch.npu.Stream()
    x.add_(5)
    with torch.npu.stream(side):
        early = x * 2
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        ordered = x * 2
    torch.npu.synchronize()
    assert early.tolist() == [0.0] * 4
    assert ordered.tolist() == [10.0] * 4


@pytest.mark.usefixtures("late")
def test_vendor_operators_and_lists_of_tensors_are_late_as_well() -> None:
    tokens, slots = torch.ones(1, 1, 8).to(DEVICE), torch.tensor([1]).to(DEVICE)
    caches = [torch.zeros(1, 2, 1, 8).to(DEVICE) for _ in range(2)]
    torch.ops.npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, slots, cache_mode="Norm")
    assert sum(read_on_another_stream(caches[1].reshape(-1), waits=False)) == 0
    torch.npu.synchronize()
    assert caches[1].sum().item() == 8
    many = [torch.zeros(4).to(DEVICE) for _ in range(2)]
    torch._foreach_add_(many, 1)
    assert read_on_another_stream(many[1], waits=False) == [0.0] * 4
    torch.npu.synchronize()
    assert many[1].tolist() == [1.0] * 4


@pytest.mark.usefixtures("late")
def test_late_operators_on_one_stream_keep_their_order() -> None:
    x = torch.arange(6.0).to(DEVICE)
    for _ in range(3):
        x = (x + 1).mul_(2)
    assert x.cpu().tolist() == [14.0 + 8 * i for i in range(6)]

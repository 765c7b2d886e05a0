"""Order between the copy stream and the compute stream, with copies slowed down to show it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from epd_portable.errors import TransportTimeoutError
from epd_portable.platforms.accelerator import AcceleratorPlatform
from epd_portable.platforms.base import DeviceEvent, Platform
from tests.devices.blocking import block_aside

COPY_S = 0.5
ELEMENTS = 1 << 16
AMPLE_S = 20.0


@pytest.fixture(autouse=True)
def _each_test_starts_idle() -> None:
    torch.npu.synchronize("npu:0")
    torch.npu.set_device(0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_COPY_US", str(int(COPY_S * 1e6)))


def pinned(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value).pin_memory()


def queue_slow_fill(npu: Platform, target: torch.Tensor, value: float) -> DeviceEvent:
    """Queue two copies into ``target`` on the copy stream; only the second writes ``value``."""
    with npu.stream(0):
        for each in (0.5, value):
            target.copy_(pinned(each), non_blocking=True)
        return npu.record_event()


def test_copies_on_the_copy_stream_run_beside_the_caller(npu: Platform, slow: None) -> None:
    target, source = torch.zeros(ELEMENTS, device="npu:0"), pinned(1)
    torch.npu.synchronize("npu:0")
    start_s = time.monotonic()
    with npu.stream(0):
        target.copy_(source, non_blocking=True)
        event = npu.record_event()
    assert not event.done()
    assert time.monotonic() - start_s < COPY_S
    event.synchronize(AMPLE_S)
    assert event.done()
    assert time.monotonic() - start_s >= COPY_S


def test_the_copy_stream_of_a_device_is_always_the_same_and_not_the_engines(npu: Platform) -> None:
    with npu.stream(0):
        first = torch.npu.current_stream()
    with npu.stream(0):
        assert torch.npu.current_stream() == first
    with npu.stream(1):
        assert torch.npu.current_stream() != first
    assert torch.npu.current_stream("npu:0") != first


def test_who_copies_does_not_wait_for_who_pins_memory(npu: AcceleratorPlatform) -> None:
    entered: list[bool] = []

    def enter() -> None:
        with npu.stream(0):
            entered.append(True)

    enter()
    thread = threading.Thread(target=enter, daemon=True)
    with npu._lock:
        thread.start()
        thread.join(AMPLE_S)
    assert entered == [True, True]


def test_an_event_that_does_not_pass_is_an_error_at_the_deadline(npu: Platform, slow: None) -> None:
    event = queue_slow_fill(npu, torch.zeros(ELEMENTS, device="npu:0"), 1)
    start_s = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"not complete after 0\.02 s"):
        event.synchronize(0.02)
    assert time.monotonic() - start_s < COPY_S
    event.synchronize(AMPLE_S)


def test_a_thread_that_blocks_until_an_event_has_passed_holds_up_no_other(
    npu: Platform, slow: None
) -> None:
    event = queue_slow_fill(npu, torch.zeros(ELEMENTS, device="npu:0"), 1)
    turns, spent_s = block_aside(npu, event)
    assert turns > 20, "the thread kept Python's lock while it waited"
    assert spent_s < COPY_S, "the thread asked again and again"


def test_waiting_on_a_stream_does_not_block_the_caller(npu: Platform, slow: None) -> None:
    event = queue_slow_fill(npu, torch.zeros(ELEMENTS, device="npu:0"), 1)
    start_s = time.monotonic()
    event.wait()
    assert time.monotonic() - start_s < COPY_S
    event.synchronize(AMPLE_S)

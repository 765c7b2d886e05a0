"""Order: what is asynchronous, what a missing wait shows, and where failures come out."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from ci.ascend_sim.tests.runtime import acl

SIZE = 1 << 16


@pytest.mark.parametrize("wait", [False, True])
def test_source_overwritten_too_early_changes_what_is_copied(
    wait: bool, slow_copies: float
) -> None:
    source = torch.ones(SIZE, dtype=torch.uint8).pin_memory()
    device = torch.zeros(SIZE, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    device.copy_(source, non_blocking=True)
    if wait:
        torch.npu.current_stream().synchronize()
    source.fill_(2)

    assert int(device.cpu()[0]) == (1 if wait else 2)


def fail(stream: int) -> None:
    """Queue work that fails: a copy into memory that is gone when it runs."""
    with acl.pinned(SIZE) as host:
        address = acl.malloc(SIZE)
        gate = threading.Event()
        wait_at = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(120) and None)
        acl.call("aclrtLaunchHostFunc", stream, wait_at, None)
        acl.call("aclrtMemcpyAsync", address, SIZE, host, SIZE, acl.HOST_TO_DEVICE, stream)
        acl.free(address)
        with acl.event() as passed:
            acl.call("aclrtRecordEvent", passed, stream)
            gate.set()
            acl.code_of("aclrtSynchronizeEvent", passed)


def test_a_stream_tells_of_its_failure_once() -> None:
    with acl.stream() as stream:
        fail(stream)

        assert acl.code_of("aclrtSynchronizeStream", stream) == acl.DEVICE_MEM_ERROR
        assert acl.code_of("aclrtSynchronizeStream", stream) == acl.SUCCESS


def test_waiting_for_the_device_tells_of_a_failure_on_any_stream() -> None:
    with acl.stream() as stream:
        fail(stream)

        assert acl.code_of("aclrtSynchronizeDevice") == acl.DEVICE_MEM_ERROR


def test_an_event_after_a_failure_does_not_look_like_success() -> None:
    state = ctypes.c_int()
    with acl.stream() as stream, acl.stream() as other, acl.event() as event:
        fail(stream)
        acl.call("aclrtRecordEvent", event, stream)
        acl.call("aclrtStreamWaitEvent", other, event)

        assert acl.code_of("aclrtSynchronizeEvent", event) == acl.DEVICE_MEM_ERROR
        assert "freed device memory" in acl.message()
        assert acl.code_of("aclrtQueryEventStatus", event, ctypes.byref(state)) != acl.SUCCESS
        assert acl.code_of("aclrtSynchronizeStream", other) == acl.DEVICE_MEM_ERROR
        acl.code_of("aclrtSynchronizeStream", stream)


def test_waits_end_at_their_timeout() -> None:
    with acl.stream() as stream, acl.event() as event:
        acl.call("ascend_sim_delay", stream, 300_000)
        acl.call("aclrtRecordEvent", event, stream)

        codes = [
            acl.code_of("aclrtSynchronizeStreamWithTimeout", stream, 20),
            acl.code_of("aclrtSynchronizeEventWithTimeout", event, 20),
        ]

        assert codes == [acl.STREAM_SYNC_TIMEOUT, acl.EVENT_SYNC_TIMEOUT]
        acl.call("aclrtSynchronizeStream", stream)


def test_host_functions_run_in_the_order_of_their_stream() -> None:
    calls: list[int] = []
    record = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: calls.append(number or 0))
    with acl.stream() as stream:
        acl.call("ascend_sim_delay", stream, 20_000)
        for number in range(5):
            acl.call("aclrtLaunchHostFunc", stream, record, number)
        assert calls == []
        acl.call("aclrtSynchronizeStream", stream)

    assert calls == [0, 1, 2, 3, 4]


def test_destroyed_stream_has_completed_and_is_unknown() -> None:
    calls: list[int] = []
    record = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: calls.append(number or 0))
    with acl.stream() as stream:
        acl.call("ascend_sim_delay", stream, 20_000)
        acl.call("aclrtLaunchHostFunc", stream, record, 1)

    assert calls == [1]
    assert acl.code_of("aclrtDestroyStream", stream) == acl.INVALID_PARAM


def test_the_time_between_events_needs_both_recorded() -> None:
    milliseconds = ctypes.c_float()
    with acl.stream() as stream, acl.event() as start, acl.event() as end:
        acl.call("aclrtRecordEvent", start, stream)
        acl.call("ascend_sim_delay", stream, 30_000)
        acl.call("aclrtSynchronizeStream", stream)
        early = acl.code_of("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)
        acl.call("aclrtRecordEvent", end, stream)
        acl.call("aclrtSynchronizeStream", stream)
        acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)

    assert early == acl.INVALID_PARAM
    assert milliseconds.value >= 30


def test_unrecorded_event_is_not_ready_and_does_not_block() -> None:
    event = torch.npu.Event()
    torch.npu.current_stream().wait_event(event)
    torch.npu.current_stream().synchronize()
    state = ctypes.c_int(9)
    with acl.event() as handle:
        acl.call("aclrtQueryEventStatus", handle, ctypes.byref(state))
        acl.call("aclrtSynchronizeEvent", handle)

    assert state.value == 0

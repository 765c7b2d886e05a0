"""Graphs: what a capture keeps, and what spoils it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ci.ascend_sim.tests.runtime import acl

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
DEPENDENCY, UNJOINED, STREAM_CAPTURED, EVENT_CAPTURED = 107024, 107025, 107027, 107028
BLOCKING, WRONG_THREAD, INVALIDATED = 107030, 107038, 507903
SIZE = 4096


class Capture:
    """A capture on ``stream``, next to another one, and memory of the device and of the host."""

    graph: int | None = None

    def __init__(self, stream: int, other: int, memory: int, pinned: int) -> None:
        self.stream, self.other, self.memory, self.pinned = stream, other, memory, pinned

    def begin(self, mode: int = GLOBAL) -> None:
        acl.call("aclmdlRICaptureBegin", self.stream, mode)

    def copy(self, stream: int) -> int:
        return acl.code_of(
            *("aclrtMemcpyAsync", self.memory, SIZE, self.pinned, SIZE, acl.HOST_TO_DEVICE, stream)
        )

    def end(self) -> int:
        """Return with which code it ends; sets `graph`, or ``None``."""
        graph = ctypes.c_void_p()
        code = acl.code_of("aclmdlRICaptureEnd", self.stream, ctypes.byref(graph))
        self.graph = graph.value
        return code

    def wait(self, stream: int, behind: int) -> int:
        """Let a stream wait for what another has been given."""
        with acl.event() as event:
            acl.call("aclrtRecordEvent", event, behind)
            return acl.code_of("aclrtStreamWaitEvent", stream, event)


@pytest.fixture
def capture() -> Iterator[Capture]:
    with (
        acl.stream() as stream,
        acl.stream() as other,
        acl.memory(SIZE) as memory,
        acl.pinned(SIZE) as pinned,
    ):
        yield (made := Capture(stream, other, memory, pinned))
        made.end()  # Of a test that has failed.


def test_capture_includes_a_stream_joined_by_an_event(capture: Capture) -> None:
    for ends, code in ((True, acl.SUCCESS), (False, UNJOINED)):
        capture.begin()
        assert capture.wait(capture.other, capture.stream) == acl.SUCCESS
        assert capture.copy(capture.other) == acl.SUCCESS
        if ends:
            assert capture.wait(capture.stream, capture.other) == acl.SUCCESS
        assert capture.end() == code
        assert acl.code_of("aclrtSynchronizeStream", capture.other) == acl.SUCCESS


@pytest.mark.parametrize("function", ["aclrtSynchronizeStream", "aclrtSynchronizeDevice"])
def test_the_host_may_not_wait_for_a_stream_of_the_capture(capture: Capture, function: str) -> None:
    capture.begin()
    stream = (capture.stream,) if function == "aclrtSynchronizeStream" else ()
    assert acl.code_of(function, *stream) == STREAM_CAPTURED
    assert capture.end() == INVALIDATED


def test_an_event_of_a_capture_passes_for_nobody_outside(capture: Capture) -> None:
    with acl.event() as event:
        capture.begin()
        acl.call("aclrtRecordEvent", event, capture.stream)
        assert capture.end() == acl.SUCCESS
        assert acl.code_of("aclrtSynchronizeEvent", event) == EVENT_CAPTURED
        assert acl.code_of("aclrtStreamWaitEvent", capture.other, event) == EVENT_CAPTURED
        acl.call("aclrtRecordEvent", event, capture.other)
        acl.call("aclrtSynchronizeEvent", event)


@contextmanager
def another_thread() -> Iterator[Callable[[Callable[[], int]], int]]:
    with ThreadPoolExecutor(1, initializer=lambda: acl.call("aclrtSetDevice", 0)) as pool:
        yield lambda call: pool.submit(call).result(20)


@pytest.mark.parametrize(
    ("mode", "own", "others"),
    [
        (GLOBAL, BLOCKING, BLOCKING),
        (THREAD_LOCAL, BLOCKING, acl.SUCCESS),
        (RELAXED, acl.SUCCESS, acl.SUCCESS),
    ],
)
def test_capture_mode_limits_synchronous_copies_by_thread(
    capture: Capture, mode: int, own: int, others: int
) -> None:
    content = bytes(SIZE)
    arguments = (capture.memory, SIZE, content, SIZE, acl.HOST_TO_DEVICE)

    def copy() -> int:
        return acl.code_of("aclrtMemcpy", *arguments)

    def copy_pageable() -> int:
        return acl.code_of("aclrtMemcpyAsync", *arguments, capture.other)

    with another_thread() as elsewhere:
        for call in (copy, copy_pageable):
            for run, code in ((lambda call: call(), own), (elsewhere, others)):
                capture.begin(mode)
                assert run(call) == code
                assert capture.end() == (INVALIDATED if code else acl.SUCCESS)


def test_capture_is_ended_by_its_own_thread_only(capture: Capture) -> None:
    capture.begin()
    with another_thread() as elsewhere:
        assert elsewhere(capture.end) == WRONG_THREAD
    assert capture.end() == acl.SUCCESS

"""Connections to instances, on real sockets: reuse, limits, and every way in which one can end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd_portable.router.http import upstream
from epd_portable.router.http.upstream import (
    LARGE_BYTES,
    MAX_HEAD_BYTES,
    MAX_WAITING_BYTES,
    InstanceAnswer,
    Upstream,
    UpstreamError,
    _Connection,
)
from epd_portable.wire.outcomes import FailureKind
from tests.listening import stop_listening
from tests.unit.router.transport import Transport

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Instance:
    """Answers each request by what a test says, and counts connections."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections: list[Streams] = []
        self.closed = asyncio.Event()
        self.behave: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]] = self._answer

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append((reader, writer))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, _, length = head.lower().partition(b"content-length: ")
                body = await reader.readexactly(int(length.partition(b"\r")[0] or 0))
                self.requests.append(head + body)
                await self.behave(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        writer.close()


Open = Callable[..., Awaitable[tuple[Instance, str]]]


@pytest.fixture
async def client() -> AsyncIterator[Upstream]:
    made = Upstream({"x-token": "t"})
    yield made
    await made.close()
    assert not made._connections


@pytest.fixture
async def listening() -> AsyncIterator[Open]:
    servers: list[tuple[asyncio.Server, Instance]] = []

    async def start(*answers: bytes) -> tuple[Instance, str]:
        instance = Instance(*answers)
        server = await asyncio.start_server(
            lambda *streams: instance.serve(*streams), "127.0.0.1", 0
        )
        servers.append((server, instance))
        return instance, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server, instance in servers:
        await stop_listening(server)
        for _, writer in instance.connections:
            writer.transport.abort()


async def fault_of(asking: Awaitable[Any]) -> FailureKind:
    with pytest.raises(UpstreamError) as caught:
        await asking
    return caught.value.kind


# Requests and connections.


async def test_a_request_is_sent_as_it_should_be(client: Upstream, listening: Open) -> None:
    instance, url = await listening(OK)
    body = [b"ab", memoryview(b"cd")]
    status, headers, data = await client.fetch(
        "POST", url + "/v1/x?q=1", body=body, headers={"x-a": "b"}, timeout_s=5
    )
    assert (status, headers, data) == (200, {"content-length": "2"}, b"ok")
    await client.fetch("GET", url, timeout_s=5)
    first, second = instance.requests
    host = url.removeprefix("http://").encode()
    common = b"host: %b\r\naccept-encoding: identity\r\nx-token: t\r\n" % host
    assert first == (
        b"POST /v1/x?q=1 HTTP/1.1\r\n" + common + b"x-a: b\r\ncontent-length: 4\r\n\r\nabcd"
    )
    assert second == b"GET / HTTP/1.1\r\n" + common + b"\r\n"


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb: c", "a\rb"])
async def test_a_header_cannot_become_two(client: Upstream, value: str) -> None:
    with pytest.raises(ValueError, match="headers"):
        await client.fetch("GET", "http://127.0.0.1:1/", headers={"a": value}, timeout_s=1)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nt: x\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "keeps"),
    [
        (OK, True),
        (CHUNKED, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", False),
        (OK + b"more", False),
        (OK + OK, False),
    ],
    ids=range(7),
)
async def test_a_connection_takes_one_request_after_the_other_if_it_can_be_kept(
    client: Upstream, listening: Open, answer: bytes, keeps: bool
) -> None:
    instance, url = await listening(answer)
    for _ in range(3):
        assert (await client.fetch("POST", url, body=b"x", timeout_s=5))[2] in (b"ok", b"")
    assert (len(instance.requests), len(instance.connections)) == (3, 1 if keeps else 3)


async def test_connections_at_rest_are_closed_in_time(
    client: Upstream, listening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(upstream, "_SWEEP_EVERY_S", 0.02)
    instance, url = await listening(OK)
    await client.fetch("GET", url, timeout_s=5)
    await asyncio.wait_for(instance.closed.wait(), 5)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_may_be_repeated_is_once_when_a_kept_connection_breaks(
    client: Upstream, listening: Open, method: str
) -> None:
    instance, url = await listening(OK)
    await client.fetch(method, url, timeout_s=5)

    async def break_once(head: bytes, writer: asyncio.StreamWriter) -> None:
        if len(instance.connections) == 1:
            writer.transport.abort()
        else:
            writer.write(OK)

    async def break_always(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    instance.behave = break_once
    if method == "GET":
        assert (await client.fetch(method, url, timeout_s=5))[2] == b"ok"
    else:
        # It may have been taken.
        assert await fault_of(client.fetch(method, url, timeout_s=5)) is FailureKind.LOST
    assert len(instance.requests) == (3 if method == "GET" else 2)
    # On a new connection nothing is repeated.
    instance.behave = break_always
    before = len(instance.requests)
    assert await fault_of(Upstream().fetch(method, url, timeout_s=5)) is FailureKind.LOST
    assert len(instance.requests) == before + 1


async def test_one_that_was_closed_while_at_rest_is_not_used(
    client: Upstream, listening: Open
) -> None:
    instance, url = await listening(OK)
    await client.fetch("POST", url, timeout_s=5)
    instance.connections[0][1].close()
    while any(not each.transport.is_closing() for each in client._connections):
        await asyncio.sleep(0.01)
    await client.fetch("POST", url, timeout_s=5)
    assert len(instance.requests) == 2


async def test_who_gives_up_when_the_answer_is_whole_leaves_the_connection_to_the_next(
    client: Upstream, listening: Open
) -> None:
    instance, url = await listening(OK)
    asked, turn = asyncio.Event(), asyncio.Event()

    async def say_nothing_at_first(head: bytes, writer: asyncio.StreamWriter) -> None:
        if asked.is_set():
            writer.write(OK)
        asked.set()

    instance.behave = say_nothing_at_first

    async def next_one() -> int:
        await turn.wait()
        return (await client.fetch("POST", url, timeout_s=5))[0]

    after = asyncio.create_task(next_one())
    first = asyncio.create_task(client.fetch("POST", url, timeout_s=5))
    await asyncio.wait_for(asked.wait(), 5)
    (connection,) = client._connections
    # All in one turn of the event loop: the next one runs before the first hears of anything.
    turn.set()
    connection.data_received(OK)
    first.cancel()
    assert await after == 200
    assert first.cancelled()
    assert len(instance.connections) == 1


@pytest.mark.parametrize("ending", ["closed", "cancelled", "unasked"])
async def test_a_connection_is_closed_that_could_bring_an_answer_that_is_not_wanted(
    client: Upstream, listening: Open, ending: str
) -> None:
    async def nothing(head: bytes, writer: asyncio.StreamWriter) -> None:
        pass

    instance, url = await listening(OK if ending == "unasked" else OK[:-1])
    if ending == "cancelled":
        instance.behave = nothing
        asking = asyncio.create_task(client.request("POST", url))
        while not instance.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
    else:
        answer = await client.request("POST", url)
        if ending == "unasked":
            await answer.read()
            instance.connections[0][1].write(OK)
        else:
            answer.close()
    await asyncio.wait_for(instance.closed.wait(), 5)


# Large bodies.


async def test_an_instance_that_does_not_take_a_body_is_silent(
    client: Upstream, listening: Open
) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        instance.connections.append((reader, writer))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    instance, url = await listening(OK)
    instance.serve = stall  # type: ignore[method-assign]
    asking = client.request("POST", url, body=bytes(64 << 20), silent_s=0.1)
    assert await asyncio.wait_for(fault_of(asking), 10) is FailureKind.TIMEOUT


# Limits of time.


async def test_the_limits_of_time_hold(client: Upstream, listening: Open) -> None:
    async def slowly(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n")
        for _ in range(99):
            writer.write(b"a")
            await asyncio.sleep(0.04)

    instance, url = await listening(OK)
    instance.behave = slowly
    # The silence is shorter than its limit again and again.
    assert await fault_of(client.fetch("GET", url, timeout_s=0.3)) is FailureKind.TIMEOUT
    answer = await client.request("GET", url, silent_s=3.0)
    assert (await answer.read()) == b"a" * 99

    async def once(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\na")
        await asyncio.sleep(5)

    instance.behave = once
    answer = await client.request("GET", url, silent_s=0.1)
    assert await fault_of(answer.read()) is FailureKind.TIMEOUT


async def test_a_limit_of_one_request_is_none_of_the_next(
    client: Upstream, listening: Open
) -> None:
    async def slowly(head: bytes, writer: asyncio.StreamWriter) -> None:
        if len(instance.requests) == 2:
            await asyncio.sleep(1.3)
        writer.write(OK)

    instance, url = await listening(OK)
    instance.behave = slowly
    await client.fetch("GET", url, timeout_s=1.0)
    await client.fetch("GET", url, timeout_s=5)
    assert len(instance.connections) == 1


async def test_who_is_waited_for_here_is_not_silent(client: Upstream, listening: Open) -> None:
    nbytes = 8 * MAX_WAITING_BYTES
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % nbytes
    _, url = await listening(head + bytes(nbytes))
    answer = await client.request("GET", url, silent_s=1.0)
    await asyncio.sleep(1.3)
    assert len(await answer.read()) == nbytes


@pytest.mark.parametrize("limit", ["connect_s", "total_s"])
async def test_who_takes_no_connection_is_refused_or_silent(client: Upstream, limit: str) -> None:
    # In a network that is for documentation alone; a machine without a route says so at once.
    asking = client.request("GET", "http://192.0.2.1:9/", **{limit: 0.1})
    started = time.monotonic()
    fault = await fault_of(asking)
    assert fault is FailureKind.UNREACHABLE or (limit == "total_s" and fault is FailureKind.TIMEOUT)
    assert time.monotonic() - started < 5
    refused = client.fetch("GET", "http://127.0.0.1:1/", timeout_s=5)
    assert await fault_of(refused) is FailureKind.UNREACHABLE


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://host", ("host", 80, False)),
        ("https://host", ("host", 443, True)),
        ("http://host:81", ("host", 81, False)),
        ("http://[::1]:81", ("::1", 81, False)),
        ("http://[::1]", ("::1", 80, False)),
    ],
)
def test_an_address_says_where_to_connect(url: str, where: tuple[str, int, bool]) -> None:
    origin = Upstream()._origin(url)
    assert (origin.host, origin.port, origin.secure) == where


# Answers, cut in any way.


async def asked(body: bytes = b"") -> tuple[_Connection, asyncio.Task[InstanceAnswer]]:
    pool = Upstream()
    connection = _Connection(pool, pool._origin("http://x"))
    pool._connections.add(connection)
    connection.connection_made(Transport())
    task = asyncio.create_task(connection.send_request(b"", (body,), 9, float("inf")))
    await asyncio.sleep(0)
    return connection, task


def transport_of(connection: _Connection) -> Transport:
    assert isinstance(connection.transport, Transport)
    return connection.transport


ANSWERS = {
    OK: b"ok",
    CHUNKED: b"ok",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\na: b\r\n\r\n" + OK: b"ok",
    b"HTTP/1.1 204 No\r\n\r\n": b"",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n": b"",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n": b"abc",
}
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nuntil the end"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted([*ANSWERS, UNTIL_CLOSED])), st.data())
async def test_however_bytes_come_the_answer_is_the_same(sent: bytes, data: st.DataObject) -> None:
    connection, task = await asked()
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=6))
    for begin, stop in itertools.pairwise([0, *sorted(cuts), len(sent)]):
        if begin < stop:
            connection.data_received(sent[begin:stop])
        if data.draw(st.booleans()):
            await asyncio.sleep(0)
    if sent == UNTIL_CLOSED:
        connection.connection_lost(None)
    answer = await task
    assert answer.status in (200, 204)
    assert "a" not in answer.headers
    assert await answer.read() == ANSWERS.get(sent, b"until the end")


@pytest.mark.parametrize("sent", [*ANSWERS, UNTIL_CLOSED], ids=range(len(ANSWERS) + 1))
@pytest.mark.parametrize("error", [None, ConnectionResetError()], ids=["end", "reset"])
async def test_an_answer_that_ends_early_is_cut(sent: bytes, error: Exception | None) -> None:
    for place in range(len(sent)):
        if sent == UNTIL_CLOSED and error is None and place >= sent.index(b"\r\n\r\n") + 4:
            continue  # Nobody can tell.
        connection, task = await asked()
        if place:
            connection.data_received(sent[:place])
        connection.connection_lost(error)

        async def read(task: asyncio.Task[InstanceAnswer] = task) -> bytes:
            return await (await task).read()

        assert await fault_of(read()) is FailureKind.LOST, sent[:place]


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * MAX_HEAD_BYTES,
    ],
    ids=range(6),
)
async def test_what_is_no_answer_is_broken(sent: bytes) -> None:
    connection, task = await asked()
    for begin in range(0, len(sent), 65536):
        connection.data_received(sent[begin : begin + 65536])

    async def read() -> bytes:
        return await (await task).read()

    assert await fault_of(read()) is FailureKind.ERROR
    assert transport_of(connection).closing


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=1, max_size=100))
async def test_no_bytes_raise(data: bytes) -> None:
    connection, task = await asked()
    connection.data_received(data)
    connection.connection_lost(None)
    with pytest.raises(UpstreamError):
        await (await task).read()


async def test_a_large_body_is_sent_piece_by_piece() -> None:
    connection, task = await asked(bytes(9 * LARGE_BYTES))
    # One piece in each turn of the event loop, and none while the instance takes none.
    assert len(transport_of(connection).written) == LARGE_BYTES
    await asyncio.sleep(0)
    connection.pause_writing()
    written_bytes = len(transport_of(connection).written)
    assert written_bytes <= 2 * LARGE_BYTES
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(transport_of(connection).written) <= written_bytes + LARGE_BYTES
    connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(transport_of(connection).written) == 9 * LARGE_BYTES
    connection.data_received(OK)
    assert (await task).status == 200
    assert not transport_of(connection).closing


async def test_no_more_of_a_body_is_sent_after_the_answer() -> None:
    connection, task = await asked(bytes(9 * LARGE_BYTES))
    connection.pause_writing()
    connection.data_received(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\n")
    assert (await task).status == 413
    connection.data_received(b"no")
    assert await task.result().read() == b"no"
    assert len(transport_of(connection).written) <= 2 * LARGE_BYTES
    assert transport_of(connection).closing


async def test_pieces_are_handed_on_without_waking_anybody() -> None:
    connection, task = await asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    answer = await task
    taken: list[bytes] = []
    takes = True
    going = asyncio.Event()

    def take(data: bytes) -> bool:
        taken.append(data)
        return takes

    async def ready() -> None:
        await going.wait()

    passing = asyncio.create_task(answer.pass_on(take, ready))
    await asyncio.sleep(0)
    connection.data_received(b"1\r\nb\r\n1\r\nc\r\n")
    assert taken == [b"a", b"bc"]
    takes = False
    connection.data_received(b"1\r\nd\r\n")
    assert taken == [b"a", b"bc", b"d"]
    # The client takes no more: the instance waits.
    for _ in range(3):
        await asyncio.sleep(0)
    assert not transport_of(connection).reads
    takes = True
    going.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert transport_of(connection).reads
    connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
    await passing
    assert b"".join(taken) == b"abcde"


async def test_an_answer_that_nobody_takes_makes_its_sender_wait() -> None:
    connection, task = await asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (MAX_WAITING_BYTES + 1))
    answer = await task
    assert not transport_of(connection).reads
    assert len(await answer.piece()) == MAX_WAITING_BYTES + 1
    assert transport_of(connection).reads
    connection.data_received(b"b" * 10)
    connection.data_received(b"c")
    assert await answer.read(enough=5) == b"b" * 10 + b"c"
    assert not answer.over
    connection.connection_lost(None)
    assert answer.over


@pytest.mark.parametrize("sent", [OK[:-1], CHUNKED[:47] + b"zz"], ids=["cut", "no http"])
async def test_a_connection_is_free_as_soon_as_it_is_lost(sent: bytes) -> None:
    async def use() -> weakref.ref[_Connection]:
        connection, task = await asked()
        connection.data_received(sent)
        connection.connection_lost(None)
        with contextlib.suppress(UpstreamError):
            await (await task).read()
        return weakref.ref(connection)

    gc.disable()
    try:
        left = await use()
        await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()

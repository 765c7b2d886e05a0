"""A client's connection: what comes in and what goes out, wherever it is cut."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Mapping

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_portable.errors import RequestError
from epd_portable.router.client_exchange import ClientGoneError
from epd_portable.router.http import server_connection
from epd_portable.router.http.server_connection import (
    CLEARED_BYTES,
    HEADERS_WITHIN_S,
    KEEP_ALIVE_S,
    LARGE_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MEMORY_FROM,
    ClientRequest,
    Clients,
    ServerConnection,
)
from tests.unit.router.transport import Transport

Serve = Callable[[ClientRequest], Awaitable[None]]


class End:
    """The client's end of a connection."""

    def __init__(self, serve: Serve) -> None:
        self.clients = Clients(serve)
        self.connection = ServerConnection(self.clients, 80)
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes, *, most: int = 1 << 30) -> None:
        """Send bytes as fast as they are taken, as an event loop would; at most so many."""
        sent = 0
        while sent < len(data):
            while not self.transport.reads and not self.transport.closing:
                await asyncio.sleep(0)
            if self.transport.closing:
                return
            place = self.connection.get_buffer(-1)
            piece = data[sent : sent + min(len(place), most)]
            place[: len(piece)] = piece
            sent += len(piece)
            self.connection.buffer_updated(len(piece))
        await self.rest()

    async def rest(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def leave(self) -> None:
        self.transport.closing = self.transport.lost = True
        self.connection.connection_lost(None)


class Answers:
    """What came back, read by a parser."""

    def __init__(self, data: bytes) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers.append({})
        self.bodies.append(b"")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[-1][name] = value

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        self.bodies[-1] += data


def no_limit(nbytes: int) -> None:
    pass


def answer(request: ClientRequest, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    request.begin_answer(200, {"content-length": str(len(body)), **(headers or {})})
    request.write(body)
    request.end_answer()


async def echo(request: ClientRequest) -> None:
    body = bytes(await request.body(no_limit))
    answer(request, b"%b %b?%b " % tuple(x.encode() for x in request_line(request)) + body)


def request_line(request: ClientRequest) -> tuple[str, str, str]:
    return request.method, request.path, request.query


GET = b"GET /a%20b?c=d HTTP/1.1\r\nhost: x\r\n\r\n"
WHOLE = b"GET http://host:80/path?q=1#f HTTP/1.1\r\n\r\n"
LENGTH = b"POST /length HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED = (
    b"POST /chunks HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\ntrailer: t\r\n\r\n"
)
H2C = (
    b"POST /h2c HTTP/1.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"content-length: 3\r\n\r\nabc"
)
UPGRADE = b"GET /up HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
LARGE = b"POST /large HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (3 * LARGE_BYTES) + (
    b"x" * 3 * LARGE_BYTES
)
REQUESTS = {
    GET: b"GET /a b?c=d ",
    WHOLE: b"GET /path?q=1 ",
    LENGTH: b"POST /length? abc",
    CHUNKED: b"POST /chunks? abcdefg",
    H2C: b"POST /h2c? abc",
    UPGRADE: b"GET /up? ",
    LARGE: b"POST /large? " + b"x" * 3 * LARGE_BYTES,
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=4), st.data())
async def test_however_bytes_come_the_requests_are_the_same(
    sent: list[bytes], data: st.DataObject
) -> None:
    end = End(echo)
    stream = b"".join(sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    most = 1 << 30 if LARGE in sent else data.draw(st.sampled_from([1, 7, 1 << 30]))
    for begin, stop in itertools.pairwise([0, *sorted(cuts), len(stream)]):
        await end.send(stream[begin:stop], most=most)
    assert Answers(end.transport.written).bodies == [REQUESTS[each] for each in sent]


@pytest.mark.parametrize("nbytes", [LARGE_BYTES + 1, CLEARED_BYTES])
async def test_large_bodies_land_in_their_place(nbytes: int) -> None:
    got = []

    async def serve(request: ClientRequest) -> None:
        data = await request.body(no_limit)
        got.append((len(data), data[:2], data[-2:]))
        answer(request, b"")

    end = End(serve)
    body = b"ab" + b"\0" * (nbytes - 4) + b"yz"
    await end.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % nbytes + body + GET)
    assert got == [(nbytes, b"ab", b"yz"), (0, b"", b"")]


@pytest.mark.parametrize("nbytes", [LARGE_BYTES + 1, CLEARED_BYTES - 1])
async def test_a_body_counts_as_the_memory_that_it_takes_and_takes_it_as_it_comes(
    nbytes: int,
) -> None:
    counted = [0]

    async def serve(request: ClientRequest) -> None:
        await request.body(counted.append)

    end = End(serve)
    tracemalloc.start()
    try:
        await end.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\nx" % nbytes)
        for sent in range(1, nbytes - 1, LARGE_BYTES):
            # One that grows step by step has an eighth more.
            held = tracemalloc.get_traced_memory()[0] - 30_000
            assert held <= min(MEMORY_FROM * sent, counted[-1] * 9 / 8) + LARGE_BYTES
            await end.send(b"x" * min(LARGE_BYTES, nbytes - 1 - sent))
    finally:
        tracemalloc.stop()
    assert counted[-1] >= nbytes - 1


async def test_a_large_body_is_not_taken_before_it_is_asked_for() -> None:
    asking = asyncio.Event()

    async def serve(request: ClientRequest) -> None:
        await asking.wait()
        await request.body(no_limit)
        answer(request, b"")

    end = End(serve)
    head = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (1 << 20)
    sending = asyncio.create_task(end.send(head + b"x" * (1 << 20)))
    await end.rest()
    assert not end.transport.reads
    asking.set()
    await sending
    assert Answers(end.transport.written).statuses == [200]


async def test_others_are_served_while_a_large_body_comes() -> None:
    end = End(echo)
    nbytes = 2 * server_connection.BREATH_BYTES
    await end.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % nbytes)
    taken = last = 0
    while end.transport.reads:
        taken += last
        last = len(end.connection.get_buffer(-1))
        end.connection.buffer_updated(last)
    assert taken < server_connection.BREATH_BYTES
    await end.rest()
    assert end.transport.reads


@pytest.mark.parametrize("encoding", ["length", "chunked"])
async def test_what_counts_the_bytes_may_end_the_reading(encoding: str) -> None:
    def limit(nbytes: int) -> None:
        if nbytes > LARGE_BYTES:
            raise RequestError("enough", status=413, code="x")

    async def serve(request: ClientRequest) -> None:
        if request.path == "/next":
            answer(request, b"next")
            return
        with pytest.raises(RequestError, match="enough"):
            await request.body(limit)
        await request.drop_body()
        answer(request, b"refused")

    end = End(serve)
    body = b"x" * (4 * LARGE_BYTES)
    if encoding == "length":
        stream = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    else:
        stream = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        stream += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    await end.send(stream + b"GET /next HTTP/1.1\r\n\r\n")
    assert Answers(end.transport.written).bodies == [b"refused", b"next"]


async def test_who_is_refused_while_it_waits_for_permission_loses_its_connection() -> None:
    served = []

    async def serve(request: ClientRequest) -> None:
        served.append(request.path)
        answer(request, b"no")

    end = End(serve)
    await end.send(b"POST /1 HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 40\r\n\r\n")
    # Who honours the answer goes on with another request, others with the body.
    await end.send(b"GET /2 HTTP/1.1\r\nx: 0123456789\r\n\r\nGET /3 HTTP/1.1\r\n\r\n")
    assert served == ["/1"]
    assert Answers(end.transport.written).headers[0][b"connection"] == b"close"
    assert end.transport.closing


async def test_no_request_begins_before_the_answer_ahead_is_taken() -> None:
    served = []

    async def serve(request: ClientRequest) -> None:
        served.append(request.path)
        end.connection.pause_writing()
        answer(request, b"")

    end = End(serve)
    requests = b"".join(
        b"GET /%d HTTP/1.1\r\nx: %b\r\n\r\n" % (number, b"a" * 1000) for number in range(300)
    )
    sending = asyncio.create_task(end.send(requests))
    await end.rest()
    assert not end.transport.reads
    for number in range(300):
        await end.rest()
        assert len(served) == number + 1
        end.connection.resume_writing()
    await sending
    assert served == [f"/{number}" for number in range(300)]
    assert end.transport.reads


@pytest.mark.parametrize("piece", [b"x" * LARGE_BYTES, b"a: b\r\n" * 8000, b"c\r\n" * 8000])
@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("before", [b"0\r\na: ", b"0\r\n", b"3;x="])
async def test_what_stands_after_chunks_is_bounded(
    before: bytes, piece: bytes, answered: bool
) -> None:
    async def serve(request: ClientRequest) -> None:
        if answered:
            answer(request, b"")
        else:
            with pytest.raises(ClientGoneError):
                await request.body(no_limit)

    end = End(serve)
    await end.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + before)
    for _ in range(2 * MAX_HEAD_BYTES // len(piece) + 1):
        await end.send(piece)
    assert end.transport.closing
    # Who has its answer gets no other.
    assert Answers(end.transport.written).statuses == [200 if answered else 400]
    end.leave()
    await end.rest()


# What is no request.

BROKEN = (
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\n\r\n",
    b"GET http:// HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\na",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nz\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\na: " + b"b" * (MAX_HEAD_BYTES + LARGE_BYTES),
    b"GET / HTTP/1.1\r\n" + b"".join(b"a%d:\r\n" % n for n in range(MAX_HEADERS + 2)),
    b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: gzip\r\n\r\n",
    b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: \xff\r\n\r\n",
)


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
async def test_what_is_no_request_is_refused_after_those_before_it(data: bytes) -> None:
    end = End(echo)
    await end.send(GET + data)
    got = Answers(end.transport.written)
    assert got.statuses == [200, 400]
    assert got.bodies[1] == b"Invalid HTTP request received"
    assert end.transport.closing


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
async def test_no_bytes_raise(data: bytes, most: int) -> None:
    async def serve(request: ClientRequest) -> None:
        await echo(request)

    end = End(serve)
    await end.send(data, most=most)
    end.leave()
    await end.rest()
    assert not end.clients.tasks


# Ends.


@pytest.mark.parametrize("place", range(0, len(CHUNKED) + 1, 3))
async def test_a_client_may_leave_at_any_place(place: int) -> None:
    gone = []

    async def serve(request: ClientRequest) -> None:
        try:
            await request.body(no_limit)
        except ClientGoneError:
            gone.append("reading")
            return
        waiting = asyncio.Event()
        request.on_gone(waiting.set)
        await waiting.wait()
        gone.append("answering")

    end = End(serve)
    await end.send(CHUNKED[:place])
    begun = bool(end.clients.tasks)
    end.leave()
    await end.rest()
    assert not end.clients.tasks and not end.clients.open
    assert len(gone) == begun


async def test_who_asks_late_learns_that_the_client_has_gone() -> None:
    told = asyncio.Event()
    left = asyncio.Event()

    async def serve(request: ClientRequest) -> None:
        await left.wait()
        request.on_gone(told.set)

    end = End(serve)
    await end.send(GET)
    end.leave()
    left.set()
    await end.rest()
    assert told.is_set()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_request_is_free_as_soon_as_it_has_ended(leaves: bool) -> None:
    served: list[weakref.ref[ClientRequest]] = []
    going = asyncio.Event()

    async def serve(request: ClientRequest) -> None:
        served.append(weakref.ref(request))
        request.on_gone(lambda: request and going.set())
        await request.body(no_limit)
        await going.wait()
        answer(request, b"")

    end = End(serve)
    gc.disable()
    try:
        await end.send(LENGTH)
        end.leave() if leaves else going.set()
        await end.rest()
        assert served[0]() is None
    finally:
        gc.enable()


CHUNKS = (b"transfer-encoding: chunked\r\n", b"2\r\nhi\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("head", "status", "keeps", "chunks"),
    [
        (b"GET / HTTP/1.1\r\n", 200, True, True),
        (b"GET / HTTP/1.1\r\nconnection: close\r\n", 200, False, True),
        (b"GET / HTTP/1.0\r\n", 200, False, False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n", 200, False, False),
        (b"HEAD / HTTP/1.1\r\n", 200, True, False),
        (b"GET / HTTP/1.1\r\n", 204, True, False),
    ],
    ids=range(6),
)
async def test_a_client_gets_what_its_version_and_method_take(
    head: bytes, status: int, keeps: bool, chunks: bool
) -> None:
    async def serve(request: ClientRequest) -> None:
        request.begin_answer(status, {})
        if request.method != "HEAD" and status != 204:
            request.write(b"hi")
        request.end_answer()

    end = End(serve)
    await end.send(head + b"\r\n")
    written = end.transport.written
    assert (end.transport.closing, b"connection: close\r\n" in written) == (not keeps, not keeps)
    assert [each in written for each in CHUNKS] == [chunks] * 2
    assert written.endswith((CHUNKS[1], b"\r\n\r\nhi", b"\r\n\r\n"))


async def test_when_the_server_stops_each_connection_ends_with_its_answer() -> None:
    going = asyncio.Event()

    async def serve(request: ClientRequest) -> None:
        await going.wait()
        answer(request, b"")

    end, idle = End(serve), End(serve)
    await end.send(GET)
    for each in (end, idle):
        each.clients.stop()
    assert idle.transport.closing
    assert not end.transport.closing
    going.set()
    await end.rest()
    assert end.transport.closing


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        (b"", HEADERS_WITHIN_S),
        (GET[:9], HEADERS_WITHIN_S),
        (GET, KEEP_ALIVE_S),
        (GET + GET[:9], HEADERS_WITHIN_S),
        (b"POST /drop HTTP/1.1\r\ncontent-length: 9\r\n\r\n", HEADERS_WITHIN_S),
    ],
    ids=("nothing", "half", "one", "one and a half", "no body"),
)
async def test_connections_on_which_no_request_comes_are_closed(
    sent: bytes, limit_s: float
) -> None:
    async def serve(request: ClientRequest) -> None:
        answer(request, b"")

    end = End(serve)
    await end.send(sent)
    since = end.connection._since
    end.connection.look(since + limit_s - 1, 10)
    assert not end.transport.closing
    end.connection.look(since + limit_s + 1, 10)
    assert end.transport.closing


async def test_a_connection_whose_body_is_none_ends_with_the_answer_that_has_begun() -> None:
    async def serve(request: ClientRequest) -> None:
        request.begin_answer(200, {})
        request.write(b"first")
        await go_on.wait()
        request.write(b"last")
        request.end_answer()

    go_on = asyncio.Event()
    end = End(serve)
    await end.send(CHUNKED.partition(b"4;")[0])
    await end.send(b"no chunk\r\n")
    assert not end.transport.closing
    go_on.set()
    await end.rest()
    assert Answers(end.transport.written).bodies == [b"firstlast"]
    assert end.transport.closing


async def test_a_client_that_takes_nothing_of_the_end_is_dropped() -> None:
    end = End(echo)
    dropped = []
    end.transport.abort = lambda: dropped.append(True)  # type: ignore[method-assign]
    end.transport.closing = True
    end.transport.unsent_bytes = 9
    end.connection.look(100.0, 10)
    end.connection.look(109.0, 10)
    end.transport.unsent_bytes = 8
    end.connection.look(111.0, 10)
    end.connection.look(120.0, 10)
    assert not dropped
    end.connection.look(122.0, 10)
    assert dropped


async def test_headers_are_as_they_were_sent_but_for_what_is_not_ascii() -> None:
    got = []

    async def serve(request: ClientRequest) -> None:
        await request.drop_body()
        got.append(request.headers)
        answer(request, b"", {"x-odd": "\udcff\u20ac"})

    end = End(serve)
    # Trailers are none of the next request's.
    await end.send(CHUNKED + b"GET / HTTP/1.1\r\nHost: X\r\nA-b: c\xff\r\nD:  e \r\n\r\n")
    assert got == [{"transfer-encoding": "chunked"}, {"host": "X", "d": "e"}]
    assert b"x-odd: \xff\xe2\x82\xac\r\n" in end.transport.written

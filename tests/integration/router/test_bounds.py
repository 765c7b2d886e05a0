"""What a router holds for each client, in every state in which one can leave a connection.

The router is a process of its own, so its memory is its alone; the clients are sockets of this one.
Bounds are those of the code and some room for the objects around: what goes wrong here goes wrong
by a factor, and limits of the process end it before the machine notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from epd_portable.router.contents.body import MAX_JSON_BYTES
from tests.integration.router.stand_in import CHAT, DEADLINE_S, at_once, until
from tests.integration.router.test_access import KEY, keys_file
from tests.integration.router.test_process import SETTINGS
from tests.listening import stop_listening

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = at_once(1000)
ALIKE = CLIENTS // 4
"""Clients that leave their connections in the same state: what each is held shows with fewer."""
KIB = 1 << 10
OBJECTS_BYTES = 32 * KIB
"""Of a connection, its request and what serves that, beside bytes that came."""
KEPT_BYTES = 16 << 20
"""Of all clients that have gone, in pieces between what is in use."""
READ_BYTES = 64 * KIB
"""Of heads, of what is read ahead, of bodies that are not counted, and of what is sent before more
is waited for: at most so much each."""
ANSWER_BYTES = 1 << 20
"""Of an answer that passes: some reads of the instance's connection, and what may wait of it."""
STREAMS = CLIENTS // 4
MOST_BYTES = 2 << 30
"""Of the router's own memory."""
BODIES_BYTES = 16 << 20
WAITS = {"max_requests": STREAMS, "max_waiting": CLIENTS, "max_wait_s": 600}
KEYED = CHAT + b"authorization: Bearer %b\r\n" % KEY.encode()
ASKED = b'{"stream": true, "messages": [{"role": "user", "content": "%b"}]}'


def asked(nbytes: int = 1) -> bytes:
    body = ASKED % (b"a" * nbytes)
    return KEYED + b"content-length: %d\r\n\r\n" % len(body) + body


class Endless:
    """An instance that is well, and whose answers do not end."""

    def __init__(self) -> None:
        self.streams = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        # What does not pass is to wait in no buffer of the system: a thousand fill the machine.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)
        self._server = await asyncio.start_server(self._serve, sock=listener)
        host, port = listener.getsockname()
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await stop_listening(self._server)
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            self.streams += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            while True:
                writer.write(b"data: " + b"a" * 16 * KIB + b"\n\n")
                await writer.drain()
        self._writers.discard(writer)
        writer.close()


class Held:
    """A router, and clients that leave their connections in some state."""

    def __init__(self, settings: dict[str, Any], instance: Endless) -> None:
        self.instance = instance
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd_portable.router", "--settings", json.dumps(settings)],
            # Memory that is free goes back, so what is in use can be seen.
            env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "4096"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert found, said
        self.address = ("127.0.0.1", int(found[1]))
        self._begin_bytes = self._begin_files = 0
        self._seen = psutil.Process(self._process.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def get(self, path: str) -> bytes:
        """Return a whole answer: what came before is in the router's hands by then."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(b"GET %b HTTP/1.1\r\nconnection: close\r\n\r\n" % path.encode())
        data = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        return data

    async def begin(self) -> None:
        """Begin to count memory."""
        self._begin_bytes += await self.grown_bytes()
        # Some to spare: connections to the instance, and who asks how the router is.
        self._begin_files = self._seen.num_fds() + 20

    async def grown_bytes(self) -> int:
        """Return how much more memory the router has, when it has done what it had to.

        What it kept of those that have gone is part of it.
        """
        seen: list[int] = []
        while len(seen) < 3 or max(seen[-3:]) - min(seen[-3:]) > 256 * KIB:
            assert len(seen) < 200
            await self.get("/health")
            await asyncio.sleep(0.05)
            seen.append(self._seen.memory_info().rss)
        return seen[-1] - self._begin_bytes

    async def until_gone(self) -> None:
        """Wait until the router has let go of all clients."""
        await until(lambda: self._seen.num_fds() <= self._begin_files)

    @contextlib.contextmanager
    def clients(self, count: int = CLIENTS) -> Iterator[list[socket.socket]]:
        """Yield connected sockets that take and send little before they would block."""
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(count):
                client = stack.enter_context(socket.socket())
                for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    client.setsockopt(socket.SOL_SOCKET, option, 4 * KIB)
                # Large segments make the system's buffers large.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
                client.connect(self.address)
                client.setblocking(False)
                clients.append(client)
            yield clients


async def send(clients: list[socket.socket], data: bytes, *, whole: bool = False) -> None:
    """Send from each client what is taken: all of it, or as long as that is anything."""
    left = dict.fromkeys(clients, data)
    idle = 0
    while left and (whole or idle < 20):
        idle += 1
        for client, rest in tuple(left.items()):
            try:
                left[client] = rest[client.send(rest) :]
                idle = 0
            except BlockingIOError:
                pass
            except ConnectionError:
                left[client] = b""
            if not left[client]:
                del left[client]
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def held(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Held]:
    instance = Endless()
    named = {**SETTINGS["instances"][0], "url": await instance.start()}
    folder: Path = tmp_path_factory.mktemp("keys")
    settings = {
        **SETTINGS,
        "instances": [named],
        "warm_up": False,
        "api_keys_file": keys_file(folder, KEY),
        "admission": WAITS,
        "max_body_bytes": BODIES_BYTES,
        "max_bodies_bytes": BODIES_BYTES,
        "body_timeout_s": 600,
        "send_timeout_s": 600,
    }
    router = Held(settings, instance)
    # What is made once, for the first of all.
    await router.get("/metrics")
    with router.clients(ALIKE) as clients:
        await send(clients, b"GET /nothing HTTP/1.1\r\n\r\n")
        await router.grown_bytes()
    await router.begin()
    yield router
    router.stop()
    await instance.stop()


@dataclass(frozen=True, kw_only=True)
class State:
    """What a client sends and then leaves as it is.

    Attributes:
        sent: By each.
        answer: How what it is answered begins; empty for nothing.
        most_bytes: That the router holds for each.
    """

    sent: bytes
    answer: bytes = b""
    most_bytes: int


CHUNKS = b"transfer-encoding: chunked\r\n\r\n"
LARGE_BYTES = MAX_JSON_BYTES + KIB
LENGTH = b"content-length: %d\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (50 * KIB, b"a" * 50 * KIB)
LINES = b"".join(b"a%d: b\r\n" % number for number in range(5000))[: 60 * KIB]
UNREAD = b"GET /metrics HTTP/1.1\r\n\r\n" * 40 + b"GET / HTTP/1.1\r\n\r\n" * 3000
REFUSED = b"HTTP/1.1 401 "
BEFORE_KEYS = {
    "nothing": State(sent=b"", most_bytes=OBJECTS_BYTES),
    "half a head of one value": State(
        sent=b"GET / HTTP/1.1\r\na: " + b"b" * 60 * KIB, most_bytes=READ_BYTES + OBJECTS_BYTES
    ),
    "half a head of many lines": State(
        sent=b"GET / HTTP/1.1\r\n" + LINES, answer=b"HTTP/1.1 400 ", most_bytes=OBJECTS_BYTES
    ),
    "an announced body": State(
        sent=CHAT + LENGTH % LARGE_BYTES + b"{", answer=REFUSED, most_bytes=OBJECTS_BYTES
    ),
    "half a body": State(
        sent=CHAT + LENGTH % LARGE_BYTES + b"a" * 500 * KIB,
        answer=REFUSED,
        most_bytes=OBJECTS_BYTES,
    ),
    "half a body in chunks": State(
        sent=CHAT + CHUNKS + CHUNK * 10, answer=REFUSED, most_bytes=OBJECTS_BYTES
    ),
    "one trailer": State(
        sent=CHAT + CHUNKS + b"0\r\na: " + b"b" * 60 * KIB,
        answer=REFUSED,
        most_bytes=READ_BYTES + OBJECTS_BYTES,
    ),
    "trailers": State(
        sent=CHAT + CHUNKS + b"0\r\n" + LINES, answer=REFUSED, most_bytes=OBJECTS_BYTES
    ),
    "requests whose answers it does not take": State(
        sent=UNREAD, answer=b"HTTP/1.1 200 ", most_bytes=3 * READ_BYTES + OBJECTS_BYTES
    ),
    "a question whether to send": State(
        sent=CHAT + b"expect: 100-continue\r\n" + LENGTH % LARGE_BYTES,
        answer=REFUSED,
        most_bytes=OBJECTS_BYTES,
    ),
}
AFTER_KEYS = {
    "an announced body": State(sent=KEYED + LENGTH % LARGE_BYTES + b"{", most_bytes=OBJECTS_BYTES),
    "half a small body": State(
        sent=KEYED + LENGTH % (64 * KIB) + b"a" * 60 * KIB,
        most_bytes=READ_BYTES * 9 // 8 + OBJECTS_BYTES,
    ),
    "half a body in chunks": State(
        sent=KEYED + CHUNKS + CHUNK, most_bytes=READ_BYTES * 9 // 8 + OBJECTS_BYTES
    ),
    "a question whether to send": State(
        sent=KEYED + b"expect: 100-continue\r\n" + LENGTH % LARGE_BYTES,
        answer=b"HTTP/1.1 100 ",
        most_bytes=OBJECTS_BYTES,
    ),
}


async def answers(clients: list[socket.socket], length: int) -> set[bytes]:
    """Return how what the clients were answered begins."""
    found: set[bytes] = set()
    for client in clients:
        try:
            found.add(client.recv(length, socket.MSG_PEEK))
        except BlockingIOError:
            found.add(b"")
    return found


STATES = {f"{name}, no key": state for name, state in BEFORE_KEYS.items()}
STATES |= {f"{name}, with key": state for name, state in AFTER_KEYS.items()}
# What clients leave behind can hide what later ones take: those that take most come last.
IN_ORDER = sorted(STATES, key=lambda name: STATES[name].most_bytes)


@pytest.mark.parametrize("name", IN_ORDER)
async def test_a_client_that_leaves_its_connection_so_is_held_little_for(
    held: Held, name: str
) -> None:
    state = STATES[name]
    kept = await held.grown_bytes()
    with held.clients(ALIKE) as clients:
        await send(clients, state.sent)
        grown = await held.grown_bytes() - kept
        assert await answers(clients, len(state.answer)) == {state.answer}
    await held.until_gone()
    assert kept <= KEPT_BYTES
    assert grown <= ALIKE * state.most_bytes


async def test_bodies_of_all_clients_together_are_bounded(held: Held) -> None:
    with held.clients() as clients:
        await send(clients, KEYED + LENGTH % LARGE_BYTES + b"a" * 400 * KIB)
        grown = await held.grown_bytes()
    await held.until_gone()
    # Of those that are refused the rest is taken, and dropped.
    assert (
        BODIES_BYTES // 2 <= grown <= BODIES_BYTES * 9 // 8 + CLIENTS * (READ_BYTES + OBJECTS_BYTES)
    )


async def test_answers_that_nobody_takes_and_requests_that_wait_are_bounded(held: Held) -> None:
    with held.clients() as taking_nothing, held.clients() as waiting:
        await send(taking_nothing[:STREAMS], asked(), whole=True)
        await until(lambda: held.instance.streams == STREAMS)
        streaming = await held.grown_bytes()
        await send(waiting, asked(20 * KIB))
        grown = await held.grown_bytes() - streaming
        metrics = await held.get("/metrics")
    await held.until_gone()
    found = re.search(rb"^epd_router_admission_waiting\S* (\S+)$", metrics, re.MULTILINE)
    assert found and float(found[1]) == CLIENTS, found
    assert streaming <= STREAMS * ANSWER_BYTES + CLIENTS * OBJECTS_BYTES
    assert grown <= CLIENTS * (READ_BYTES + OBJECTS_BYTES)

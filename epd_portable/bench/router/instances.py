"""Instances that are played: they answer at once what a question asks for, and compute nothing.

``python -m epd_portable.bench.router.instances FILE`` plays every instance of a `Cast` in one
process: HTTP like an engine's, and the instance's end of the control channel, which takes
whatever the router says. It answers each line of standard input with a line of `Counts`, the first
unasked once it listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from epd_portable.bench.fast_loop import install_fast_loop
from epd_portable.bench.router.commands import Cast, Counts, InstanceAddress
from epd_portable.bench.router.questions import (
    LAST_EVENT,
    MODEL,
    Question,
    event,
    find_items,
    find_question,
    whole_answer,
)
from epd_portable.bench.router.raw_http import MessageProtocol
from epd_portable.connector.curve import CurveGate, CurveKeys, read_keys
from epd_portable.wire.codec import MAX_MESSAGE_BYTES
from epd_portable.wire.params import (
    EncodedItem,
    EncodeOutcome,
    ItemOutcome,
    PrefillOutcome,
    to_params,
)

BACKLOG = 4096
KEPT_BYTES = 16 * 1024
"""Of each end of a request body: there stands what an instance looks for. The rest is dropped."""

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MODELS = b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % MODEL.encode()
_PAGES = {b"/health": b"", b"/v1/models": _MODELS, b"/ping": b"", b"/load": b"{}"}


class Played:
    """What one process has seen so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.jobs = 0
        self.open = 0
        self.gone = 0
        self.probed: set[str] = set()
        self.probes = 0

    def counts(self) -> Counts:
        """Return it for the measurement."""
        return Counts(
            requests=self.requests,
            jobs=self.jobs,
            open=self.open,
            gone=self.gone,
            probed=len(self.probed),
            probes=self.probes,
            cpu_s=time.process_time(),
        )


class InstanceConnection(MessageProtocol):
    """A connection to an instance.

    Args:
        address: The instance.
        played: Counts.
        loop: That it runs in.
        cast: How it plays.
    """

    def __init__(
        self,
        address: InstanceAddress,
        played: Played,
        loop: asyncio.AbstractEventLoop,
        cast: Cast,
    ) -> None:
        super().__init__(responses=False)
        self._address = address
        self._played = played
        self._loop = loop
        self._encode_s = cast.encode_ms / 1000
        self._pieces = 2 if cast.halves else 1
        self._method = self._path = b""
        self._body_begin: bytes = b""
        self._body_end: bytes = b""
        self._timer: asyncio.TimerHandle | None = None

    def head_arrived(self, head: bytes) -> None:
        """Note what is asked for."""
        self._method, self._path = head.split(b" ", 2)[:2]
        self._body_begin = self._body_end = b""

    def piece_arrived(self, piece: bytes) -> None:
        """Keep both ends of the body."""
        room = KEPT_BYTES - len(self._body_begin)
        if room > 0:
            self._body_begin += piece[:room]
            piece = piece[room:]
        if piece:
            self._body_end = (self._body_end + piece[-KEPT_BYTES:])[-KEPT_BYTES:]

    def message_ended(self) -> None:
        """Answer."""
        if self._method == b"GET":
            self._show(self._path.partition(b"?")[0])
            return
        body = self._body_begin + self._body_end
        self._played.open += 1
        if self._address.role == "encode":
            self._played.jobs += 1
            self._after(self._encode_s, self._encode, find_items(body))
            return
        self._played.requests += 1
        question = find_question(body) or Question(number=0)
        if question.chunks:
            # The first event with the head, and each at its time, however late the one before was.
            self._stream(question, 0, self._loop.time() + question.first_ms / 1000)
        else:
            self._after(question.first_ms / 1000, self._answer, question, find_items(body))

    def connection_lost(self, error: Exception | None) -> None:
        """Stop answering whom nobody hears."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._played.open -= 1
            self._played.gone += 1

    def _show(self, path: bytes) -> None:
        if path == b"/health":
            self._played.probed.add(self._address.name)
            self._played.probes += 1
        page = _PAGES.get(path)
        self._reply(b"404 Not Found" if page is None else b"200 OK", page or b"")

    def _after(self, delay_s: float, answer: Callable[..., None], *arguments: object) -> None:
        if delay_s:
            self._timer = self._loop.call_later(delay_s, answer, *arguments)
        else:
            answer(*arguments)

    def _encode(self, items: list[str]) -> None:
        self._timer = None
        self._played.open -= 1
        named = tuple(EncodedItem(mm_hash=item, modality="image") for item in items)
        outcome = EncodeOutcome(instance=self._address.name, items=named)
        self._reply(b"200 OK", whole_answer(0, to_params(outcome) if items else None))

    def _answer(self, question: Question, items: list[str]) -> None:
        self._timer = None
        self._played.open -= 1
        had = tuple(ItemOutcome(mm_hash=item, source="transfer", path="shm") for item in items)
        outcome = PrefillOutcome(instance=self._address.name, items=had)
        parameters = to_params(outcome) if items else None
        self._reply(b"200 OK", whole_answer(question.number, parameters))

    def _stream(self, question: Question, index: int, due_s: float) -> None:
        """Write every piece of an event whose time has come, and come back for the next."""
        pieces = [_STREAM_HEAD] if not index else []
        now_s = self._loop.time()
        if not index and due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._stream, question, 0, due_s)
            return
        count = question.chunks * self._pieces
        while index < count and due_s <= now_s:
            whole = event(question.number, index // self._pieces)
            if self._pieces == 2:
                middle = len(whole) // 2
                whole = whole[middle:] if index % 2 else whole[:middle]
            pieces.append(_framed(whole))
            index += 1
            due_s += question.gap_ms / 1000 / self._pieces
        if index < count:
            self._timer = self._loop.call_at(due_s, self._stream, question, index, due_s)
        else:
            self._timer = None
            self._played.open -= 1
            pieces.append(_framed(LAST_EVENT) + b"0\r\n\r\n")
        self.transport.write(b"".join(pieces))

    def _reply(self, status: bytes, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def take_messages(addresses: list[str], keys: CurveKeys, listening: threading.Event) -> None:
    """Be the control channels of instances, for ever; whatever arrives is dropped."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 3 * len(addresses) + 64)
    poller = zmq.Poller()
    gates = []
    for address in addresses:
        channel = context.socket(zmq.ROUTER)
        channel.setsockopt(zmq.LINGER, 0)
        channel.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        gates.append(CurveGate(channel, address, keys, name="control"))
        channel.bind(address)
        poller.register(channel, zmq.POLLIN)
    listening.set()
    while True:
        for ready, _ in poller.poll():
            assert isinstance(ready, zmq.Socket)
            with contextlib.suppress(zmq.Again):
                while True:
                    ready.recv_multipart(zmq.NOBLOCK)


async def play(cast: Cast) -> None:
    """Play a cast until standard input ends."""
    loop = asyncio.get_running_loop()
    played = Played()
    for address in cast.instances:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address.host, address.port))
        await loop.create_server(
            functools.partial(InstanceConnection, address, played, loop, cast),
            sock=listener,
            backlog=BACKLOG,
        )
    ended = asyncio.Event()
    encoder = msgspec.json.Encoder()

    def told() -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            ended.set()
            return
        sys.stdout.buffer.write(encoder.encode(played.counts()) + b"\n")
        sys.stdout.buffer.flush()

    sys.stdout.buffer.write(encoder.encode(played.counts()) + b"\n")
    sys.stdout.buffer.flush()
    loop.add_reader(sys.stdin.fileno(), told)
    # Pauses of the collector would be taken for the router's.
    gc.freeze()
    gc.disable()
    await ended.wait()


def main() -> None:
    """Play the cast that the command line names."""
    cast = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Cast)
    channels = [address.control for address in cast.instances if address.control]
    if channels:
        listening = threading.Event()
        keys = read_keys(cast.secret_file)
        arguments = (channels, keys, listening)
        threading.Thread(target=take_messages, args=arguments, daemon=True).start()
        if not listening.wait(60):
            sys.exit("the control channels do not listen")
    install_fast_loop()
    asyncio.run(play(cast))


if __name__ == "__main__":
    main()

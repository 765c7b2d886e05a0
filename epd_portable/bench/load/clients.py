"""The clients: one process, no library between it and the sockets.

``python -m epd_portable.bench.load.clients`` reads a command a line and answers each with a line of
`ClientsDone`. Bodies are written before a run and answers are read after it, so that neither delays
a sending. How much CPU time the clients took, and how late they sent, is part of every result:
clients that are the bottleneck show.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from urllib.parse import urlsplit

from epd_portable.bench.fast_loop import carry_out_commands
from epd_portable.bench.load.answers import gaps, read
from epd_portable.bench.load.bodies import body_of, request_parts
from epd_portable.bench.load.commands import Ask, ClientsDone, Command, Prepare, Send, TimedAnswer
from epd_portable.bench.load.raw_http import MessageProtocol
from epd_portable.bench.load.stages import request_id
from epd_portable.router.http import open_files

_CONNECT_TIMEOUT_S = 20.0
_SPIN_S = 0.002
"""Sleeps end so much early; the rest is waited for in turns of the event loop."""


class _Exchange:
    """One request under way, and what became of it."""

    __slots__ = ("ask", "begin_s", "end_s", "late_s", "pieces", "problem", "status")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.begin_s = -1.0
        self.end_s = -1.0
        self.late_s = 0.0
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self.problem = ""

    def answer(self, run_begin_s: float) -> TimedAnswer:
        """Read it."""
        found = read(self.pieces, output_tokens=self.ask.output_tokens)
        problem = self.problem or found.problem
        if self.status != 200 and not self.problem:
            said = b"".join(piece for _, piece in self.pieces)[:300]
            problem = f"status {self.status}: {said.decode(errors='replace')}"
        times = found.times_s
        return TimedAnswer(
            sent_s=self.begin_s - run_begin_s,
            late_s=self.late_s,
            ttft_s=times[0] - self.begin_s if times else -1.0,
            gaps_s=gaps(times),
            e2e_s=self.end_s - self.begin_s,
            tokens=found.tokens,
            prompt_tokens=found.prompt_tokens,
            problem=problem,
        )


class _Connection(MessageProtocol):
    """One connection to a server; one request at a time."""

    def __init__(self, ended: Callable[[_Connection], None], url: str) -> None:
        super().__init__(responses=True)
        self._ended = ended
        self._timer: asyncio.TimerHandle | None = None
        self.url = url
        self.exchange: _Exchange | None = None
        self.lost = False

    def ask(self, exchange: _Exchange, parts: list[bytes], timeout_s: float) -> None:
        """Send a request, whose `begin_s` is set."""
        self.exchange = exchange
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._give_up, timeout_s)
        self.transport.writelines(parts)

    def head_arrived(self, head: bytes) -> None:
        """Note the status."""
        if self.exchange is not None:
            self.exchange.status = int(head[9:12])

    def piece_arrived(self, piece: bytes) -> None:
        """Keep it, and when it came."""
        if self.exchange is not None:
            self.exchange.pieces.append((time.monotonic(), piece))

    def message_ended(self) -> None:
        """Hand the exchange over."""
        self._end("")

    def connection_lost(self, error: Exception | None) -> None:
        """Hand over what there is."""
        self.lost = True
        self._end(self.problem or f"the connection broke off ({error})")

    def _give_up(self, timeout_s: float) -> None:
        self.problem = f"no end in {timeout_s:g} s"
        self.transport.abort()

    def _end(self, problem: str) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        self.exchange = None
        assert self._timer is not None
        self._timer.cancel()
        exchange.end_s = time.monotonic()
        exchange.problem = problem
        self._ended(self)


class _Round:
    """One run: every prepared request, at its time or as clients get their answers."""

    def __init__(self, run: Send, asks: list[Ask], bodies: list[bytes]) -> None:
        self._run = run
        self._bodies = bodies
        self.exchanges = [_Exchange(ask) for ask in asks]
        self._next = 0
        self._under_way = 0
        self._changed = asyncio.Event()
        self._idle: dict[str, list[_Connection]] = defaultdict(list)
        self._all: set[_Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()

    async def send_all(self, begin_s: float) -> None:
        """Send everything, from this moment of the monotonic clock on, and wait for the ends."""
        if self._run.concurrency:
            for _ in range(min(self._run.concurrency, len(self.exchanges))):
                self._send(time.monotonic())
        else:
            for exchange in self.exchanges:
                due_s = begin_s + exchange.ask.at_s
                await _until(due_s)
                self._send(due_s)
        while self._under_way:
            self._changed.clear()
            await self._changed.wait()
        for connection in self._all:
            connection.transport.abort()

    def _send(self, due_s: float) -> None:
        index, self._next = self._next, self._next + 1
        exchange = self.exchanges[index]
        url = self._run.urls[index % len(self._run.urls)]
        host = urlsplit(url).netloc
        parts = request_parts(
            self._bodies[index],
            model=self._run.model,
            host=host,
            request_id=request_id(self._run.name, index),
        )
        self._under_way += 1
        exchange.begin_s = time.monotonic()
        exchange.late_s = exchange.begin_s - due_s
        idle = self._idle[url]
        while idle:
            connection = idle.pop()
            if not connection.lost:
                connection.ask(exchange, parts, self._run.timeout_s)
                return
        task = asyncio.create_task(self._send_anew(exchange, url, parts))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _send_anew(self, exchange: _Exchange, url: str, parts: list[bytes]) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(
                    lambda: _Connection(self._ended, url), address.hostname, address.port or 80
                ),
                _CONNECT_TIMEOUT_S,
            )
        except (OSError, asyncio.TimeoutError) as error:
            exchange.problem = f"no connection to {url}: {error!r}"
            exchange.end_s = time.monotonic()
            self._finish()
            return
        self._all.add(connection)
        connection.ask(exchange, parts, self._run.timeout_s)

    def _ended(self, connection: _Connection) -> None:
        if not connection.lost:
            self._idle[connection.url].append(connection)
        self._finish()

    def _finish(self) -> None:
        self._under_way -= 1
        if self._run.concurrency and self._next < len(self.exchanges):
            self._send(time.monotonic())
        self._changed.set()


async def _until(due_s: float) -> None:
    """Return at a moment of the monotonic clock, closer than timers of an event loop do."""
    wait_s = due_s - time.monotonic() - _SPIN_S
    if wait_s > 0:
        await asyncio.sleep(wait_s)
    while time.monotonic() < due_s:
        await asyncio.sleep(0)


class _Clients:
    """Carries out commands."""

    def __init__(self) -> None:
        self._asks: list[Ask] = []
        self._bodies: list[bytes] = []

    async def carry_out(self, command: Command) -> ClientsDone:
        """Return what came of a command."""
        if isinstance(command, Prepare):
            self._asks = list(command.asks)
            self._bodies = [body_of(ask) for ask in self._asks]
            return ClientsDone()
        cpu_s, begin_s = time.process_time(), time.monotonic()
        sending = _Round(command, self._asks, self._bodies)
        await sending.send_all(begin_s)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - begin_s
        answers = tuple(each.answer(begin_s) for each in sending.exchanges)
        return ClientsDone(answers=answers, begin_s=begin_s, cpu_s=cpu_s, wall_s=wall_s)


def main() -> None:
    """Carry out commands until standard input ends."""
    open_files.raise_limit()
    carry_out_commands(Command, _Clients().carry_out)


if __name__ == "__main__":
    main()

"""The clients of a router under measurement: one process, no library between it and the sockets.

``python -m epd_portable.bench.router.load NICENESS`` reads a command a line and answers each with a
line of `Done`. Answers are judged after a run, so that no judging delays a sending. How much the
load used of its core, and how late it sent, is part of every result: a load that is the bottleneck
shows.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec

from epd_portable.bench.fast_loop import carry_out_commands
from epd_portable.bench.router.commands import (
    AnswerRecord,
    Command,
    Done,
    Flow,
    Release,
    Run,
    Watch,
)
from epd_portable.bench.router.questions import NoisePicture, Question, judge, request
from epd_portable.bench.router.raw_http import MessageProtocol

HOST = "127.0.0.1"
_CONNECT_TIMEOUT_S = 20.0


class _Asked:
    """One request under way, and what became of it."""

    __slots__ = (
        "begin_s",
        "body",
        "complete",
        "end_s",
        "first_s",
        "late_s",
        "left",
        "problem",
        "question",
        "status",
    )

    def __init__(self, question: Question, begin_s: float, late_s: float) -> None:
        self.question = question
        self.begin_s = begin_s
        self.late_s = late_s
        self.first_s = -1.0
        self.end_s = -1.0
        self.status = 0
        self.body: list[bytes] = []
        self.complete = False
        self.left = False
        self.problem = ""

    def exchange(self, run_begin_s: float, *, held: bool) -> AnswerRecord:
        """Judge it."""
        if self.left:
            verdict, detail = "left", ""
        elif held and self.status == 200 and self.first_s >= 0:
            verdict, detail = "right", ""
        elif not self.complete:
            verdict = "wrong"
            detail = self.problem or f"broken off after {sum(map(len, self.body))} bytes"
        else:
            verdict, detail = judge(self.question, self.status, b"".join(self.body))
        return AnswerRecord(
            begin_s=self.begin_s - run_begin_s,
            late_s=self.late_s,
            first_s=self.first_s - self.begin_s if self.first_s >= 0 else -1.0,
            total_s=self.end_s - self.begin_s,
            verdict=verdict,  # type: ignore[arg-type]
            detail=detail,
        )


class ClientConnection(MessageProtocol):
    """One connection; one request at a time.

    Args:
        ended: Called with the connection when its exchange has ended, whatever the end.

    Attributes:
        asked: The exchange under way.
        lost: It cannot be used any more.
        tokens: Of the answer that is held.
    """

    def __init__(self, ended: Callable[[ClientConnection], None]) -> None:
        super().__init__(responses=True)
        self._ended = ended
        self.asked: _Asked | None = None
        self.held = False
        self.lost = False
        self.tokens = 0
        self._timers: list[asyncio.TimerHandle] = []

    def ask(self, asked: _Asked, parts: list[bytes], flow: Flow, *, leave: bool) -> None:
        """Send a request."""
        loop = asyncio.get_running_loop()
        self.asked = asked
        self.held = flow.hold
        self._timers = [loop.call_later(flow.timeout_s, self._give_up, False)]
        if leave:
            self._timers.append(loop.call_later(flow.leave_after_s, self._give_up, True))
        self.transport.writelines(parts)

    def head_arrived(self, head: bytes) -> None:
        """Note the status."""
        if self.asked is not None:
            self.asked.status = int(head[9:12])

    def piece_arrived(self, piece: bytes) -> None:
        """Keep the answer, or count its tokens if it is held."""
        asked = self.asked
        if asked is None:
            return
        first = asked.first_s < 0
        if first:
            asked.first_s = time.monotonic()
        if self.held:
            self.tokens += piece.count(b"data: ")
            if first:
                self._close_exchange()
        else:
            asked.body.append(piece)

    def message_ended(self) -> None:
        """Hand the complete answer over."""
        if self.asked is not None and self.asked.end_s < 0:
            self.asked.complete = True
            self._close_exchange()

    def connection_lost(self, error: Exception | None) -> None:
        """Hand over what there is."""
        self.lost = True
        if self.asked is not None and self.asked.end_s < 0:
            self.asked.problem = self.asked.problem or self.problem
            self._close_exchange()

    def _give_up(self, on_purpose: bool) -> None:
        assert self.asked is not None
        self.asked.left = on_purpose
        self.asked.problem = "no end in time"
        self.transport.abort()

    def _close_exchange(self) -> None:
        assert self.asked is not None
        self.asked.end_s = time.monotonic()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._ended(self)


class _FlowRun:
    """One flow while it runs.

    Args:
        flow: What to send.
        held: Gets connections whose answers stay open.
    """

    def __init__(self, flow: Flow, held: list[ClientConnection]) -> None:
        self.flow = flow
        self._begin_s = 0.0
        self._held = held
        self._picture = NoisePicture(flow.picture_bytes) if flow.picture_bytes else None
        self._idle: deque[ClientConnection] = deque()
        self._all: set[ClientConnection] = set()
        self._over = asyncio.Event()
        self._under_way = 0
        self._dialling: set[asyncio.Task[None]] = set()
        self.asked: list[_Asked] = []

    async def prepare(self) -> None:
        """Open connections, if the flow asks for that."""
        if self.flow.rate:
            opened = [asyncio.create_task(self._connect()) for _ in range(self.flow.connections)]
            self._idle.extend(await asyncio.gather(*opened))

    async def run(self, begin_s: float) -> None:
        """Send everything, from this moment of the monotonic clock on, and wait for the ends."""
        self._begin_s = begin_s + self.flow.start_s
        if self.flow.rate:
            await self._at_rate()
        else:
            await asyncio.sleep(self._begin_s - time.monotonic())
            for _ in range(self.flow.connections):
                self._next(None)
        while self._under_way:
            self._over.clear()
            await self._over.wait()
        for connection in self._all.difference(self._held):
            connection.transport.abort()

    @property
    def _may_send(self) -> bool:
        flow = self.flow
        if len(self.asked) >= flow.count:
            return False
        return not flow.seconds or time.monotonic() < self._begin_s + flow.seconds

    async def _at_rate(self) -> None:
        while self._may_send:
            due_s = self._begin_s + len(self.asked) / self.flow.rate
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._send(self._idle.popleft() if self._idle else None, due_s)

    def _send(self, connection: ClientConnection | None, due_s: float) -> None:
        number = self.flow.first_number + len(self.asked)
        flow = self.flow
        question = Question(
            number=number, chunks=flow.chunks, gap_ms=flow.gap_ms, first_ms=flow.first_ms
        )
        parts = request(question, f"{HOST}:{flow.port}", self._picture)
        now_s = time.monotonic()
        index = len(self.asked)
        asked = _Asked(question, now_s, now_s - due_s)
        self.asked.append(asked)
        self._under_way += 1
        # Spread evenly: whenever another whole one of so many is due.
        leave = (index + 1) * flow.leave // flow.count > index * flow.leave // flow.count
        if connection is None or connection.lost:
            task = asyncio.create_task(self._send_anew(asked, parts, leave=leave))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)
        else:
            connection.ask(asked, parts, flow, leave=leave)

    async def _send_anew(self, asked: _Asked, parts: list[bytes], *, leave: bool) -> None:
        try:
            connection = await self._connect()
        except (OSError, asyncio.TimeoutError) as error:
            asked.problem = f"no connection: {error!r}"
            asked.end_s = time.monotonic()
            self._under_way -= 1
            self._over.set()
            return
        connection.ask(asked, parts, self.flow, leave=leave)

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            lambda: ClientConnection(self._ended), HOST, self.flow.port
        )
        _, connection = await asyncio.wait_for(connecting, _CONNECT_TIMEOUT_S)
        self._all.add(connection)
        return connection

    def _ended(self, connection: ClientConnection) -> None:
        self._under_way -= 1
        if connection.held and not connection.lost:
            self._held.append(connection)
            following = None
        else:
            connection.asked = None
            following = connection
        if self.flow.rate:
            if following is not None and not following.lost:
                self._idle.append(following)
        else:
            self._next(following)
        self._over.set()

    def _next(self, connection: ClientConnection | None) -> None:
        if self._may_send:
            self._send(connection, time.monotonic())


class Load:
    """Carries out commands."""

    def __init__(self) -> None:
        self._held: list[ClientConnection] = []

    async def carry_out(self, command: Command) -> Done:
        """Return what came of a command."""
        cpu_s, begin_s = time.process_time(), time.monotonic()
        flows: list[_FlowRun] = []
        tokens = 0
        if isinstance(command, Run):
            flows = [_FlowRun(flow, self._held) for flow in command.flows]
            await asyncio.gather(*(flow.prepare() for flow in flows))
            cpu_s, begin_s = time.process_time(), time.monotonic()
            await asyncio.gather(*(flow.run(begin_s) for flow in flows))
        elif isinstance(command, Watch):
            before = sum(connection.tokens for connection in self._held)
            await asyncio.sleep(command.seconds)
            tokens = sum(connection.tokens for connection in self._held) - before
        else:
            assert isinstance(command, Release)
            for connection in self._held:
                connection.transport.abort()
            self._held.clear()
            await asyncio.sleep(0.05)
        done = Done(tokens=tokens, cpu_s=time.process_time() - cpu_s)
        done = msgspec.structs.replace(done, wall_s=time.monotonic() - begin_s)
        for each in flows:
            done.flows[each.flow.name] = [
                asked.exchange(begin_s, held=each.flow.hold) for asked in each.asked
            ]
        return done


def main() -> None:
    """Carry out commands until standard input ends."""
    os.nice(int(sys.argv[1]))
    carry_out_commands(Command, Load().carry_out)


if __name__ == "__main__":
    main()

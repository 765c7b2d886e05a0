"""Ranks of a group in processes of their own, driven like groups of this process.

For libraries that cannot have two ranks of a group in one process.
"""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeAlias

import torch

from epd_portable.platforms import registry
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous

START_S = 120.0
END_S = 60.0
ANSWER_S = 180.0
# Not forked: such a process would skip what libraries do, and may crash on, when one ends.
CONTEXT = multiprocessing.get_context("spawn")
Packed: TypeAlias = tuple[torch.dtype, tuple[int, ...], bytes]


def belongings() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


class RankProcess:
    """A process for any number of ranks; calls come from any thread, and run side by side.

    Args:
        context: In place of `CONTEXT`; one that forks saves seconds, where libraries bear it.
    """

    def __init__(self, context: BaseContext | None = None) -> None:
        context = context or CONTEXT
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs,), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            raise AssertionError(f"the process of ranks did not start within {START_S:g} s")
        self._address: str = self._pipe.recv()

    def join(
        self, platform: str, where: Rendezvous, *, index: int, timeout_s: float
    ) -> CollectiveGroup:
        """Let it join a group; raises what that raises there."""
        number, device = self.ask("join", platform, where, index, timeout_s)
        return RemoteGroup(self, number, device, where)

    def belongings(self) -> tuple[int, int]:
        """Return how many files and threads it has."""
        found: tuple[int, int] = self.ask("belongings")
        return found

    def memory(self, platform: str) -> list[tuple[int, int]]:
        """Return what it has allocated on each device, and what is free there; in bytes."""
        found: list[tuple[int, int]] = self.ask("memory", platform)
        return found

    def ask(self, method: str, *arguments: Any) -> Any:
        with Client(self._address) as connection:
            connection.send((method, arguments))
            if not connection.poll(ANSWER_S):
                raise AssertionError(f"{method} took more than {ANSWER_S:g} s")
            result, error = connection.recv()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let it end by itself, which it must do without a crash."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        assert self._process.exitcode == 0, f"exit code {self._process.exitcode}"


class OtherRank:
    """A process for rank 1, started when it is first asked for."""

    def __init__(self) -> None:
        self._started: list[RankProcess] = []

    def process(self) -> RankProcess:
        if not self._started:
            self._started.append(RankProcess())
        return self._started[0]

    def belongings(self) -> list[int]:
        """Files and threads of this process, and of that one."""
        both = [belongings(), *(process.belongings() for process in self._started)]
        return [count for counts in both for count in counts]

    def close(self) -> None:
        for process in self._started:
            process.close()


class RemoteGroup(CollectiveGroup):
    """A rank elsewhere. Its tensors here are copies: contents go there, and come back after."""

    def __init__(
        self, process: RankProcess, number: int, device: torch.device, where: Rendezvous
    ) -> None:
        self.rank = where.rank
        self.device = device
        self._process = process
        self._number = number

    def send(self, tensor: torch.Tensor, timeout_s: float) -> None:
        self._move("send", tensor, timeout_s)

    def recv(self, tensor: torch.Tensor, timeout_s: float) -> None:
        self._move("recv", tensor, timeout_s)

    def close(self) -> None:
        self._process.ask("close", self._number)

    def _move(self, method: str, tensor: torch.Tensor, timeout_s: float) -> None:
        content, error = self._process.ask("move", self._number, method, _pack(tensor), timeout_s)
        tensor.copy_(_unpack(content))
        if error is not None:
            raise error


class _Ranks:
    """Work of the process; every method runs in a thread of its own."""

    def __init__(self) -> None:
        self._groups: list[CollectiveGroup] = []
        self._lock = threading.Lock()

    def join(
        self, platform: str, where: Rendezvous, index: int, timeout_s: float
    ) -> tuple[int, torch.device]:
        group = registry.get(platform).new_group(where, index=index, timeout_s=timeout_s)
        with self._lock:
            self._groups.append(group)
            return len(self._groups) - 1, group.device

    def move(
        self, number: int, method: str, content: Packed, timeout_s: float
    ) -> tuple[Packed, Exception | None]:
        group = self._groups[number]
        tensor = _unpack(content).to(group.device)
        if group.device.type != "cpu":
            torch.accelerator.synchronize(group.device)
        failure = None
        try:
            getattr(group, method)(tensor, timeout_s)
        except Exception as error:
            failure = error
        return _pack(tensor), failure

    def close(self, number: int) -> None:
        self._groups[number].close()

    def belongings(self) -> tuple[int, int]:
        return belongings()

    def memory(self, platform: str) -> list[tuple[int, int]]:
        return memory(platform)


def memory(platform: str) -> list[tuple[int, int]]:
    """Return what this process has allocated on each device, and what is free there; in bytes."""
    found = registry.get(platform)
    return [
        (
            getattr(torch, platform).memory_allocated(index),
            found.memory_info(index).free_bytes,
        )
        for index in range(found.device_count())
    ]


def serve(pipe: Connection) -> None:
    ranks = _Ranks()
    with Listener(family="AF_UNIX") as listener:
        threading.Thread(target=_listen, args=(listener, ranks), daemon=True).start()
        pipe.send(listener.address)
        with suppress(EOFError):
            pipe.recv()


def _listen(listener: Listener, ranks: _Ranks) -> None:
    # Ends when the listener is closed.
    with suppress(OSError):
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), ranks), daemon=True).start()


def _answer(connection: Connection, ranks: _Ranks) -> None:
    with connection:
        method, arguments = connection.recv()
        try:
            answer = (getattr(ranks, method)(*arguments), None)
        except Exception as error:
            answer = (None, error)
        connection.send(answer)


def _pack(tensor: torch.Tensor) -> Packed:
    """Return the content as bytes: a pickled tensor would be shared memory."""
    assert tensor.is_contiguous()
    content = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), content


def _unpack(packed: Packed) -> torch.Tensor:
    dtype, shape, content = packed
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)

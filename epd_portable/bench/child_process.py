"""A child process that answers each line of JSON with one."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

import msgspec

from epd_portable.errors import MeasurementError

_STOP_GRACE_S = 10.0
_STDERR = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A running child; its name is for messages."""

    name: str
    requests: IO[bytes]
    answers: IO[bytes]

    def send(self, request: msgspec.Struct | None) -> None:
        """Send a request; to one that has ended `receive` says so."""
        with contextlib.suppress(BrokenPipeError):
            self.requests.write(msgspec.json.encode(request) + b"\n")
            self.requests.flush()

    def receive(self, kind: type[T], timeout_s: float | None = None) -> T:
        """Return its answer.

        Raises:
            MeasurementError: It has ended, or did not answer in time.
        """
        if not select.select([self.answers], [], [], timeout_s)[0]:
            raise MeasurementError(f"{self.name} did not answer in {timeout_s:g} s")
        line = self.answers.readline()
        if not line:
            raise MeasurementError(f"{self.name} ended; its message is above")
        return msgspec.json.decode(line, type=kind)


@contextlib.contextmanager
def start(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[ChildProcess]:
    """Start a child, and end it with the block.

    Args:
        argv: Gets the descriptor for its answers as a last argument: on standard output runtimes
            of devices write, too.
        env: All of its variables.
        popen: Starts it, as `subprocess.Popen` does.
    """
    received, answers = os.pipe()
    with os.fdopen(received, "rb") as file:
        process = popen(
            [*argv, str(answers)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            pass_fds=(answers,),
        )
        os.close(answers)
        assert process.stdin is not None
        try:
            yield ChildProcess(name, process.stdin, file)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

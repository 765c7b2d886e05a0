"""Starts the ends of a transfer, and gives them their commands."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec

from epd_benchmarks.stand_in import Command, CommandDone
from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import MeasurementError

_STOP_GRACE_S = 10.0
_STDERR = 2


@dataclass(frozen=True, slots=True)
class EndProcess:
    """A running process of `epd_benchmarks.ends`; its name is for messages."""

    name: str
    commands: IO[bytes]
    answers: IO[bytes]

    def send(self, command: Command) -> None:
        """Send a command; to one that has ended `receive` says so."""
        with contextlib.suppress(BrokenPipeError):
            self.commands.write(msgspec.json.encode(command) + b"\n")
            self.commands.flush()

    def receive(self, timeout_s: float) -> CommandDone:
        """Return its answer: when it is ready, then to each command.

        Raises:
            MeasurementError: It has ended, or did not answer in time.
        """
        if not select.select([self.answers], [], [], timeout_s)[0]:
            raise MeasurementError(f"{self.name} did not answer in {timeout_s:g} s")
        line = self.answers.readline()
        if not line:
            raise MeasurementError(f"{self.name} ended; its message is above")
        return msgspec.json.decode(line, type=CommandDone)


@contextlib.contextmanager
def start_end(
    role: str, config: InstanceConfig, env: Mapping[str, str], *, enter: Sequence[str] = ()
) -> Iterator[EndProcess]:
    """Start an end, and stop it with the block.

    Args:
        role: ``produce`` or ``consume``.
        env: All of its variables, but for the number of threads.
        enter: Command that starts it, for example in another namespace.
    """
    argv = [*enter, sys.executable, "-m", "epd_benchmarks.ends", role, config.model_dump_json()]
    received, answers = os.pipe()
    with os.fdopen(received, "rb") as file:
        # Answers have a pipe of their own: runtimes of devices write on standard output, too.
        process = subprocess.Popen(
            [*argv, str(answers)],
            env={**env, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            pass_fds=(answers,),
            # A signal to the whole group would end it before it removes its pool.
            start_new_session=True,
        )
        os.close(answers)
        assert process.stdin is not None
        try:
            yield EndProcess(config.instance, process.stdin, file)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

"""Starts the ends of a transfer, and gives them their commands."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from epd_benchmarks.stand_in import Command, CommandDone
from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import MeasurementError

_STOP_GRACE_S = 10.0
_STDERR = 2


@dataclass(frozen=True, slots=True)
class EndProcess:
    """A running process of `epd_benchmarks.ends`; its name is for messages."""

    name: str
    pipe: Connection[Command, CommandDone]

    def send(self, command: Command) -> None:
        """Send a command; `receive` reports a process that has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(command)

    def receive(self, timeout_s: float) -> CommandDone:
        """Return its reply, when it is ready and to each command; `MeasurementError` if none."""
        if not self.pipe.poll(timeout_s):
            raise MeasurementError(f"{self.name} did not reply in {timeout_s:g} s")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise MeasurementError(f"{self.name} ended; its message is above") from error


@contextlib.contextmanager
def start_end(
    role: str, config: InstanceConfig, env: Mapping[str, str], *, enter: Sequence[str] = ()
) -> Iterator[EndProcess]:
    """Start an end to ``produce`` or ``consume``, and stop it with the block.

    The command ``enter`` starts it, for example in another namespace.
    """
    argv = [*enter, sys.executable, "-m", "epd_benchmarks.ends", role, config.model_dump_json()]
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                env={**env, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=(theirs.fileno(),),
                # A signal to the whole group would end it before it removes its pool.
                start_new_session=True,
            )
        try:
            yield EndProcess(config.instance, ours)
        finally:
            ours.close()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

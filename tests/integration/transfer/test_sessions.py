"""Names of lives and hosts; the sockets are tested in integration/transfer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_portable.transfer.sessions import (
    host_identity,
    is_later_incarnation,
    new_session,
    process_is_gone,
)
from tests.unit.builders import peer

PRINT_SESSION = (
    "from epd_portable.transfer.sessions import new_session;"
    "print(new_session(), flush=True); input()"
)


@contextlib.contextmanager
def process_with_session(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that waits, and its session."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with process_with_session(PRINT_SESSION) as found:
        yield found


def test_a_killed_process_is_gone(other: tuple[subprocess.Popen[str], str]) -> None:
    process, session = other
    assert not process_is_gone(session)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_is_gone(session), "a zombie"
    process.wait()
    assert process_is_gone(session)


def test_the_later_of_two_lives_is_known(other: tuple[subprocess.Popen[str], str]) -> None:
    first, second = (
        peer(session=session, host=f"{host_identity()}{number}")
        for number, session in enumerate((new_session(), other[1]))
    )
    assert is_later_incarnation(second, first), "each container has a /dev/shm of its own"
    assert not is_later_incarnation(first, second)
    assert not is_later_incarnation(first, first)
    assert not is_later_incarnation(peer("encode-1", session=other[1], host=first.host), first)
    assert not is_later_incarnation(peer(session=other[1], host="another"), first)


def test_host_identity_holds_the_boot_and_the_shared_memory() -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_identity() == f"{boot_id}:{os.stat('/dev/shm').st_dev}"


LEADER_ENDS = """
import ctypes, threading
from epd_portable.transfer.sessions import new_session
print(new_session(), flush=True)
threading.Thread(target=input).start()
EXIT_OF_ONE_THREAD = 60 if __import__("platform").machine() == "x86_64" else 93
ctypes.CDLL(None).syscall(EXIT_OF_ONE_THREAD, 0)
"""


def test_process_is_gone_when_its_last_thread_has_ended() -> None:
    with process_with_session(LEADER_ENDS) as (process, session):
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert not process_is_gone(session)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_is_gone(session)


def test_a_pid_that_belongs_to_another_process_since_is_gone() -> None:
    pid, start, namespace, unique = new_session().split("-")
    assert process_is_gone(f"{pid}-{int(start) + 1}-{namespace}-{unique}")


def test_process_of_another_pid_namespace_is_not_certainly_gone() -> None:
    assert not process_is_gone("999999999-1-1-abc")

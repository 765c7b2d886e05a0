"""Children that are forked from a process which has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.warm import Nursery

END_S = 60.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery("fractions")
    yield made
    made.close()


def test_a_child_has_the_modules_and_its_own_arguments_environment_and_streams(
    nursery: Nursery,
) -> None:
    code = (
        "import os, sys; print('fractions' in sys.modules, sys.argv[1:], dict(os.environ));"
        "print('problem', file=sys.stderr)"
    )
    result = nursery.run("-c", code, "a", 1, env={"ONLY": "this"}, timeout=END_S)
    assert result.stdout == "True ['a', '1'] {'ONLY': 'this'}\n"
    assert result.stderr == "problem\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(print, 'bye', file=sys.stderr)", 0, "bye\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_a_child_ends_as_python_does(nursery: Nursery, code: str, status: int, said: str) -> None:
    result = nursery.run("-c", code, timeout=END_S)
    assert result.returncode == status
    assert result.stderr.endswith(said)
    assert bool(result.stderr) is bool(said)


def test_children_run_side_by_side_and_can_be_talked_to_and_killed(nursery: Nursery) -> None:
    code = "import os; print(os.getpid(), flush=True); print(input(), flush=True); input()"
    pipe = subprocess.PIPE
    children = [nursery.popen("-c", code, stdin=pipe, stdout=pipe) for _ in range(2)]
    for number, child in enumerate(children):
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == f"{child.pid}\n"
        print(number, file=child.stdin, flush=True)
        assert child.stdout.readline() == f"{number}\n"
        assert child.poll() is None
    assert os.getpid() not in {child.pid for child in children}
    for child in children:
        child.kill()
        assert child.wait(END_S) == child.poll() == -signal.SIGKILL
        assert child.stdin is not None and child.stdout is not None
        child.stdin.close()
        child.stdout.close()


def test_an_interrupt_is_for_children_and_not_for_the_process_that_they_are_forked_from(
    nursery: Nursery,
) -> None:
    os.kill(nursery._process.pid, signal.SIGINT)
    result = nursery.run("-c", "import os, signal; os.kill(os.getpid(), 2)", timeout=END_S)
    assert result.returncode == 1
    assert result.stderr.endswith("KeyboardInterrupt\n")


def test_what_nobody_has_ended_ends_with_the_process_that_it_was_forked_from() -> None:
    made = Nursery("fractions")
    child = made.popen("-c", "import signal; signal.pause()")
    made.close()
    assert child.wait(END_S) == -signal.SIGTERM

"""Communicators as HCCL sees them: how large, how many at a time, and whether they go again."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.npu_sim.platform.children import run

ROUNDS = 20
PROCESSES = 3
GROUPS = 2 * (3 + ROUNDS)
"""Groups of each process: one with each of the two others in every round."""

SCRIPT = """
import os
os.dup2(1, 2)
from tests.npu_sim.platform.communicators_script import main
main({rounds})
"""


@pytest.fixture(scope="module")
def observer(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("observer") / "observer.so"
    source = Path(__file__).with_name("hccl_observer.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


@pytest.fixture(scope="module")
def printed(observer: str) -> str:
    """Return the output of the three processes and the observer in many rounds."""
    return run(SCRIPT.format(rounds=ROUNDS), LD_PRELOAD=observer)


def events(printed: str) -> dict[str, list[tuple[str, int]]]:
    """Return what happened in each process, in order."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for line in printed.splitlines():
        if line.startswith("@@ "):
            _, process, what, number = line.split()
            found[process].append((what, int(number)))
    return found


def test_communicators_of_a_process_are_made_one_at_a_time(printed: str) -> None:
    found = events(printed)
    assert len(found) == PROCESSES
    for happened in found.values():
        making = [what for what, _ in happened if what != "destroyed"]
        assert making == ["begun", "made"] * GROUPS


def test_every_communicator_is_destroyed_when_its_group_closes(printed: str) -> None:
    # What is left until a process ends is destroyed there.
    while_all_live = printed.partition("AFTER")[0]
    found = events(while_all_live)
    assert len(found) == PROCESSES
    for happened in found.values():
        assert [what for what, _ in happened].count("destroyed") == GROUPS


def test_groups_leave_no_device_memory_behind(printed: str) -> None:
    before, after = (
        line.partition(" ")[2]
        for line in printed.splitlines()
        if line.startswith(("BEFORE", "AFTER"))
    )
    assert before == after
    assert before.count("[") == 1 + PROCESSES


@pytest.fixture(scope="module")
def printed_beside_a_setting(observer: str) -> str:
    """Return the output of a few rounds if torch_npu makes communicators of a pair at will."""
    return run(SCRIPT.format(rounds=0), LD_PRELOAD=observer, P2P_HCCL_BUFFSIZE="77")


@pytest.mark.parametrize(("when", "groups"), [("printed", GROUPS), ("printed_beside_a_setting", 6)])
def test_communicator_ignores_buffer_size_of_the_environment(
    request: pytest.FixtureRequest, when: str, groups: int
) -> None:
    found = events(request.getfixturevalue(when))
    assert len(found) == PROCESSES
    for happened in found.values():
        assert [number for what, number in happened if what == "begun"] == [32] * groups
        assert [number for what, number in happened if what == "made"] == [2] * groups

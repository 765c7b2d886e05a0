"""``epd-launch check`` on simulated devices: what it lists, and the reasons that it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from epd_portable.transfer.registry import PATHS
from tests.npu_sim.platform.children import DEADLINE_S, nursery

PAIRS = {"npu": {"ipc", "shm", "collective", "tcp"}, "npu→cpu": {"shm", "tcp"}}


def afresh(options: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command as its user does."""
    return subprocess.run(
        [sys.executable, "-m", "epd_portable.launch.cli", *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def forked(options: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it in a process that begins with torch_npu imported."""
    code = f"from epd_portable.launch.cli import main\nmain({options!r})"
    return nursery().finish(code, env, DEADLINE_S)


def check(
    *options: str,
    run: Callable[[list[str], dict[str, str]], subprocess.CompletedProcess[str]] = forked,
    **env: str,
) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
    """Return the exit status, and ``usable`` and ``why`` by what and name."""
    done = run(["check", *options], {**os.environ, **env})
    # torch_npu writes warnings to standard output, before the table.
    lines = done.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("what")) :]
    columns = [table[0].index(title) for title in ("what", "name", "usable", "why")]
    findings = {}
    for line in table[1:]:
        cells = [
            line[begin:end].strip()
            for begin, end in zip(columns, [*columns[1:], len(line)], strict=True)
        ]
        findings[(cells[0], cells[1])] = (cells[2], cells[3])
    return done.returncode, findings


def test_devices_memory_and_paths_are_listed() -> None:
    status, found = check(
        "--platform", "npu", run=afresh, ASCEND_SIM_DEVICES="2", ASCEND_SIM_MEM_MB="2048"
    )
    assert status == 0
    assert found["engine", "vllm-ascend"][0] == "yes"
    assert found["platform", "npu"][1].endswith("2 devices")
    for index in (0, 1):
        usable, why = found["device", f"npu:{index}"]
        assert usable == "yes"
        assert why.endswith("of 2.00 GiB are free")
    paths = {name: usable for (what, name), (usable, _) in found.items() if what == "path"}
    # NIXL may be installed or not.
    del paths["npu/nixl"]
    assert paths == {f"npu/{path}": "yes" for path in PAIRS["npu"]}


@pytest.fixture(scope="module")
def everything() -> dict[tuple[str, str], tuple[str, str]]:
    return check()[1]


@pytest.mark.parametrize("pair", PAIRS)
def test_check_lists_paths_for_each_pair_of_platforms(
    everything: dict[tuple[str, str], tuple[str, str]], pair: str
) -> None:
    paths = {name: finding for (what, name), finding in everything.items() if what == "path"}
    of_pair = {name: why for name, why in paths.items() if name.rpartition("/")[0] == pair}
    assert len(of_pair) == len(PATHS)
    usable = {name.rpartition("/")[2] for name, (usable, _) in of_pair.items() if usable == "yes"}
    # NIXL may be installed or not.
    assert usable - {"nixl"} == PAIRS[pair]
    assert all(why for _, why in of_pair.values())


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"ASCEND_SIM_DEVICES": "0"}, "sees no device"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "9"}, "ASCEND_RT_VISIBLE_DEVICES=9"),
    ],
)
def test_without_a_device_the_reason_is_given(env: dict[str, str], why: str) -> None:
    _, found = check("--platform", "npu", **env)
    usable, reason = found["platform", "npu"]
    assert usable == "no"
    assert why in reason

"""A plan held against a hardware profile."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from epd_portable.config.hardware import HardwareProfile, find_hardware, load_profile
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.check import compare
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.plan.text import plan_table
from tests.unit.launch.plans import plan_of

PROFILE = """
platform: npu
device: Device X
devices_per_node: 2
memory_bytes: 10GiB
avoid_ports: [20000, 20009]
"""


def profile(text: str) -> HardwareProfile:
    """Return the profile of a file x.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "x.yaml")).write_text(text, "utf-8")
        return load_profile(path)


X = profile(PROFILE)


def plan(extra: str, hardware: HardwareProfile | None = X) -> Plan:
    return plan_of(f"model: m\n{extra}", "npu", devices=("0", "1"), hardware=hardware)


def warnings(extra: str, hardware: HardwareProfile | None = X) -> list[str]:
    return list(plan(extra, hardware).warnings)


def test_a_profile_is_one_of_the_package_or_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(PROFILE)
    assert find_hardware(str(mine), None).name == "mine"
    assert find_hardware("h200", "cuda").name == "h200"
    with pytest.raises(ConfigError, match="no such profile; there are 910b-32g"):
        find_hardware("h2000", None)


def test_a_public_port_that_other_software_takes_is_warned_of() -> None:
    assert warnings("front: {port: 20009}\ntransfer: {path: shm}") == [
        "front.port 20009: on x other software takes ports 20000 to 20009; choose one outside them"
    ]
    assert warnings("front: {port: 20010}\ntransfer: {path: shm}") == []


def test_a_plan_for_people_says_what_it_is_planned_for() -> None:
    text = plan_table(plan(""))
    assert "planned for x: Device X" in text
    assert "planned for" not in plan_table(plan("", hardware=None))


GIB = 2**30


@pytest.mark.parametrize(
    ("sizes", "usable", "reason"),
    [
        ([10 * GIB, 10 * GIB], True, "2 devices with 10.00 GiB each, as expected"),
        ([int(9.5 * GIB)] * 2, True, "2 devices with 10.00 GiB each, as expected"),
        ([10 * GIB], False, "1 devices answer, 2 expected"),
        ([10 * GIB, 5 * GIB], False, "torch sees 5.00 GiB of a device, 10.00 GiB expected"),
        ([], False, "0 devices answer, 2 expected"),
    ],
)
def test_a_machine_is_compared_with_a_profile(sizes: list[int], usable: bool, reason: str) -> None:
    finding = compare(X, sizes)
    assert (finding.kind, finding.name, finding.usable, finding.reason) == (
        *("hardware", "x"),
        usable,
        reason,
    )


def test_what_torch_sees_counts_before_what_the_device_has() -> None:
    seen = profile(f"{PROFILE}torch_memory_bytes: 9GiB")
    assert compare(seen, [9 * GIB] * 2).usable

"""A plan held against a hardware profile."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from epd_portable.config.hardware import HardwareProfile, find_hardware, load_profile
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.processes import Plan, plan_table
from tests.unit.launch.plans import plan_of

PROFILE = """
platform: npu
device: Device X
devices_per_node: 2
avoid_ports: [20000, 20009]
"""


def profile(text: str) -> HardwareProfile:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "x.yaml")).write_text(text, "utf-8")
        return load_profile(path)


X = profile(PROFILE)


def plan(extra: str, hardware: HardwareProfile | None = X) -> Plan:
    return plan_of(f"model: m\n{extra}", "npu", devices=("0", "1"), hardware=hardware)


def test_a_profile_is_one_of_the_package_or_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(PROFILE)
    assert find_hardware(str(mine), None).name == "mine"
    assert find_hardware("h200", "cuda").name == "h200"
    with pytest.raises(ConfigError, match="no such profile; there are 910b-32g"):
        find_hardware("h2000", None)


def test_a_plan_for_people_says_what_it_is_planned_for() -> None:
    text = plan_table(plan(""))
    assert "planned for x: Device X" in text
    assert "planned for" not in plan_table(plan("", hardware=None))

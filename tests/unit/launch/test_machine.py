"""Machines, as plans see them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from epd_portable.errors import LaunchError
from epd_portable.launch.plan import machine
from epd_portable.launch.plan.machine import has_compiler
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.platforms.traits import TRAITS


def test_a_compiler_is_looked_for_on_the_path_and_in_its_home(tmp_path: Path) -> None:
    traits = replace(TRAITS["cuda"], compiler=("nvcc", "$CUDA_HOME/bin/nvcc"))
    environ = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "home")}
    assert not has_compiler(traits, environ)
    file = tmp_path / "home/bin/nvcc"
    file.parent.mkdir(parents=True)
    file.touch(mode=0o755)
    assert has_compiler(traits, environ)
    assert not has_compiler(traits, {"PATH": str(tmp_path)})
    assert has_compiler(traits, {"PATH": str(file.parent)})
    assert has_compiler(TRAITS["cpu"], {})


def test_a_runtime_that_never_counts_its_devices_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_PROBE", "import time; time.sleep(300)")
    monkeypatch.setattr(machine, "_PROBE_LIMIT_S", 0.5)
    with pytest.raises(LaunchError, match="a device may be stuck"):
        machine.probed_machine(TRAITS["npu"], os.environ)


def test_plan_counts_visible_devices_or_those_of_its_profile() -> None:
    assert machine.assumed_machine(TRAITS["cuda"], {"CUDA_VISIBLE_DEVICES": "4, 5"}).devices == (
        "4",
        "5",
    )
    assert machine.assumed_machine(TRAITS["npu"], {}).devices is None
    asked = PlanRequest.from_options(platform=None, config=Path("t.yaml"), hardware="910b-64g")
    assert len(asked.expected_machine({"ASCEND_RT_VISIBLE_DEVICES": "4"}).devices or ()) == 8

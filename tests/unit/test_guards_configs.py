"""Every topology file that the repository ships loads and plans on every platform."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from epd_portable.config.instance import PlatformName
from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.launch.plan.model import ModelSource
from epd_portable.launch.plan.processes import Machine, make_plan
from epd_portable.platforms.traits import TRAITS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOPOLOGIES = sorted(CONFIGS.glob("*.yaml"))
MODEL = ModelSource(argument="/model", served_name="model", is_folder=True)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_a_shipped_topology_loads_and_plans(path: Path, platform: PlatformName) -> None:
    traits = TRAITS[platform]
    has_devices = traits.visible_devices_env is not None
    ports = itertools.count(20000)
    plan = make_plan(
        load_topology(path, platform),
        model=MODEL,
        traits=traits,
        machine=Machine(
            devices=tuple(str(index) for index in range(8)) if has_devices else None,
            cores=tuple(range(16)),
        ),
        run_id="0123abcd",
        free_port=lambda: next(ports),
        temp_dir="/tmp/epd",
    )
    assert plan.processes[-1].role == "router"
    taken = [port for process in plan.processes for port in process.ports.values()]
    assert len(taken) == len(set(taken))
    devices = [device for process in plan.processes for device in process.devices]
    again = {device for device in devices if devices.count(device) > 1}
    assert again == {shared.device for shared in plan.devices if shared.is_shared}
    assert plan.warnings == ()

"""Plans of topologies that tests write out, for a machine that they describe."""

from __future__ import annotations

import itertools
import json
from typing import Any

from epd_portable.config.hardware import HardwareProfile
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.load import parse_topology
from epd_portable.launch.plan.engine import ModelSource, Site
from epd_portable.launch.plan.machine import Machine
from epd_portable.launch.plan.placement import place_instances
from epd_portable.launch.plan.processes import Plan, ProcessSpec, make_plan
from epd_portable.platforms.traits import TRAITS

MODEL = ModelSource(argument="/models/m", served_name="m", is_folder=True)


def plan_of(
    text: str,
    platform: str = "cpu",
    *,
    model: ModelSource = MODEL,
    hardware: HardwareProfile | None = None,
    devices: tuple[str, ...] | None = None,
    cores: tuple[int, ...] = (0, 1, 2, 3),
    **machine: Any,
) -> Plan:
    ports = itertools.count(20000)
    topology, traits = parse_topology(text, platform), TRAITS[platform]  # type: ignore[arg-type]
    here = Machine(devices=devices, cores=cores, **machine)
    site = Site(
        topology=topology,
        model=model,
        traits=traits,
        placed=place_instances(topology, traits, here),
        has_compiler=here.has_compiler,
        run_id="00c0ffee",
        temp_dir="/tmp/epd-00c0ffee",
    )
    return make_plan(site, site, free_port=lambda: next(ports), hardware=hardware)


def options(spec: ProcessSpec) -> dict[str, str]:
    """Return the flags of a process and their values; a flag without one has ''."""
    return {
        flag: "" if following.startswith("--") else following
        for flag, following in itertools.pairwise([*spec.argv[3:], "--"])
        if flag.startswith("--")
    }


def connector(spec: ProcessSpec) -> dict[str, Any]:
    """Return vLLM's settings of the connector that an engine gets."""
    found: dict[str, Any] = json.loads(options(spec)["--ec-transfer-config"])
    return found


def instance(spec: ProcessSpec) -> dict[str, Any]:
    """Return the settings of an instance as its connector gets them; they can be read."""
    found: dict[str, Any] = connector(spec)["ec_connector_extra_config"]
    InstanceConfig.parse(found)
    return found


def front(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(options(plan.processes[-1])["--settings"])
    return found

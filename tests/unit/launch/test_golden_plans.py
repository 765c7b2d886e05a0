"""Every shipped topology plans for every target; three are recorded.

``golden/<topology>.<target>.json`` holds the output of ``epd-launch plan --json`` for one target of
each platform. After an intended change, record the plans again::

    python tests/unit/launch/test_golden_plans.py

and read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from epd_portable.config.hardware import load_profile
from epd_portable.launch import cli
from epd_portable.launch.plan import machine
from epd_portable.launch.plan.engine import resolve_model
from epd_portable.platforms.traits import TRAITS

GOLDEN = Path(__file__).with_name("golden")
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TOPOLOGIES = sorted(CONFIGS.glob("*.yaml"))
PROFILES = {path.stem: load_profile(path) for path in sorted(CONFIGS.glob("hardware/*.yaml"))}
TARGETS = ["cpu", *PROFILES]
NAMES = ("1e1p1d", "1e1pd-one-device", "1e3pd")
RECORDED = {(name, target) for name in NAMES for target in ("cpu", "910b-64g", "h200")}
RECORDED |= {("encode-on-cpu", "910b-64g")}
# Ports start where a profile may say to avoid them.
RUN_ID = "0000002a"


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Hold still what differs from run to run and from machine to machine."""

    with (
        mock.patch.object(cli, "new_run_id", lambda: RUN_ID),
        mock.patch.object(cli, "refusals", lambda *_: []),
        mock.patch.object(machine, "allowed_cores", lambda: tuple(range(16))),
        mock.patch.object(machine, "has_compiler", lambda *_: True),
        mock.patch.object(tempfile, "gettempdir", lambda: "/tmp"),
        mock.patch.dict("os.environ"),
    ):
        for traits in TRAITS.values():
            os.environ.pop(traits.visible_devices_env or "", None)
        yield


def plan(topology: Path, *options: str) -> dict[str, Any]:
    """Run ``epd-launch plan --json``, with this machine's paths replaced."""
    with pinned():
        arguments = ["plan", "--config", str(topology), *options, "--json"]
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    model = resolve_model("demo").argument
    text = result.stdout.replace(json.dumps(sys.executable), '"PYTHON"')
    return opened(json.loads(text.replace(json.dumps(model), '"MODEL"')))  # type: ignore[no-any-return]


def opened(value: Any) -> Any:
    """Return the value with every text that holds JSON parsed, so that differences can be read."""
    if isinstance(value, dict):
        return {key: opened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [opened(item) for item in value]
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def recorded(name: str, target: str) -> Path:
    return GOLDEN / f"{name}.{target}.json"


def file_of(name: str) -> Path:
    """Return a shipped file, or one beside the recorded plans."""
    shipped = CONFIGS / f"{name}.yaml"
    return shipped if shipped.exists() else GOLDEN / f"{name}.yaml"


def plan_for(topology: Path, target: str) -> dict[str, Any]:
    if target not in PROFILES:
        return plan(topology, "--platform", target)
    return plan(topology, "--platform", PROFILES[target].platform, "--hardware", target)


@pytest.mark.parametrize(("name", "target"), sorted(RECORDED))
def test_a_topology_plans_as_recorded(name: str, target: str) -> None:
    golden = recorded(name, target)
    assert plan_for(file_of(name), target) == json.loads(golden.read_text("utf-8")), (
        "if the change is meant, run tests/unit/launch/test_golden_plans.py and read the difference"
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda path: path.stem)
def test_shipped_topology_plans_without_warnings_on_every_target(
    topology: Path, target: str
) -> None:
    planned = plan_for(topology, target)
    assert planned["warnings"] == []
    processes = planned["processes"]
    assert processes[-1]["role"] == "front"
    ports = [port for process in processes for port in process["ports"].values()]
    assert len(ports) == len(set(ports))
    used = Counter(device for process in processes for device in process["devices"])
    tenants = {device: len(names) for device, names in planned["devices"].items()}
    assert tenants == (used if target != "cpu" else {})


def record() -> None:
    for name, target in RECORDED:
        text = json.dumps(plan_for(file_of(name), target), indent=1, ensure_ascii=False)
        recorded(name, target).write_text(text + "\n", "utf-8")
    print(f"wrote {len(RECORDED)} plans to {GOLDEN}")


if __name__ == "__main__":
    record()

"""Every shipped topology plans for every target; two are recorded; and platforms hardly differ.

``golden/<topology>.<target>.json`` holds what ``epd-launch plan --json`` prints for one target of
each platform. The rest follows from these by the tests of differences. To record the plans anew
after a change that is meant::

    python tests/unit/launch/test_golden_plans.py

and read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
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
RECORDED = {
    (name, target) for name in ("1e1p1d", "1e3pd") for target in ("cpu", "910b-64g", "h200")
} | {("encode-on-cpu", "910b-64g")}
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


PLACE = r"\.processes\[\d+\]\."
# Where the plans of one file may differ between two platforms with devices, and why.
MAY_DIFFER = {
    r"\.platform": "the platform's name",
    rf"{PLACE}argv\.--worker-cls": "each platform has its own worker",
    rf"{PLACE}argv\.--ec-transfer-config\.ec_connector_extra_config\.platform": "its name",
    rf"{PLACE}env\.EPD_PLATFORM": "its name",
    rf"{PLACE}env\.(CUDA|ASCEND_RT)_VISIBLE_DEVICES": (
        "the variable's name; its value, where instances must see each other's devices"
    ),
}
SLAB_MAY_DIFFER = {
    rf"{PLACE}env\.PYTORCH_NPU_ALLOC_CONF": "what keeps memory that others open in one piece"
}
"""The same, of files with instances that take items."""
SHARED_MAY_DIFFER = {
    rf"{PLACE}env\.HCCL_(HOST|NPU)_SOCKET_PORT_RANGE": "HCCL wants ports of its device"
}
"""The same, of files with instances on one device."""
KV_MAY_DIFFER = {
    r"\.kv\.(name|connector)": "each platform has its connector of KV",
    rf"{PLACE}argv\.--kv-transfer-config\..*": "which is configured so",
    rf"{PLACE}env\.VLLM_NIXL_SIDE_CHANNEL_(HOST|PORT)": "in words of its own",
}
"""The same, of files with decode instances."""
CPU_MAY_DIFFER = {
    rf"{PLACE}((api_)?cores|devices).*": "instances are bound to cores there, not to devices",
    rf"{PLACE}env\.VLLM_CPU_(OMP_THREADS_BIND|KVCACHE_SPACE)": "the same",
    rf"{PLACE}env\.(OMP_NUM_THREADS|TORCH_COMPILE_DISABLE)": "the same",
    rf"({PLACE}after|\.devices).*": "devices may be shared, cores are not",
    rf"{PLACE}argv\.--settings\.(engines|instances)\[\d\]\.labels\.epd\.pair": "the same",
    rf"{PLACE}argv\.--distributed-executor-backend": "vLLM has one rank in the engine's process "
    "by itself on devices, and not on the CPU",
}
MISSING = object()


def places(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value with its place; a command line counts as a mapping of its flags."""
    if isinstance(value, list) and at.endswith(".argv"):
        value = flags(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, f"{at}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, f"{at}[{index}]")
    else:
        yield at, value


def flags(argv: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = "command"
    for word in argv:
        if isinstance(word, str) and word.startswith("--"):
            name = word
            found[name] = True
        else:
            found[name] = word if found.get(name, True) is True else [found[name], word]
    return found


def written_by_overlays(topology: Path) -> set[str]:
    """Return patterns of the places that the file itself makes differ by platform."""
    overlays = yaml.safe_load(topology.read_text("utf-8")).get("platform") or {}
    patterns = set()
    for overlay in overlays.values():
        groups = [overlay, *(overlay.get("instances") or {}).values()]
        for group in groups:
            for name in group.get("engine_args") or {}:
                flag = name.replace("_", "-")
                patterns.add(rf"\.processes\[\d+\]\.argv\.--(no-)?{flag}(\..*)?")
            patterns |= {rf"\.processes\[\d+\]\.env\.{name}" for name in group.get("env") or {}}
    return patterns


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    left, right = dict(places(one)), dict(places(other))
    return {
        place
        for place in left.keys() | right.keys()
        if left.get(place, MISSING) != right.get(place, MISSING)
    }


@pytest.mark.parametrize("other", ["cuda", "cpu"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda path: path.stem)
def test_plans_for_two_platforms_differ_only_where_they_must(topology: Path, other: str) -> None:
    npu, planned = plan(topology, "--platform", "npu"), plan(topology, "--platform", other)
    found = differences(npu, planned)
    names = [process["name"] for process in npu["processes"]]
    takes = any(name.startswith(("prefill-", "prefill_decode-")) for name in names)
    takes = takes or sum("encode" in name for name in names) > 1
    shared = any(len(names) > 1 for names in npu["devices"].values())
    may = MAY_DIFFER | (KV_MAY_DIFFER if npu["kv"] else {}) | (SLAB_MAY_DIFFER if takes else {})
    may |= SHARED_MAY_DIFFER if shared else {}
    allowed = may.keys() | written_by_overlays(topology)
    if other == "cpu":
        allowed |= CPU_MAY_DIFFER.keys()
    unexpected = {p for p in found if not any(re.fullmatch(pattern, p) for pattern in allowed)}
    assert not unexpected
    unused = {p for p in may if not any(re.fullmatch(p, place) for place in found)}
    assert not unused, "these places are alike: remove them from MAY_DIFFER"


def record() -> None:
    for name, target in RECORDED:
        text = json.dumps(plan_for(file_of(name), target), indent=1, ensure_ascii=False)
        recorded(name, target).write_text(text + "\n", "utf-8")
    print(f"wrote {len(RECORDED)} plans to {GOLDEN}")


if __name__ == "__main__":
    record()

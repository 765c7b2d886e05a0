"""Devices that are found, and reasons for none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from tests.npu_sim.platform.children import run, run_afresh

LOOK = """
import json
from epd_portable.platforms import registry
npu, cpu = registry.availability("npu"), registry.availability("cpu")
again = registry.availability("npu")
count = registry.get("npu").device_count() if npu.ok else 0
print("@@" + json.dumps([npu.ok, npu.reason, count, again == npu, cpu.ok, cpu.reason]))
"""


def look(run: Callable[..., str] = run, **settings: str | None) -> tuple[bool, str, int, bool, str]:
    """Return what a process finds: the NPU's state, reason and devices; the CPU's state, reason."""
    printed = run(LOOK, **settings)
    line = next(line for line in printed.splitlines() if line.startswith("@@"))
    ok, reason, count, same_again, cpu_ok, cpu_reason = json.loads(line.removeprefix("@@"))
    assert same_again
    return ok, reason, count, cpu_ok, cpu_reason


@pytest.mark.parametrize(
    ("devices", "visible", "count"),
    [("2", None, 2), ("8", None, 8), ("2", "1", 1), ("2", "1,0", 2), ("8", "0,2,3", 3)],
)
def test_a_process_counts_the_devices_that_it_may_see(
    devices: str, visible: str | None, count: int
) -> None:
    ok, reason, found, _, _ = look(ASCEND_SIM_DEVICES=devices, ASCEND_RT_VISIBLE_DEVICES=visible)
    assert (ok, found) == (True, count)
    assert reason == f"torch_npu {version('torch-npu')}, {count} devices"


@pytest.mark.parametrize(
    ("devices", "visible", "shown"),
    [("0", None, "(unset)"), ("2", "", ""), ("2", "9", "9")],
    ids=["no device", "none visible", "a visible device that does not exist"],
)
def test_no_device_is_a_reason_that_names_what_hides_it(
    devices: str, visible: str | None, shown: str
) -> None:
    ok, reason, _, cpu_ok, _ = look(ASCEND_SIM_DEVICES=devices, ASCEND_RT_VISIBLE_DEVICES=visible)
    assert not ok
    assert reason.startswith(f"torch_npu {version('torch-npu')} sees no device; look at npu-smi")
    assert f"ASCEND_RT_VISIBLE_DEVICES={shown}, whose ids must exist and ascend" in reason
    assert cpu_ok


def test_dtype_query_without_a_device_reports_its_absence() -> None:
    printed = run(
        """
import torch
from epd_portable.platforms.npu import NpuPlatform
try:
    NpuPlatform().supports_dtype(torch.float16)
except Exception as error:
    print("@@", type(error).__name__, error)
""",
        ASCEND_SIM_DEVICES="0",
    )
    assert "@@ PlatformUnavailableError npu device 0 of 0; this process sees" in printed


@pytest.fixture(scope="module")
def without_runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH on which torch_npu has no libraries of a runtime beside it."""
    folder = tmp_path_factory.mktemp("packages")
    installed = distribution("torch-npu")
    for name in ("torch_npu", Path(str(installed._path)).name):
        shutil.copytree(
            str(installed.locate_file(name)), folder / name, copy_function=_link, symlinks=True
        )
    return str(folder)


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def test_missing_runtime_is_reported_with_its_remedy(without_runtime: str) -> None:
    ok, reason, _, cpu_ok, cpu_reason = look(
        run_afresh, PYTHONPATH=without_runtime, TORCH_DEVICE_BACKEND_AUTOLOAD=None
    )
    assert not ok
    assert not cpu_ok
    assert reason == cpu_reason
    assert reason.startswith("torch cannot be imported: Failed to load the backend extension")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in reason
    assert "libhccl.so: cannot open shared object file" in reason


def test_missing_runtime_refuses_only_the_npu(without_runtime: str) -> None:
    ok, reason, _, cpu_ok, _ = look(
        run_afresh, PYTHONPATH=without_runtime, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert not ok
    assert reason.startswith("no CANN runtime: libhccl.so: cannot open shared object file")
    assert reason.endswith("install CANN and source its set_env.sh")
    assert cpu_ok


@pytest.mark.parametrize(
    ("soc", "expected"),
    [
        ("Ascend910B3", ["float32", "bfloat16", "float16"]),
        ("Ascend910A", ["float32", "float16"]),
        ("Ascend310P3", ["float16"]),
    ],
)
def test_dtypes_are_those_of_the_kind_of_device(soc: str, expected: list[str]) -> None:
    printed = run(
        """
import torch
from epd_portable.platforms import registry
npu = registry.get("npu")
names = ("float32", "bfloat16", "float16", "int8")
print("@@", [name for name in names if npu.supports_dtype(getattr(torch, name))])
""",
        ASCEND_SIM_SOC=soc,
    )
    assert f"@@ {expected}" in printed

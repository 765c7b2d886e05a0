"""Markers say what a test needs; one hook skips it, with the reason, where that is missing."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import keyring

# Time is measured elsewhere: a busy machine fails no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Hypothesis also tries constants of the modules that happen to be loaded, which are others in every
# worker: with none of them, tries are the same in every run.
providers._get_local_constants = lambda: providers._local_constants
# Its handlers of forks start threads in a child with a `preexec_fn`, and abort it when they find
# their files closed; read when gRPC is first used.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Every request by a client of its own would read all certificates, for 30 ms of CPU.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

# Run by ci/jobs/npu-sim.sh in its own environment, the only one with the simulated runtime.
collect_ignore = [] if importlib.util.find_spec("ascend_sim") else ["npu_sim"]
if importlib.util.find_spec("vllm") is None:  # Their modules import it.
    collect_ignore += ["unit/vllm_plugin"]
    collect_ignore += [f"integration/{name}" for name in ("front", "items", "vllm_plugin")]


def _no_module(*names: str) -> str | None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def _no_program(*names: str, package: str) -> str | None:
    missing = [name for name in names if not shutil.which(name)]
    return f"not on PATH: {', '.join(missing)}; apt-get install {package}" if missing else None


def _no_device(name: str, *modules: str) -> str | None:
    if missing := _no_module("torch", *modules):
        return missing
    torch = importlib.import_module("torch")
    for module in modules:  # Importing it is what adds `torch.npu`.
        importlib.import_module(module)
    return None if getattr(torch, name).is_available() else f"torch sees no device of {name}"


# Marker -> probe that returns why it is not satisfied here, or None.
REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "needs_chromium": lambda: (
        _no_module("playwright")
        or (not shutil.which("google-chrome") and _no_program("chromium", package="chromium"))
        or None
    ),
    "needs_cuda": lambda: _no_device("cuda"),
    "needs_kubectl": lambda: _no_program("kubectl", package="kubectl"),
    "needs_npu": lambda: _no_device("npu", "torch_npu"),
    "needs_nixl": lambda: _no_module("nixl"),
    "needs_podman": lambda: _no_program(
        *("podman", "runc", "catatonit"),
        package="podman runc catatonit containernetworking-plugins",
    ),
    "needs_prometheus": lambda: _no_program("prometheus", "promtool", package="prometheus"),
    "needs_ray": lambda: _no_module("ray"),
    "needs_redis": lambda: (
        _no_module("redis") or _no_program("redis-server", package="redis-server")
    ),
    "needs_slurm": lambda: _no_program(
        *("slurmctld", "slurmd", "srun"),
        package="slurmctld slurmd slurm-client slurm-wlm-basic-plugins",
    ),
    "needs_vllm": lambda: _no_module("vllm"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-device",
        action="append",
        default=[],
        choices=[marker.removeprefix("needs_") for marker in REQUIREMENTS],
        help="fail, instead of skipping, the tests that need it when it is missing",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="run also what takes long and shows little that the rest does not",
    )
    parser.addoption(
        "--resume", type=Path, help="leave out the tests that this file names; add what passes"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.timetable")
    # Before workers of pytest-xdist are started, which then read the same files.
    keyring.secret_file()
    if getattr(config.option, "numprocesses", None):
        _rewrite_asserts(config)


def _rewrite_asserts(config: pytest.Config) -> None:
    """Write the bytecode of tests, which takes a second for thirty files, once for all workers."""
    state = config.stash[rewrite.assertstate_key]
    for argument in () if sys.dont_write_bytecode else config.args:
        for path in (config.rootpath / argument).rglob("test_*.py"):
            bytecode = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if not bytecode.exists():
                source_hash, code = rewrite._rewrite_test(path, config)
                bytecode.parent.mkdir(exist_ok=True)
                rewrite._write_pyc(state, code, source_hash, bytecode)


def pytest_unconfigure() -> None:
    warm = sys.modules.get("tests.warm")
    if warm is not None:
        warm.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without a look for garbage: there is little, and what is imported stays.

    Every worker collects all tests, which takes a third less so.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


ENGINES = {"tests/e2e", "tests/npu_sim/e2e"}
"""Folders whose tests all ask real engines."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(config.rootpath / folder) for folder in ENGINES):
            item.add_marker("e2e")
            item.add_marker("needs_vllm")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
    resume, full = config.getoption("--resume"), config.getoption("--full")
    passed = set(resume.read_text("utf-8").splitlines()) if resume and resume.exists() else set()
    left_out = {
        item
        for item in items
        if item.nodeid in passed or not (full or item.get_closest_marker("full") is None)
    }
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    resume = item.config.getoption("--resume")
    if resume and call.when == "call" and report.passed:
        with resume.open("a", encoding="utf-8") as file:
            print(item.nodeid, file=file)
    if report.failed:
        report.sections += _ends_of_logs(getattr(item, "funcargs", {}).values())
    return report


LOG_LINES, LOG_CHARACTERS = 40, 240
"""Most lines and characters of each log that a failed test shows."""


def _ends_of_logs(fixtures: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the end of each log of a topology among some fixtures."""
    folders = [getattr(getattr(each, "split", each), "log_dir", None) for each in fixtures]
    paths = {path for each in folders if isinstance(each, Path) for path in each.glob("*.log")}
    ends = []
    for path in sorted(paths):
        lines = path.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        text = "\n".join(line[:LOG_CHARACTERS] for line in lines)
        ends.append((f"end of {path.name}", text))
    return ends


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = item.config.getoption("--require-device")
    for marker, why_not in REQUIREMENTS.items():
        if item.get_closest_marker(marker) is None:
            continue
        reason = why_not()
        if reason is None:
            continue
        if marker.removeprefix("needs_") in required:
            pytest.fail(f"{marker}: {reason}, and --require-device demands it", pytrace=False)
        pytest.skip(f"{marker}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let a worker send what a test says of text that is no text, such as half a character."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    """Write out what UTF-8 does not hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(name): encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encodable, value))
    return value

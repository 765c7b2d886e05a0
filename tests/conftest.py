"""Markers say what a test needs; one hook skips it, with the reason, where that is missing."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from epd_portable.connector import registry
from tests import browser, keyring

# Time is measured elsewhere: a busy machine fails no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Hypothesis also tries constants of the modules that happen to be loaded, which are others in every
# worker: with none of them, tries are the same in every run.
providers._get_local_constants = lambda: providers._local_constants

# Run by ci/jobs/npu-sim.sh in its own environment, the only one with the simulated runtime.
collect_ignore = [] if importlib.util.find_spec("ascend_sim") else ["npu_sim"]


def _no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_npu() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    import torch
    import torch_npu  # noqa: F401 - importing it is what adds torch.npu

    return None if torch.npu.is_available() else "torch_npu sees no device"


def _no_nixl() -> str | None:
    return None if importlib.util.find_spec("nixl") else "nixl is not installed"


def _no_mooncake() -> str | None:
    return registry._missing(registry.entry("mooncake")) or None


def _no_prometheus() -> str | None:
    missing = [name for name in ("prometheus", "promtool") if not shutil.which(name)]
    why = f"not on PATH: {', '.join(missing)}; apt-get install prometheus"
    return why if missing else None


def _no_redis() -> str | None:
    if importlib.util.find_spec("redis") is None:
        return "the redis package is not installed"
    return None if shutil.which("redis-server") else "redis-server is not on PATH"


def _no_browser() -> str | None:
    names = ", ".join(browser.NAMES)
    why = f"no browser is on PATH (one of {names}); apt-get install chromium"
    return None if browser.executable() else why


def _no_vllm() -> str | None:
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed"


# Marker -> probe that returns why it is not satisfied here, or None.
REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "needs_browser": _no_browser,
    "needs_cuda": _no_cuda,
    "needs_mooncake": _no_mooncake,
    "needs_npu": _no_npu,
    "needs_nixl": _no_nixl,
    "needs_prometheus": _no_prometheus,
    "needs_redis": _no_redis,
    "needs_vllm": _no_vllm,
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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.timetable")
    # Before workers of pytest-xdist are started, which then read the same file.
    keyring.secret_file()


def pytest_unconfigure() -> None:
    warm = sys.modules.get("tests.warm")
    if warm is not None:
        warm.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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

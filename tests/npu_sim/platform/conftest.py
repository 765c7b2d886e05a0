from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform


@pytest.fixture(scope="session")
def npu() -> Platform:
    return registry.get("npu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # torch_npu says this once a process, at whichever test comes first.
    spared = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(spared)

from __future__ import annotations

import pytest

from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform


@pytest.fixture(scope="session")
def npu() -> Platform:
    return registry.get("npu")

"""Fixtures of one suite for NVIDIA, where there is one, and Ascend over its simulated runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from tests.devices.child import Child


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cuda", marks=pytest.mark.needs_cuda),
        pytest.param("npu", marks=pytest.mark.needs_npu),
    ],
)
def platform(request: pytest.FixtureRequest) -> Platform:
    """Return the platform; its first device is the current one."""
    found = registry.get(request.param)
    found.set_device(0)
    return found


@pytest.fixture
def device(platform: Platform) -> torch.device:
    """Return the first device."""
    platform.set_device(0)
    return platform.device(0)


@pytest.fixture(scope="module")
def owner(platform: Platform) -> Iterator[Child]:
    """Another process, on the last device: the second one where there are two."""
    with Child(platform.name) as child:
        yield child

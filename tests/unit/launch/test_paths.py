"""What the launcher knows of transfer paths without torch is what the table of paths says."""

from __future__ import annotations

import typing

from epd_portable.config.schema import TransferSection
from epd_portable.connector import registry
from epd_portable.launch.fit import DEVICE_POOL_PATHS
from epd_portable.launch.seats import DEVICE_MEMORY_PATHS


def names(**capabilities: bool) -> set[str]:
    return {
        path.name
        for path in registry.PATHS
        if all(getattr(path.capabilities, key) == value for key, value in capabilities.items())
    }


def test_every_path_can_be_asked_for_and_nothing_else() -> None:
    allowed = typing.get_args(TransferSection.model_fields["path"].annotation)
    assert set(allowed) == {registry.AUTO, *names()}


def test_the_paths_refused_without_device_memory_are_those_of_the_table() -> None:
    assert names(devices_only=True) == DEVICE_MEMORY_PATHS


def test_the_paths_that_take_device_memory_are_those_of_the_table() -> None:
    assert names(device_memory=True) | {registry.AUTO} == DEVICE_POOL_PATHS

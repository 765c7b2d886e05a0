"""What the launcher asks of the table of paths."""

from __future__ import annotations

from epd_portable.config import extensions
from epd_portable.connector import registry


def test_every_path_can_be_asked_for_and_nothing_else() -> None:
    assert tuple(path.name for path in registry.PATHS) == extensions.BUILT_IN_PATHS


def test_a_path_into_device_memory_is_refused_where_there_is_none_and_auto_is_not() -> None:
    asked = [registry.AUTO, *extensions.BUILT_IN_PATHS]
    assert [path for path in asked if registry.needs_devices(path)] == ["ipc"]


def test_the_pools_of_auto_ipc_and_collective_take_device_memory() -> None:
    asked = [registry.AUTO, *extensions.BUILT_IN_PATHS]
    found = [path for path in asked if registry.may_use_device_memory(path)]
    assert found == ["auto", "ipc", "collective"]

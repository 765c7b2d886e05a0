"""Reports of `epd-launch check` on a machine, with a fake platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.config.instance import AUTO, PATH_NAMES
from epd_portable.config.store import StoreSection
from epd_portable.launch.plan.request import store_warnings
from epd_portable.transfer import registry


def test_check_reports_whether_the_store_replies(tmp_path: Path) -> None:
    assert store_warnings(StoreSection(kind="file", path=str(tmp_path / "store"))) == []
    (tmp_path / "file").touch()
    [said] = store_warnings(StoreSection(kind="file", path=str(tmp_path / "file")))
    assert "store.path" in said


def test_unreachable_store_is_reported_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    password = tmp_path / "password"
    password.write_text("hunter2")
    password.chmod(0o600)
    url = "redis://127.0.0.1:1"
    [said] = store_warnings(
        StoreSection(kind="redis", url=url, password_file=str(password), timeout_ms=200.0)
    )
    assert "127.0.0.1:1" in said and "hunter2" not in said


def test_each_path_is_selectable_and_device_paths_are_known() -> None:
    asked = [AUTO, *PATH_NAMES]
    assert tuple(path.name for path in registry.PATHS) == PATH_NAMES
    assert [path for path in asked if registry.needs_devices(path)] == ["ipc"]
    found = [path for path in asked if registry.may_use_device_memory(path)]
    assert found == ["auto", "ipc", "collective"]

"""What `epd-launch check` says of a machine, with a stand-in for the platform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.config.store import StoreSection
from epd_portable.config.transfer import AUTO, PATH_NAMES
from epd_portable.errors import UnsupportedError
from epd_portable.launch.plan import check
from epd_portable.launch.plan.request import store_warnings
from epd_portable.platforms.base import Availability, MemoryInfo
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import registry


@pytest.fixture
def cores() -> dict[str, int] | None:
    return {}


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch, cores: dict[str, int] | None) -> Iterator[None]:
    """Let every platform have one device that answers."""

    def units(index: int) -> dict[str, int]:
        if cores is None:
            raise UnsupportedError("update torch_npu")
        return cores

    def get(name: str) -> Any:
        limits = {"compute_units": units, "limit_compute": units} if name == "npu" else {}
        return SimpleNamespace(
            traits=TRAITS[name],
            device_count=lambda: 1,
            memory_info=lambda index: MemoryInfo(free_bytes=1 << 30, total_bytes=1 << 31),
            **limits,
        )

    monkeypatch.setattr(check.platforms, "get", get)
    monkeypatch.setattr(
        check.platforms, "availability", lambda name: Availability(ok=True, reason="there")
    )
    yield


@pytest.mark.usefixtures("one_device")
def test_whether_instances_can_be_kept_to_a_share_of_a_device_is_told_where_some_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(platform: str) -> list[bool]:
        return [each.usable for each in check.inspect([platform]) if each.kind == "share"]

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    before = found("cuda")
    (tmp_path / "control").touch()
    assert (before, found("cuda"), found("cpu")) == ([Path("/tmp/nvidia-mps").exists()], [True], [])


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("cores", "usable", "why"),
    [
        ({"cube cores": 20, "vector cores": 40}, True, "of 20 cube cores, 40 vector cores"),
        (None, False, "update torch_npu"),
    ],
)
def test_where_processes_limit_themselves_check_asks_the_runtime_for_what_there_is(
    cores: dict[str, int] | None, usable: bool, why: str
) -> None:
    (share,) = [each for each in check.inspect(["npu"]) if each.kind == "share"]
    assert (share.usable, share.reason.endswith(why)) == (usable, True)
    assert usable == ("not run on hardware" in share.reason)


def test_whether_a_store_answers_is_told(tmp_path: Path) -> None:
    assert store_warnings(StoreSection(kind="file", path=str(tmp_path / "store"))) == []
    (tmp_path / "file").touch()
    [said] = store_warnings(StoreSection(kind="file", path=str(tmp_path / "file")))
    assert "store.path" in said


def test_a_store_that_does_not_answer_is_told_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    password = tmp_path / "password"
    password.write_text("hunter2")
    password.chmod(0o600)
    url = "redis://127.0.0.1:1"
    [said] = store_warnings(
        StoreSection(kind="redis", url=url, password_file=str(password), timeout_ms=200.0)
    )
    assert "127.0.0.1:1" in said and "hunter2" not in said


def test_every_path_can_be_asked_for_and_those_into_device_memory_are_known() -> None:
    asked = [AUTO, *PATH_NAMES]
    assert tuple(path.name for path in registry.PATHS) == PATH_NAMES
    assert [path for path in asked if registry.needs_devices(path)] == ["ipc"]
    found = [path for path in asked if registry.may_use_device_memory(path)]
    assert found == ["auto", "ipc", "collective"]

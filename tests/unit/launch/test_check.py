"""What `epd-launch check` says of a machine, with a stand-in for the platform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.launch import check
from epd_portable.platforms.base import Availability, MemoryInfo
from epd_portable.platforms.traits import TRAITS


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every platform have one device that answers."""

    def get(name: str) -> Any:
        return SimpleNamespace(
            traits=TRAITS[name],
            device_count=lambda: 1,
            memory_info=lambda index: MemoryInfo(free_bytes=1 << 30, total_bytes=1 << 31),
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
    assert (before, found("cuda"), found("npu")) == ([Path("/tmp/nvidia-mps").exists()], [True], [])

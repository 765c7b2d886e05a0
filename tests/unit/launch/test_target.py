"""What a command plans for: ``--platform``, ``--hardware``, or both."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.errors import ConfigError
from epd_portable.launch.plan.target import find_hardware, find_target

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CONFIG = CONFIGS / "1e1pd.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that holds no profiles."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("platform", [None, "npu"])
def test_a_profile_supplies_the_platform(platform: str | None) -> None:
    target = find_target(platform, "910b-64g", CONFIG)
    assert target.traits.name == "npu"
    assert target.hardware is not None
    assert target.hardware.name == "910b-64g"


def test_a_profile_of_another_platform_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"910b-64g is a profile of platform npu.* says cuda"):
        find_target("cuda", "910b-64g", CONFIG)


def test_a_profile_is_found_beside_the_topology_file_then_here_then_in_the_package(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "configs" / "hardware" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text((CONFIGS / "hardware/h200.yaml").read_text("utf-8"), "utf-8")
    for name in ("mine", "h200"):
        found = find_target(None, name, CONFIG).hardware
        assert found is not None
        assert found.name == name
    assert find_hardware("mine").name == "mine"
    assert find_hardware("h200").name == "h200", "the package has it"
    with pytest.raises(ConfigError, match="no such profile"):
        find_hardware("h2000")


def test_an_unknown_profile_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as error:
        find_target(None, "910b", CONFIG)
    assert "there are 910b-32g, 910b-64g, a100-40g, a100-80g, h200." in str(error.value)

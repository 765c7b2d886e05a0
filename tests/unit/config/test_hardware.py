"""Hardware profiles: what is read, what is refused, and what the shipped ones hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_portable.config.hardware import HardwareProfile, load_profile
from epd_portable.config.problems import checked
from epd_portable.errors import ConfigError

PROFILES = sorted((Path(__file__).resolve().parents[3] / "configs/hardware").glob("*.yaml"))
GOOD = PROFILES[0].read_text("utf-8")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        checked(text, HardwareProfile, source="p.yaml")
    first, *rest = str(error.value).splitlines()
    assert first.startswith("p.yaml: ")
    return [line.strip() for line in rest]


def changed(**keys: object) -> str:
    """Return a good profile with some keys replaced."""
    return yaml.safe_dump(yaml.safe_load(GOOD) | keys, sort_keys=False)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_shipped_profile_loads_and_its_numbers_are_right(path: Path) -> None:
    profile = load_profile(path)
    assert profile.devices_per_node == 8
    assert profile.name == path.stem


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"devices_per_node": 0}, "should be greater than or equal to 1"),
        ({"platform": "tpu"}, "input should be 'cuda', 'npu' or 'cpu', got 'tpu'"),
        ({"avoid_ports": [9, 3]}, "9 is above 3"),
        ({"avoid_ports": [9]}, "should have at least 2 items"),
    ],
)
def test_profile_problems_are_reported(keys: dict[str, Any], said: str) -> None:
    (line,) = problems(changed(**keys))
    assert said in line

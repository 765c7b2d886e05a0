"""Hardware profiles: what is read, what is refused, and what the shipped ones hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_portable.config.hardware import (
    HardwareProfile,
    load_profile,
)
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


def figure(value: object, quality: str = "derived") -> dict[str, object]:
    return {"value": value, "quality": quality, "source": "arithmetic, for a test"}


def changed(**keys: object) -> str:
    """Return a good profile with some keys replaced."""
    return yaml.safe_dump(yaml.safe_load(GOOD) | keys, sort_keys=False)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_shipped_profile_loads_and_its_numbers_are_right_and_have_sources(path: Path) -> None:
    profile = load_profile(path)
    assert profile.devices_per_node.value == 8
    gigabytes = int(path.stem.rpartition("-")[2][:-1]) if "-" in path.stem else 141
    assert profile.memory_bytes.value in (gigabytes << 30, gigabytes * 10**9)
    assert 0.9 < profile.usable_memory_bytes / profile.memory_bytes.value <= 1
    for name in HardwareProfile.model_fields:
        value = getattr(profile, name)
        for one in value.values() if isinstance(value, dict) else [value]:
            assert not isinstance(one, int | float), f"{name} is a bare number"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        *(
            (
                {"memory_bytes": figure("80GiB", quality)},
                f"source of a {quality} number must hold an https:// address",
            )
            for quality in ("datasheet", "measured", "secondary")
        ),
        ({"memory_bytes": {"value": "80GiB", "quality": "derived"}}, "source: is missing"),
        ({"platform": "tpu"}, "unknown platform 'tpu'; known are cuda, npu, cpu"),
        (
            {"avoid_ports": {"first": 9, "last": 3, **figure(0)}},
            "first 9 is above last 3",
        ),
    ],
)
def test_what_is_wrong_with_a_number_is_said(keys: dict[str, Any], said: str) -> None:
    if "avoid_ports" in keys:
        del keys["avoid_ports"]["value"]
    (line,) = problems(changed(**keys))
    assert said in line

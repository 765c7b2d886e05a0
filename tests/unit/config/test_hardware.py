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
    # Memory is faster than the link between devices, and that than the network or the host.
    assert profile.memory_bytes_per_s.value > 5 * profile.pair_bytes_per_s.value
    assert profile.pair_bytes_per_s.value > profile.network_bytes_per_s.value
    assert profile.pair_bytes_per_s.value > profile.host_bytes_per_s.value
    assert 2e14 < profile.bf16_flops.value < 1e15
    for name in HardwareProfile.model_fields:
        value = getattr(profile, name)
        for one in value.values() if isinstance(value, dict) else [value]:
            assert not isinstance(one, int | float), f"{name} is a bare number"


def test_numbers_are_read_in_the_unit_of_their_key() -> None:
    for text, number in (("25GB/s", 25 * 10**9), ("2.039 TB/s", 2039 * 10**9)):
        profile = checked(changed(pair_bytes_per_s=figure(text)), HardwareProfile, source="p.yaml")
        assert profile.pair_bytes_per_s.value == number
    profile = checked(changed(bf16_flops=figure("312TFLOPS")), HardwareProfile, source="p.yaml")
    assert profile.bf16_flops.value == 312 * 10**12


@pytest.mark.parametrize("text", ["25GiB/s", "25", "25GB", "GB/s", "25gb/s"])
def test_a_rate_in_another_unit_is_refused_with_an_example(text: str) -> None:
    (line,) = problems(changed(pair_bytes_per_s=figure(text)))
    assert line.startswith("pair_bytes_per_s.value (line ")
    assert "as in 25GB/s or 2.039TB/s" in line


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

"""Addresses for instances that join fronts elsewhere: names of fronts, and their own address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from epd_portable.config.roles import Role
from epd_portable.errors import LaunchError
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.run.fronts import addresses_of


@pytest.mark.parametrize("role", ["encode", "prefill", "encode-prefill"])
def test_single_engine_is_planned_for_any_counts(tmp_path: Path, role: Role) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        "model: demo\nsecret_file: s\ninstances: {encode: {count: 3}, decode: {count: 2}}\n"
        "launch: {join: 'http://10.0.0.1:8000'}\n"
        "platform: {cpu: {instances: {prefill: {count: 4}}}}\n"
    )
    request = PlanRequest.from_options(platform="cpu", config=file, alone=role)
    counts = request.load().instances.counts
    assert {role: count for role, count in counts.items() if count} == {role: 1}


async def test_host_name_has_unique_addresses_or_is_refused() -> None:
    assert await addresses_of("http://localhost:8000") == ["127.0.0.1"]
    assert await addresses_of("http://[::1]:8000") == ["::1"]
    with pytest.raises(LaunchError, match=r"none\.invalid has no address"):
        await addresses_of("http://none.invalid:80")


async def test_addresses_of_version_six_are_for_names_without_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = [(socket.AF_INET, 1, 6, "", (each, 0)) for each in ("10.0.0.3", "10.0.0.2")]
    six = [(socket.AF_INET6, 1, 6, "", ("fd00::2", 0, 0, 0))]
    for found, wanted in ((six + four, ["10.0.0.2", "10.0.0.3"]), (six, ["fd00::2"])):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert await addresses_of("http://fronts:8000") == wanted

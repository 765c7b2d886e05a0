"""What instances that join routers elsewhere need: names of routers, and their own address."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from epd_portable.errors import ConfigError
from epd_portable.launch.plan.addresses import (
    ELSEWHERE,
    addresses_of,
    own_address,
    require_addresses,
)
from epd_portable.launch.plan.request import PlanRequest


def test_the_own_address_is_the_one_that_the_kernel_sends_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Routed(socket.socket):
        def connect(self, address: Any) -> None:
            assert address[0] == ELSEWHERE
            super().connect(("127.0.0.1", 9))

    monkeypatch.setattr(socket, "socket", Routed)
    assert own_address() == "127.0.0.1"


def test_a_machine_without_a_default_route_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NotRouted(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", NotRouted)
    with pytest.raises(ConfigError, match=r"launch\.host: auto: .* no default route; write the"):
        own_address()


def test_one_instance_of_a_role_is_planned_whatever_the_file_says_of_counts(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        "model: demo\nsecret_file: s\ninstances: {encode: {count: 3}, decode: {count: 2}}\n"
        "router: {join: 'http://10.0.0.1:8000'}\nplatform: {cpu: {instances: {p: {count: 4}}}}\n"
    )
    request = PlanRequest.from_options(platform="cpu", config=file, role="decode")
    counts = request.load().instances.counts
    assert {role: count for role, count in counts.items() if count} == {"decode": 1}


def test_a_name_has_its_addresses_once_each_and_one_without_is_refused() -> None:
    assert addresses_of("http://localhost:8000") == ["127.0.0.1"]
    assert addresses_of("http://[::1]:8000") == ["::1"]
    with pytest.raises(ConfigError, match=r"router\.join http://none\.invalid:80: .*headless"):
        require_addresses(["http://127.0.0.1:80", "http://none.invalid:80"])


def test_addresses_of_version_six_are_for_names_without_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = [(socket.AF_INET, 1, 6, "", (each, 0)) for each in ("10.0.0.3", "10.0.0.2")]
    six = [(socket.AF_INET6, 1, 6, "", ("fd00::2", 0, 0, 0))]
    for found, wanted in ((six + four, ["10.0.0.2", "10.0.0.3"]), (six, ["fd00::2"])):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert addresses_of("http://routers:8000") == wanted

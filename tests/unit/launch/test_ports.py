"""Ports that the topology takes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.plan.machine import (
    FIRST_PORT,
    LAST_PORT,
    is_free,
    port_source,
    ports_in_order,
    require_free,
)


def test_ports_follow_from_the_run_and_skip_taken_ones() -> None:
    taken = {FIRST_PORT + 6}
    next_port = port_source(
        "00000005", reserved=frozenset({FIRST_PORT + 7}), free=lambda port, host: port not in taken
    )
    assert [next_port() for _ in range(3)] == [FIRST_PORT + step for step in (5, 8, 9)]


def test_the_search_wraps_around_and_ends() -> None:
    last = f"{LAST_PORT - FIRST_PORT:08x}"
    next_port = port_source(last, free=lambda port, host: port in (LAST_PORT, FIRST_PORT))
    assert [next_port(), next_port()] == [LAST_PORT, FIRST_PORT]
    with pytest.raises(LaunchError, match=r"no free port of 127\.0\.0\.1"):
        next_port()


def test_port_of_a_run_is_reserved_before_it_listens() -> None:
    run_id = f"{random.randrange(1 << 32):08x}"
    mine = port_source(run_id)()
    claims = (
        "from epd_portable.launch.plan.machine import port_source; print(port_source({run_id!r})())"
    )
    other = [sys.executable, "-c", claims.format(run_id=run_id)]
    found = [int(subprocess.check_output(other)) for _ in range(2)]
    assert is_free(mine)
    assert mine not in found
    assert found[0] == found[1], "what ended holds no port"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host 192\.0\.2\.1, port"):
        require_free(8000, "192.0.2.1")


def test_ports_that_are_fixed_are_the_same_every_time() -> None:
    ports = ports_in_order(21000, reserved=frozenset({21001}))
    assert [ports() for _ in range(3)] == [21000, 21002, 21003]
    ports = ports_in_order(65535)
    assert ports() == 65535
    with pytest.raises(ConfigError, match=r"launch\.first_port 65535 leaves too few ports"):
        ports()

"""``launch.host: auto`` in a network namespace of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
OWN_ADDRESS = (
    f"{sys.executable} -c "
    "'from epd_portable.launch.plan.machine import own_address; print(own_address())'"
)
CABLE = (
    "ip link add eth0 type veth peer name other && ip link set eth0 up && ip link set other up && "
    "ip address add 10.0.0.2/24 dev eth0 && "
)


def own_address(before: str) -> str:
    """Return the output in a namespace in which a command was run."""
    words = (*NAMESPACE, "sh", "-c", before + OWN_ADDRESS)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_own_address_is_that_of_the_default_route() -> None:
    try:
        subprocess.run((*NAMESPACE, "sh", "-c", f"{CABLE} true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a namespace with a network of its own is not allowed here")
    default = "ip route add default via 10.0.0.1 && "
    assert own_address(CABLE + default) == "10.0.0.2\n"
    assert "ConfigError: launch.host: auto: this machine has no default route" in own_address(CABLE)

"""Two hosts for tests: network namespaces joined by a cable, or loopback addresses in their place.

A namespace has a loopback, a ``/dev/shm`` and one address of its own, and a host identity that
differs from the other's; the kernel takes it away, and the cable, with the process that holds it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from epd_benchmarks.transfer import EndProcess, start_end
from epd_portable.config.instance import InstanceConfig

ROOT = Path(__file__).parents[3]
HOLD_S = 600
"""After this a namespace ends whatever becomes of its test."""
READY_S = 20.0


@dataclass(frozen=True)
class Host:
    """A place to start processes in.

    Attributes:
        address: At which others reach it.
        enter: Beginning of commands that run there.
    """

    address: str
    enter: tuple[str, ...]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other."""
    addresses = ("10.77.0.1", "10.77.0.2")
    with contextlib.ExitStack() as stack:
        try:
            holders = [stack.enter_context(_namespace()) for _ in addresses]
            _join(holders, addresses)
        except (OSError, subprocess.CalledProcessError) as error:
            stack.close()
            print(f"no namespaces here, loopback addresses instead: {error}")
            yield Host("127.0.0.2", ()), Host("127.0.0.3", ())
            return
        first, second = (
            Host(address, ("nsenter", "--net", "--mount", f"--target={pid}"))
            for address, pid in zip(addresses, holders, strict=True)
        )
        yield first, second


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    # Of /sys, libraries learn which network cards there are.
    mounts = "mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys"
    command = f"{mounts} && ip link set lo up && echo ready && exec sleep {HOLD_S}"
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", command], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise OSError("a namespace is not allowed")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _join(holders: list[int], addresses: tuple[str, str]) -> None:
    name = f"epd{uuid.uuid4().hex[:8]}"
    cable = f"ip link add {name} netns {holders[0]} type veth peer name {name} netns {holders[1]}"
    _run(cable)
    for pid, address in zip(holders, addresses, strict=True):
        there = f"nsenter --net --target={pid} ip"
        _run(f"{there} address add {address}/24 dev {name}")
        _run(f"{there} link set {name} up")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=READY_S)


def end(
    host: Host, role: str, config: InstanceConfig, env: Mapping[str, str]
) -> contextlib.AbstractContextManager[EndProcess]:
    """Start one of `epd_benchmarks.ends` on a host; nothing of it is left afterwards."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return start_end(role, config, own, enter=host.enter)

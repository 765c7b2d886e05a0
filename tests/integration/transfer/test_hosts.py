"""Items between two hosts, by every path that leaves one.

Hosts are network namespaces joined by a cable, or loopback addresses in their place. A namespace
has a loopback, a ``/dev/shm``, one address and a host identity of its own; the kernel takes it
away, and the cable, with the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from epd_benchmarks.stand_in import TOKEN_BYTES, Command
from epd_benchmarks.transfer import start_end
from epd_portable.config.instance import InstanceConfig
from epd_portable.transfer import registry
from epd_portable.transfer.pool import SHM_FOLDER
from tests.keyring import secret_file

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


DEADLINE_S = 90.0
CONTROL_PORT, DATA_PORT = 9301, 9302
ITEMS = (1, 3 * (1 << 20) // TOKEN_BYTES)
"""In embeddings: one, and one that is several chunks of `tcp`."""


def best_between_hosts() -> str:
    """The path that ``auto`` takes here."""
    return registry.offered("auto", "cpu", off_host=True)[1].name


@pytest.mark.full
@pytest.mark.parametrize("path", ["nixl", "collective", "tcp", "auto"])
def test_an_item_goes_from_one_host_to_another(tmp_path: Path, path: str) -> None:
    if path != "auto" and (missing := registry.missing(registry.entry(path))):
        pytest.skip(missing)
    pool = f"epd-test-{uuid.uuid4().hex[:12]}"
    common = {"platform": "cpu", "path": path, "trusted_network": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "EPD_TRACE_DIR": str(tmp_path)}
    if path == "nixl":
        # Processes of one machine would find each other's memory.
        env["UCX_TLS"] = "tcp"
    with ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        producer = InstanceConfig(
            instance="encode-0", host=here.address, secret_file=secret_file(), **common
        )
        consumer = InstanceConfig(
            instance="prefill_decode-0",
            host=there.address,
            secret_file=secret_file(),
            control_address=f"tcp://{there.address}:{CONTROL_PORT}",
            data_address=f"tcp://{there.address}:{DATA_PORT}",
            pool=pool,
            pool_bytes=16 << 20,
            can_encode=False,
            **common,
        )
        ends = [
            stack.enter_context(
                start_end(role, config, {**env, "EPD_INSTANCE": config.instance}, enter=host.enter)
            )
            for host, role, config in ((there, "consume", consumer), (here, "produce", producer))
        ]
        for each in ends:
            each.receive(DEADLINE_S)
        for number, num_tokens in enumerate(ITEMS, start=1):
            command = Command(
                name=f"item-{number}",
                num_tokens=num_tokens,
                value=number,
                encode_s=0.0,
                consumer=consumer.control_address,
                device=0,
            )
            for each in ends:
                each.send(command)
            for each in ends:  # The consumer has compared what came with what was sent.
                each.receive(DEADLINE_S)
    lines = [line for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    events = map(json.loads, lines)
    taken = {each["path"] for each in events if each["event"] == "transfer.written"}
    alone = here.address.startswith("127.")
    assert taken == {path if path != "auto" else "shm" if alone else best_between_hosts()}
    assert not list(SHM_FOLDER.glob(f"{pool}*"))

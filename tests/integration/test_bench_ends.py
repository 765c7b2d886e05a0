"""The ends of ``epd-bench transfer``, also where work is complete later than it is queued."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from epd_benchmarks import ends
from epd_benchmarks.stand_in import Command
from epd_portable.config.instance import InstanceConfig
from epd_portable.demo.servers import free_port
from epd_portable.errors import TransportError
from epd_portable.items import placer
from epd_portable.platforms import registry
from epd_portable.platforms.base import DeviceEvent
from epd_portable.platforms.cpu import CpuPlatform
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.pool import SHM_FOLDER
from tests.keyring import secret_file

LATE_S = 0.05


class LateEvent(DeviceEvent):
    """Passes some time after it was recorded."""

    def __init__(self) -> None:
        self._passes_s = time.monotonic() + LATE_S

    def wait(self) -> None:
        """Order nothing: the bytes are there."""

    def done(self) -> bool:
        return time.monotonic() >= self._passes_s

    def block(self) -> None:
        time.sleep(max(0.0, self._passes_s - time.monotonic()))


class LatePlatform(CpuPlatform):
    """The CPU, taken for a device; only its events are late."""

    traits = dataclasses.replace(TRAITS["cpu"], needs_device_copy=True)

    def record_event(self) -> DeviceEvent:
        return LateEvent()


def test_transfer_and_baseline_end_with_their_device_work(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[float] = []
    copy = placer.Placer._copy

    def copied(*args: Any) -> None:
        copy(*args)
        queued.append(time.monotonic())

    monkeypatch.setattr(placer.Placer, "_copy", copied)
    control = f"tcp://127.0.0.1:{free_port()}"
    common = {
        "platform": "cpu",
        "path": "shm",
        "wait_timeout_s": 20.0,
        "secret_file": secret_file(),
    }
    consumer = ends.Consumer(
        InstanceConfig(
            instance="consumer",
            control_address=control,
            data_address="tcp://127.0.0.1:*",
            pool=f"epd-test-ends-{os.getpid()}",
            pool_bytes=1 << 20,
            **common,
        ),
        LatePlatform(),
    )
    producer = ends.Producer(InstanceConfig(instance="producer", **common), LatePlatform())
    command = Command(name="item", num_tokens=4, value=7, encode_s=0.0, consumer=control, device=0)
    try:
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(consumer.run, command)
            sent = producer.run(command)
            placed = received.result(timeout=30)
    finally:
        producer.close()
        consumer.close()
    assert sent.memcpy_s >= LATE_S
    assert placed.at_s - queued[0] >= LATE_S * 0.9
    assert sent.at_s < placed.step_s < placed.at_s


def test_a_consumer_whose_address_is_taken_leaves_nothing() -> None:
    pool = f"epd-test-taken-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = InstanceConfig(
            instance="consumer",
            platform="cpu",
            path="collective",
            control_address=f"tcp://127.0.0.1:{taken.getsockname()[1]}",
            data_address="tcp://127.0.0.1:*",
            pool=pool,
            pool_bytes=1 << 20,
            secret_file=secret_file(),
        )
        with pytest.raises(TransportError, match="cannot listen"):
            ends.Consumer(config, registry.get("cpu"))
    assert list(SHM_FOLDER.glob(f"{pool}*")) == []


def test_ports_are_none_that_outgoing_connections_take() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(100)) < first

"""Items between two hosts, by every path that leaves one."""

from __future__ import annotations

import json
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from epd_benchmarks.stand_in import TOKEN_BYTES, Command
from epd_portable.config.instance import InstanceConfig
from epd_portable.transfer import registry
from epd_portable.transfer.pool import SHM_FOLDER
from tests.integration.transfer.hosts import end, two_hosts
from tests.keyring import secret_file

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
    env = {"EPD_TRACE_DIR": str(tmp_path)}
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
            stack.enter_context(end(host, role, config, {**env, "EPD_INSTANCE": config.instance}))
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

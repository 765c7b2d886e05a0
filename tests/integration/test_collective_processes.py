"""A group between real processes, and what is seen when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd_portable.errors import PeerLostError
from epd_portable.platforms import registry
from epd_portable.platforms.collectives import Rendezvous
from epd_portable.platforms.collectives_torch import RendezvousHost

REPOSITORY = Path(__file__).parents[2]
PEER = """
import sys, torch
from epd_portable.platforms import registry
from epd_portable.platforms.collectives import Rendezvous
where = Rendezvous(host="127.0.0.1", port=int(sys.argv[1]), name="pair", rank=1, size=2)
group = registry.get("cpu").new_group(where, index=0, timeout_s=60)
box = torch.empty(1000, 16, dtype=torch.bfloat16)
while True:
    group.recv(box, 0, 60)
    group.send(box + 1, 0, 60)
"""
TIMEOUT_S = 60.0


@pytest.fixture
def host() -> Iterator[RendezvousHost]:
    made = RendezvousHost()
    yield made
    made.close()


def test_two_processes_exchange_tensors_until_one_is_killed(host: RendezvousHost) -> None:
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(host.port)],
        cwd=REPOSITORY,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    try:
        where = Rendezvous(host="127.0.0.1", port=host.port, name="pair", rank=0, size=2)
        group = registry.get("cpu").new_group(where, index=0, timeout_s=TIMEOUT_S)
        box = torch.empty(1000, 16, dtype=torch.bfloat16)
        for value in range(3):
            group.send(torch.full_like(box, value), 1, TIMEOUT_S)
            group.recv(box, 1, TIMEOUT_S)
            assert torch.equal(box, torch.full_like(box, value + 1))
        peer.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            group.recv(box, 1, TIMEOUT_S)
        assert time.monotonic() - start_s < TIMEOUT_S / 2
        group.close()
    finally:
        peer.kill()
        peer.wait()

"""A rank in a process of its own, which stops at a named place to be killed there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epd_portable.platforms import registry
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from tests import warm

PEER = """
import sys, time, torch
from epd_portable.platforms import registry
from epd_portable.platforms.collectives import Rendezvous
name, port, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def halt(*_, **__):
    print("STOP", flush=True)
    time.sleep(600)

platform = registry.get(name)
index = platform.device_count() - 1
if stop == "before joining":
    halt()
where = Rendezvous(host="127.0.0.1", port=port, name="pair", rank=1)
group = platform.new_group(where, index=index, timeout_s=120)
box = torch.empty(1000, 16, dtype=torch.bfloat16, device=group.device)
group.recv(box, 120)
group.send(box, 120)
if stop == "while receiving":
    group._move = halt
    group.recv(box, 120)
if stop == "while sending":
    group._move = halt
    group.send(box, 120)
halt()
"""


AMPLE_S = 120.0


@contextmanager
def peer(platform_name: str, host: RendezvousHost, stop: str) -> Iterator[warm.Process]:
    process = warm.start(
        "-c",
        PEER,
        platform_name,
        host.port,
        stop,
        cold=platform_name == "cuda",
        stdout=subprocess.PIPE,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def await_stop(process: warm.Process) -> None:
    assert process.stdout is not None
    assert any(line == "STOP\n" for line in process.stdout), "the peer ended by itself"


def join(platform_name: str, host: RendezvousHost, timeout_s: float) -> CollectiveGroup:
    where = Rendezvous(host="127.0.0.1", port=host.port, name="pair", rank=0)
    return registry.get(platform_name).new_group(where, index=0, timeout_s=timeout_s)


def exchange(group: CollectiveGroup) -> torch.Tensor:
    """Send a tensor that the peer sends back; returns a box for further calls."""
    sent = torch.full((1000, 16), 3, dtype=torch.bfloat16).to(group.device)
    box = torch.zeros_like(sent)
    group.send(sent, AMPLE_S)
    group.recv(box, AMPLE_S)
    assert box.cpu().unique().tolist() == [3]
    return box

"""A process with a peer's memory open, which loses another peer while a tensor moves to it.

Prints ``ALIVE`` once both the memory that it had before and what it opened after are let go.
"""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import closing

import msgspec
import pytest
import torch

from epd_portable.errors import PeerLostError, TransportTimeoutError
from epd_portable.platforms import registry
from epd_portable.platforms.base import ShareHandle
from epd_portable.platforms.collectives import RendezvousHost
from tests.kit.ranks import await_stop, exchange, join, peer

AMPLE_S = 60.0


def lose_a_peer() -> None:
    with closing(RendezvousHost()) as host, peer("npu", host, "while sending") as process:
        group = join("npu", host, AMPLE_S)
        box = exchange(group)

        def kill_when_stopped() -> None:
            await_stop(process)
            process.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_when_stopped)
        killer.start()
        with pytest.raises((PeerLostError, TransportTimeoutError)):
            group.recv(box, AMPLE_S / 4)
        killer.join(AMPLE_S)
        group.close()


def main(packed: bytes) -> None:
    """Open the memory of a handle before and after a peer is lost."""
    handle = msgspec.msgpack.decode(packed, type=ShareHandle)
    npu = registry.get("npu")
    opened = [npu.open_tensor(handle)]
    lose_a_peer()
    opened.append(npu.open_tensor(handle))
    contents = [tensor.cpu() for tensor in opened]
    assert torch.equal(*contents)
    opened.clear()
    gc.collect()
    print("ALIVE", contents[0].unique().tolist(), flush=True)

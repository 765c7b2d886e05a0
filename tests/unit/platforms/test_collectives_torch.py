from __future__ import annotations

import socket
import time

import pytest
import torch

from epd_portable.bench.servers import free_port
from epd_portable.errors import PeerLostError, PlatformError, TransportTimeoutError
from epd_portable.platforms.collectives import Rendezvous
from epd_portable.platforms.collectives_torch import RendezvousHost, TorchCollectiveGroup

CPU = torch.device("cpu")


def meet(port: int, *, timeout_s: float) -> TorchCollectiveGroup:
    where = Rendezvous(host="127.0.0.1", port=port, name="pair", rank=0)
    return TorchCollectiveGroup(where, device=CPU, timeout_s=timeout_s)


def test_a_host_that_is_not_there_is_told_at_once() -> None:
    port = free_port()
    with pytest.raises(PeerLostError, match=f"nothing listens at 127.0.0.1:{port}"):
        meet(port, timeout_s=20)


def test_a_host_that_accepts_and_never_answers_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin_s = time.monotonic()
        with pytest.raises(TransportTimeoutError, match=r"did not come within 0\.5 s"):
            meet(silent.getsockname()[1], timeout_s=0.5)
        assert time.monotonic() - begin_s < 5


def test_a_host_takes_a_free_port_on_its_own_address_only() -> None:
    host = RendezvousHost("127.0.0.1")
    with socket.create_connection(("127.0.0.1", host.port), 5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", host.port), 5)
    host.close()


def test_a_port_in_use_is_refused() -> None:
    host = RendezvousHost()
    with pytest.raises(PlatformError, match=f"cannot listen at 127.0.0.1:{host.port}"):
        RendezvousHost(port=host.port)
    host.close()


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rendezvous_is_for_one_of_two_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="ranks of a group are 0 and 1"):
        Rendezvous(host="127.0.0.1", port=1, name="pair", rank=rank)


def test_torchs_default_process_group_is_not_touched() -> None:
    host = RendezvousHost()
    with pytest.raises(TransportTimeoutError):
        meet(host.port, timeout_s=0.1)
    assert not torch.distributed.is_initialized()
    host.close()

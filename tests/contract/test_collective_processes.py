"""Groups between real processes, and what is seen when one of them is killed.

The peer prints ``STOP`` where it stops, to be killed: before it joins, after an exchange, or when
both ends have agreed on a tensor but no byte of it has moved.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext

import pytest
import torch

from epd_portable.errors import PeerLostError, TransportTimeoutError, UnsupportedError
from epd_portable.platforms import registry
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from epd_portable.platforms.npu import NpuPlatform
from tests.contract.pairs import EACH_PLATFORM
from tests.contract.path_consumer import CONTEXT as FORKED
from tests.contract.remote_ranks import RankProcess
from tests.kit.ranks import AMPLE_S, await_stop, exchange, join, peer

SHORT_S = 3.0


@pytest.fixture(params=EACH_PLATFORM)
def platform_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "cuda" and registry.get(name).device_count() < 2:
        pytest.skip("two ranks take two devices; there is one")
    return name


@pytest.fixture
def host() -> Iterator[RendezvousHost]:
    made = RendezvousHost()
    yield made
    made.close()


# A kernel on a device waits for its peer until the deadline.
@pytest.mark.parametrize("platform_name", ["cpu"], indirect=True)
def test_a_peer_killed_between_calls_is_found_lost_at_the_next(
    platform_name: str, host: RendezvousHost
) -> None:
    with peer(platform_name, host, "after an exchange") as process:
        group = join(platform_name, host, AMPLE_S)
        box = exchange(group)
        await_stop(process)
        process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            group.recv(box, AMPLE_S)
        assert time.monotonic() - start_s < AMPLE_S / 2
        group.close()


@pytest.mark.parametrize("stop", ["while receiving", "while sending"])
def test_killed_peer_is_an_error_at_the_deadline(
    platform_name: str, host: RendezvousHost, stop: str
) -> None:
    with peer(platform_name, host, stop) as process:
        group = join(platform_name, host, AMPLE_S)
        box = exchange(group)
        call = group.send if stop == "while receiving" else group.recv

        def kill_when_stopped() -> None:
            await_stop(process)
            process.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_when_stopped)
        killer.start()
        start_s = time.monotonic()
        # gloo may have taken a small tensor before the peer died; the call after it fails. Devices
        # may take all that is sent.
        sends = stop == "while receiving" and platform_name != "cpu"
        lost = (PeerLostError, TransportTimeoutError)
        with nullcontext() if sends else pytest.raises(lost):
            for _ in range(2):
                call(box, AMPLE_S / 4)
        assert time.monotonic() - start_s < AMPLE_S
        killer.join(AMPLE_S)
        group.close()
    # This process and its device live on.
    again = torch.ones(4, device=registry.get(platform_name).device(0))
    assert again.cpu().sum() == 4


@pytest.mark.needs_npu
def test_npu_groups_end_before_a_failed_ones_stream_is_reused(host: RendezvousHost) -> None:
    platform = NpuPlatform()
    with peer("npu", host, "while sending") as process:
        where = Rendezvous(host="127.0.0.1", port=host.port, name="pair", rank=0)
        group = platform.new_group(where, index=0, timeout_s=AMPLE_S)
        box = exchange(group)
        with pytest.raises((PeerLostError, TransportTimeoutError)):
            group.recv(box, SHORT_S)
        await_stop(process)
        group.close()
    nobody = Rendezvous(host="127.0.0.1", port=1, name="none", rank=0)
    for _ in range(24):
        with pytest.raises(PeerLostError, match="nothing listens"):
            platform.new_group(nobody, index=0, timeout_s=SHORT_S)
    with pytest.raises(UnsupportedError, match=r"restart the instance, or set transfer\.path"):
        platform.new_group(nobody, index=0, timeout_s=SHORT_S)


def test_peer_that_stops_while_tensor_moves_is_late_at_deadline(
    platform_name: str, host: RendezvousHost
) -> None:
    with peer(platform_name, host, "while sending"):
        group = join(platform_name, host, AMPLE_S)
        box = exchange(group)
        start_s = time.monotonic()
        with pytest.raises(TransportTimeoutError, match="rank 1 did not come within 3 s"):
            group.recv(box, SHORT_S)
        group.close()
        assert SHORT_S <= time.monotonic() - start_s < AMPLE_S


def test_peer_killed_before_it_joins_is_error_at_deadline(
    platform_name: str, host: RendezvousHost
) -> None:
    with peer(platform_name, host, "before joining") as process:
        await_stop(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises((TransportTimeoutError, PeerLostError)):
            join(platform_name, host, SHORT_S)


def test_groups_with_two_peers_can_be_made_at_once_and_again(
    platform_name: str, host: RendezvousHost
) -> None:
    platform = registry.get(platform_name)
    processes: list[RankProcess] = []

    def meet_and_part(number: int, attempt: int) -> None:
        def where(rank: int) -> Rendezvous:
            name = f"{number}-{attempt}"
            return Rendezvous(host=host.host, port=host.port, name=name, rank=rank)

        def far() -> CollectiveGroup:
            index = platform.device_count() - 1
            return processes[number].join(platform_name, where(1), index=index, timeout_s=AMPLE_S)

        def near() -> CollectiveGroup:
            return processes[2].join(platform_name, where(0), index=0, timeout_s=AMPLE_S)

        with ThreadPoolExecutor(2) as pool:
            there, here = (call.result() for call in [pool.submit(far), pool.submit(near)])
            sent, box = torch.full((1000,), float(attempt)), torch.zeros(1000)
            giving = pool.submit(here.send, sent, AMPLE_S)
            there.recv(box, AMPLE_S)
            giving.result()
        assert box.unique().tolist() == [attempt]
        for group in (here, there):
            group.close()

    with ExitStack() as ends:
        # The third is the one with two groups. It is not this process, where peers were killed:
        # torch_npu gives the stream of a failed group to the 32nd after it, which fails too.
        peers = None if platform_name == "cuda" else FORKED
        for context in (peers, peers, None):
            processes.append(ends.enter_context(closing(RankProcess(context))))
        # Beyond the 32 streams that torch_npu hands out in turn.
        for attempt in range(17 if platform_name == "npu" else 3):
            with ThreadPoolExecutor(2) as pool:
                for made in [pool.submit(meet_and_part, number, attempt) for number in (0, 1)]:
                    made.result()

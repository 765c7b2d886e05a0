"""Suite over every CollectiveGroup: guarantees for a writer.

Each test makes a group of its own and drives every rank from a thread of its own, which is never
the thread that made it. Ranks on devices have one device each; with HCCL one process each too.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from epd_portable.errors import (
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from tests.contract.pairs import EACH_PLATFORM
from tests.contract.remote_ranks import OtherRank
from tests.waiting import until

AMPLE_S = 20.0
SHORT_S = 0.2
MakeGroups = Callable[[], Sequence[CollectiveGroup]]


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Run each call in a thread of its own; return when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def results(*calls: Callable[[], Any]) -> list[Any]:
    return [future.result() for future in together(*calls)]


def errors(*calls: Callable[[], Any]) -> list[BaseException | None]:
    return [future.exception() for future in together(*calls)]


@pytest.fixture(scope="module")
def host() -> Iterator[RendezvousHost]:
    made = RendezvousHost()
    yield made
    made.close()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[OtherRank]:
    made = OtherRank()
    yield made
    made.close()


def index_for(platform: Platform, rank: int) -> int:
    """Return the device of a rank; skips the test where there are too few."""
    count = platform.device_count()
    # Only the simulated runtime lets two ranks have one device.
    if platform.device_type != "cpu" and count < 2 and not importlib.util.find_spec("ascend_sim"):
        pytest.skip(f"two ranks take two devices; {platform.name} has {count}")
    return rank % count


@pytest.fixture(params=EACH_PLATFORM)
def make(
    request: pytest.FixtureRequest, host: RendezvousHost, elsewhere: OtherRank
) -> Iterator[MakeGroups]:
    made: list[CollectiveGroup] = []
    numbers = itertools.count()

    def join(platform: Platform, name: str, rank: int, index: int) -> CollectiveGroup:
        where = Rendezvous(host=host.host, port=host.port, name=name, rank=rank)
        if platform.name == "npu" and rank:
            return elsewhere.process().join("npu", where, index=index, timeout_s=AMPLE_S)
        return platform.new_group(where, index=index, timeout_s=AMPLE_S)

    def make_groups() -> Sequence[CollectiveGroup]:
        platform = registry.get(request.param)
        first, second = (index_for(platform, rank) for rank in (0, 1))
        name = f"{request.node.name}-{next(numbers)}"
        if platform.name == "npu":
            elsewhere.process()  # Starting takes longer than joining may.
        groups = results(
            lambda: join(platform, name, 0, first), lambda: join(platform, name, 1, second)
        )
        made.extend(groups)
        return groups

    yield make_groups
    for group in made:
        group.close()


def on(group: CollectiveGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that the group can move."""
    copy = tensor.clone().to(group.device)
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)
    return copy


@pytest.fixture
def ranks(make: MakeGroups) -> Sequence[CollectiveGroup]:
    return make()


def test_ranks_know_themselves(make: MakeGroups) -> None:
    first, second = make()
    assert (first.rank, second.rank) == (0, 1)
    assert first.device.type == second.device.type
    assert first.device.type == "cpu" or first.device != second.device


@pytest.mark.parametrize(
    ("giver", "shape", "dtype"),
    [
        (0, (), torch.float32),
        (0, (5, 7), torch.bfloat16),
        (1, (5, 7), torch.uint8),
        (1, (1 << 20,), torch.float32),
    ],
    ids=str,
)
def test_tensor_arrives_whole_though_overwritten_after_send(
    ranks: Sequence[CollectiveGroup], giver: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    content = torch.arange(math.prod(shape)).reshape(shape).to(dtype) + 1
    sent = on(ranks[giver], content)
    received = on(ranks[1 - giver], torch.zeros(shape, dtype=dtype))

    def send_and_overwrite() -> None:
        ranks[giver].send(sent, AMPLE_S)
        sent.fill_(0)

    results(send_and_overwrite, lambda: ranks[1 - giver].recv(received, AMPLE_S))
    assert torch.equal(received.cpu(), content)


def test_sends_arrive_in_order_and_in_both_directions(ranks: Sequence[CollectiveGroup]) -> None:
    def give(group: CollectiveGroup) -> None:
        for value in range(5):
            group.send(on(group, torch.tensor([value])), AMPLE_S)

    def take(group: CollectiveGroup) -> list[int]:
        box = on(group, torch.tensor([-1]))
        return [(group.recv(box, AMPLE_S), int(box.cpu()))[1] for _ in range(5)]

    assert results(lambda: give(ranks[0]), lambda: take(ranks[1]))[1] == [0, 1, 2, 3, 4]
    assert results(lambda: take(ranks[0]), lambda: give(ranks[1]))[0] == [0, 1, 2, 3, 4]


def test_rank_closing_after_a_call_does_not_abort_others(make: MakeGroups) -> None:
    def send_and_leave(group: CollectiveGroup, tensor: torch.Tensor) -> None:
        group.send(tensor, AMPLE_S)
        group.close()

    def take_and_leave(group: CollectiveGroup, box: torch.Tensor) -> None:
        group.recv(box, AMPLE_S)
        group.close()

    for count in [4] * 20 + [1 << 20] * 5:
        first, second = make()
        ones, box = on(first, torch.ones(count)), on(second, torch.zeros(count))
        results(
            lambda first=first, ones=ones: send_and_leave(first, ones),  # type: ignore[misc]
            lambda second=second, box=box: take_and_leave(second, box),  # type: ignore[misc]
        )
        assert torch.equal(box.cpu(), torch.ones(count))


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.ones(4, 4).t(), "not contiguous"),
        (torch.ones(0, 4), "is empty"),
        (torch.ones(2, device="meta"), "tensor is on meta"),
    ],
    ids=["strided", "empty", "elsewhere"],
)
def test_a_tensor_that_cannot_be_moved_is_refused_at_once(
    ranks: Sequence[CollectiveGroup], tensor: torch.Tensor, complaint: str
) -> None:
    if tensor.is_cpu and ranks[0].device.type != "cpu":
        moved = torch.empty_strided((), (), dtype=tensor.dtype, device=ranks[0].device)
        tensor = moved.new_empty(16)[: tensor.numel()].as_strided(tensor.shape, tensor.stride())
    for call in (ranks[0].send, ranks[0].recv):
        with pytest.raises(ValueError, match=complaint):
            call(tensor, AMPLE_S)


def test_a_deadline_must_lie_ahead(ranks: Sequence[CollectiveGroup]) -> None:
    tensor = on(ranks[0], torch.ones(1))
    for call in (ranks[0].send, ranks[0].recv):
        for timeout_s in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="positive and finite"):
                call(tensor, timeout_s)


def four(group: CollectiveGroup) -> torch.Tensor:
    return on(group, torch.ones(4))


CALLS: dict[str, Callable[[CollectiveGroup, float], None]] = {
    "send": lambda group, timeout_s: group.send(four(group), timeout_s),
    "recv": lambda group, timeout_s: group.recv(four(group), timeout_s),
}
every_call = pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
MakeCall = Callable[[CollectiveGroup, float], None]
# On a device a kernel begins at once: it may end, hold up others or fail without a peer.
on_gloo = pytest.mark.parametrize("make", ["cpu"], indirect=True)


@on_gloo
@every_call
@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come_is_an_error_at_the_deadline(
    ranks: Sequence[CollectiveGroup], call: MakeCall, rank: int
) -> None:
    start_s = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"did not come within 0\.2 s"):
        call(ranks[rank], SHORT_S)
    assert SHORT_S <= time.monotonic() - start_s < AMPLE_S


@on_gloo
@every_call
def test_peer_that_has_closed_is_error_long_before_deadline(
    ranks: Sequence[CollectiveGroup], call: MakeCall
) -> None:
    ranks[1].close()
    start_s = time.monotonic()
    with pytest.raises(PeerLostError):
        call(ranks[0], AMPLE_S)
    assert time.monotonic() - start_s < AMPLE_S / 2


@on_gloo
@every_call
def test_a_peer_that_closes_while_this_rank_waits_wakes_it(
    ranks: Sequence[CollectiveGroup], call: MakeCall
) -> None:
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        call(ranks[0], AMPLE_S)

    def leave() -> None:
        assert waits.wait(AMPLE_S)
        ranks[1].close()

    start_s = time.monotonic()
    error, _ = errors(wait, leave)
    assert isinstance(error, PeerLostError)
    assert time.monotonic() - start_s < AMPLE_S / 2


@every_call
def test_a_closed_group_refuses_calls_and_says_why(
    ranks: Sequence[CollectiveGroup], call: MakeCall
) -> None:
    ranks[0].close()
    ranks[0].close()
    with pytest.raises(TransportError, match=r"is closed \(close\(\) was called\); make a new one"):
        call(ranks[0], AMPLE_S)


@on_gloo
def test_missed_deadline_closes_the_group_at_both_ends(ranks: Sequence[CollectiveGroup]) -> None:
    with pytest.raises(TransportTimeoutError):
        ranks[0].recv(four(ranks[0]), SHORT_S)
    with pytest.raises(TransportError, match="is closed"):
        ranks[0].recv(four(ranks[0]), SHORT_S)
    with pytest.raises(PeerLostError):
        ranks[1].recv(four(ranks[1]), AMPLE_S)


def test_groups_of_one_host_do_not_disturb_each_other(make: MakeGroups) -> None:
    first, second = make(), make()
    first[0].close()
    box = on(second[1], torch.zeros(4))
    results(
        lambda: second[0].send(four(second[0]), AMPLE_S),
        lambda: second[1].recv(box, AMPLE_S),
    )
    assert box.cpu().sum() == 4


def test_groups_come_and_go_without_leaving_anything_behind(
    make: MakeGroups, elsewhere: OtherRank
) -> None:
    def come_and_go() -> None:
        groups = make()
        box = on(groups[1], torch.zeros(4))
        results(
            lambda: groups[0].send(four(groups[0]), AMPLE_S),
            lambda: groups[1].recv(box, AMPLE_S),
        )
        for group in groups:
            group.close()

    # Caches of the libraries fill first.
    for _ in range(3):
        come_and_go()
    before = elsewhere.belongings()
    for _ in range(20):
        come_and_go()
    # Threads and connections of the last groups end in the background.
    until(
        lambda: all(
            now <= then + 2 for now, then in zip(elsewhere.belongings(), before, strict=True)
        )
    )

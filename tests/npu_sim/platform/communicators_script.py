"""Three processes that make, use and close groups of two; run under the observer of HCCL.

Prints what device memory each process had allocated, and was free, after three rounds and at the
end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch

from epd_portable.platforms import registry
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from tests.contract.remote_ranks import RankProcess, memory

DEADLINE_S = 60.0
# In an order that locks up processes which do not agree on one.
PAIRS = [(0, 1), (1, 2), (2, 0)]


class Forking(ForkContext):
    """Forks, and leaves to no process the end of a pipe that is another's."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Connection] = []

    def Pipe(self, duplex: bool = True) -> tuple[Connection, Connection]:
        ours, theirs = super().Pipe(duplex)
        self._kept.append(ours)
        return ours, theirs

    def Process(self, *, target: Callable[..., None], **options: Any) -> ForkProcess:
        def alone(*arguments: Any) -> None:
            for end in self._kept:
                end.close()
            target(*arguments)

        return ForkProcess(target=alone, **options)


class World:
    """Group of this process, which is number 0, and two others."""

    def __init__(self, others: list[RankProcess]) -> None:
        self.npu = registry.get("npu")
        self.host = RendezvousHost()
        self.others = others

    def join(self, process: int, rank: int, name: str) -> CollectiveGroup:
        where = Rendezvous(host=self.host.host, port=self.host.port, name=name, rank=rank)
        index = process % self.npu.device_count()
        if process == 0:
            return self.npu.new_group(where, index=index, timeout_s=DEADLINE_S)
        other = self.others[process - 1]
        return other.join("npu", where, index=index, timeout_s=DEADLINE_S)

    def meet_and_part(self, pair: tuple[int, int], name: str) -> None:
        with ThreadPoolExecutor(2) as pool:
            joins = [pool.submit(self.join, pair[rank], rank, name) for rank in (0, 1)]
            groups = [join.result() for join in joins]
            # A tensor for a rank elsewhere is copied to its device there.
            devices = [groups[rank].device if pair[rank] == 0 else "cpu" for rank in (0, 1)]
            boxes = [torch.full((4096,), rank + 1.0, device=devices[rank]) for rank in (0, 1)]
            giving = pool.submit(groups[0].send, boxes[0], DEADLINE_S)
            groups[1].recv(boxes[1], DEADLINE_S)
            giving.result()
        assert boxes[1].cpu().unique().tolist() == [1]
        for group in groups:
            group.close()

    def round(self, number: int) -> None:
        """All pairs at the same time."""
        with ThreadPoolExecutor(len(PAIRS)) as pool:
            for call in [
                pool.submit(self.meet_and_part, pair, f"{number}{pair}") for pair in PAIRS
            ]:
                call.result()

    def memory(self) -> list[list[tuple[int, int]]]:
        return [memory("npu"), *(other.memory("npu") for other in self.others)]


def main(rounds: int) -> None:
    """Play three rounds, in which caches fill, and then ``rounds`` more."""
    # Forked while no device has been used; how processes with groups end is not asked here.
    context = Forking()
    with ExitStack() as ends:
        world = World([ends.enter_context(closing(RankProcess(context))) for _ in range(2)])
        for number in range(3):
            world.round(number)
        before = world.memory()
        for number in range(3, 3 + rounds):
            world.round(number)
        deadline_s = time.monotonic() + DEADLINE_S
        # The last releases may still be under way.
        while world.memory() != before and time.monotonic() < deadline_s:
            time.sleep(0.05)
        print("BEFORE", before, flush=True)
        print("AFTER", world.memory(), flush=True)

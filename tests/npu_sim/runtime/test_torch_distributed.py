"""torch.distributed's backend "hccl" of the real torch_npu, over the simulated HCCL."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.npu_sim.platform.children import nursery
from tests.npu_sim.runtime import children

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2


def test_two_processes_exchange_tensors(tmp_path: Path) -> None:
    def be(rank: int) -> str:
        code = f"from {__name__} import exchange\nexchange({rank}, 'file://{tmp_path}/store')"
        return children.printed(nursery().finish(code, os.environ, children.DEADLINE_S))

    with ThreadPoolExecutor(RANKS) as pool:
        assert len(list(pool.map(be, range(RANKS)))) == RANKS


def exchange(rank: int, store: str) -> None:
    """Run in each process: every operation once, each result compared."""
    torch.npu.set_device(rank)
    device, peer = f"npu:{rank}", 1 - rank
    dist.init_process_group("hccl", init_method=store, rank=rank, world_size=RANKS)
    values = torch.arange(170, dtype=torch.bfloat16).view(10, 17)

    sent = values.to(device) if rank == 0 else torch.zeros_like(values).to(device)
    if rank == 0:
        dist.send(sent, 1)
    else:
        dist.recv(sent, 0)
    same(sent, values)

    spread = values.to(device) if rank == 1 else torch.zeros_like(values).to(device)
    dist.broadcast(spread, 1)
    same(spread, values)

    total = torch.tensor([rank + 1.0, 5.0]).to(device)
    dist.all_reduce(total)
    same(total, torch.tensor([3.0, 10.0]))

    largest = torch.tensor([rank, 5 - rank], dtype=torch.int32).to(device)
    dist.reduce(largest, 0, op=dist.ReduceOp.MAX)
    if rank == 0:
        same(largest, torch.tensor([1, 5], dtype=torch.int32))

    part = torch.zeros(2).to(device)
    parts = [torch.full((2,), float(number)).to(device) for number in range(RANKS)]
    dist.scatter(part, parts if rank == 0 else None, src=0)
    same(part, torch.full((2,), float(rank)))

    gathered = torch.zeros(2 * RANKS).to(device)
    dist.all_gather_into_tensor(gathered, part)
    same(gathered, torch.tensor([0.0, 0.0, 1.0, 1.0]))

    mine = torch.zeros(2).to(device)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * RANKS).to(device))
    same(mine, 2 * torch.arange(2.0 * RANKS)[2 * rank : 2 * rank + 2])

    received = torch.zeros(RANKS, dtype=torch.int64).to(device)
    dist.all_to_all_single(received, (torch.arange(RANKS) + 10 * rank).to(device))
    same(received, torch.tensor([rank, rank + 10]))

    swapped = torch.zeros(3).to(device)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)).to(device), peer),
            dist.P2POp(dist.irecv, swapped, peer),
        ]
    )
    for request in work:
        request.wait()
    same(swapped, torch.full((3,), float(peer)))

    dist.barrier()
    dist.destroy_process_group()


def same(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare what is on the device with what should be there."""
    assert torch.equal(tensor.cpu(), wanted), f"{tensor.cpu()} instead of {wanted}"

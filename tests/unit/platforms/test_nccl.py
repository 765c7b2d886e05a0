"""Groups on CUDA with a stand-in for NCCL, which speaks as torch 2.13's does.

Reproduced: what work answers when it is completed, failed or asked whether it succeeded. Not
reproduced: streams, and that work completes later than it is queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from epd_portable.errors import PeerLostError
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous, RendezvousHost
from epd_portable.platforms.cuda import CudaPlatform

TIMEOUT_S = 20.0


class Work:
    def __init__(self, *, failed: bool) -> None:
        self._failed = failed

    def is_completed(self) -> bool:
        return True  # As NCCL's says of failed work.

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> bool:
        if self._failed:
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        return True


class Nccl:
    made: ClassVar[list[Nccl]] = []
    fails = False

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=-1)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.options = store, rank, options
        self.calls = 0
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        (tensor,) = tensors
        if self.fails:
            return Work(failed=True)
        self.calls += 1
        if options.rootRank == self.rank:
            self.store.set(str(self.calls), tensor.numpy().tobytes())
        else:
            found = bytearray(self.store.get(str(self.calls)))
            tensor.copy_(torch.frombuffer(found, dtype=tensor.dtype).view(tensor.shape))
        return Work(failed=False)

    def abort(self) -> None:
        pass


class OneGpu(CudaPlatform):
    """CUDA whose device is host memory."""

    _runtime = SimpleNamespace(set_device=lambda device: None, device_count=lambda: 1)

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Nccl]:
    monkeypatch.setattr(Nccl, "made", [])
    monkeypatch.setattr(Nccl, "fails", False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    return Nccl


@pytest.fixture
def ranks(nccl: type[Nccl]) -> Iterator[tuple[CollectiveGroup, CollectiveGroup]]:
    host = RendezvousHost()

    def join(rank: int) -> CollectiveGroup:
        where = Rendezvous(host="127.0.0.1", port=host.port, name="pair", rank=rank)
        return OneGpu().new_group(where, index=0, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, (0, 1))
    yield first, second
    first.close()
    second.close()
    host.close()


def test_a_tensor_arrives(ranks: tuple[CollectiveGroup, CollectiveGroup]) -> None:
    first, second = ranks
    sent, got = torch.arange(5.0), torch.zeros(5)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(second.recv, got, TIMEOUT_S)
        first.send(sent, TIMEOUT_S)
        taken.result(TIMEOUT_S)
    assert torch.equal(got, sent)


def test_failed_work_is_a_lost_peer_though_reported_complete(
    ranks: tuple[CollectiveGroup, CollectiveGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks
    monkeypatch.setattr(Nccl, "fails", True)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(second.recv, torch.zeros(5), TIMEOUT_S)
        with pytest.raises(PeerLostError) as sent:
            first.send(torch.ones(5), TIMEOUT_S)
        received = taken.exception(TIMEOUT_S)
    assert isinstance(received, PeerLostError)
    # The end that is later may hear of the other's farewell first.
    assert "remote process exited" in f"{sent.value} {received}"


@pytest.mark.usefixtures("ranks")
def test_a_communicator_has_few_channels_of_its_own(nccl: type[Nccl]) -> None:
    assert [backend.options.config.max_ctas for backend in nccl.made] == [4, 4]

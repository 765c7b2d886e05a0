"""A consumer in a process of its own, and a test's handle on it.

The process is what a PD instance is without its engine: the workers' endpoint, the scheduler's with
its pool and receivers, and the placer, all real. It obeys its test until that lets go of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.items.placer import Placement, Placer, WorkerOrders
from epd_portable.platforms import registry
from epd_portable.transfer import registry as paths
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.endpoint import ConsumerEndpoint
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.descriptors import SlotDescriptor, TensorSpec
from tests.contract.pairs import FINGERPRINT, Route, encode_peer
from tests.keyring import secret_file

MIB = 1 << 20
POOL_BYTES = 48 * MIB
DEADLINE_S = 20.0
START_S = 120.0
"""The first one waits for the imports."""

# Forked from a process that has imported everything and used no device, so one takes milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "tests.contract.path_consumer"])
_generations = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments that open a consumer; further ranks of an instance have its pool's name."""

    route: Route
    pool: str
    pool_bytes: int = POOL_BYTES
    data_address: str = "tcp://127.0.0.1:*"
    device_index: int
    rank: int = 0


class Consumer:
    """The test's end: every method is carried out in the process."""

    def __init__(self, route: Route, **changes: Any) -> None:
        self.pool = changes.pop("pool", f"epd-test-{os.getpid()}-{uuid.uuid4().hex[:12]}")
        changes = {"device_index": route.pair.prefill_index, **changes}
        self._setup = Setup(route=route, pool=self.pool, **changes)
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, self._setup), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._answer(START_S)

    def grant(self, offset: int, nbytes: int) -> SlotDescriptor:
        slot = SlotDescriptor(
            pool=self.pool, offset=offset, nbytes=nbytes, generation=next(_generations)
        )
        self._ask("allow", slot)
        return slot

    def take_back(self, slot: SlotDescriptor) -> None:
        """End a lease as an instance does, in its scheduler and in its workers."""
        self._ask("take_back", slot)

    def fill(self, nbytes: int, value: int) -> None:
        """Set the first bytes of the memory that slots are in."""
        self._ask("fill", nbytes, value)

    def digest(self, offset: int, nbytes: int) -> str:
        digest: str = self._ask("digest", offset, nbytes)
        return digest

    def place(self, slot: SlotDescriptor, like: torch.Tensor) -> tuple[str, str]:
        """Place an item through the real placer; its digest and its device."""
        dtype = str(like.dtype).removeprefix("torch.")
        spec = TensorSpec(shape=tuple(like.shape), dtype=dtype)
        placed: tuple[str, str] = self._ask("place", slot, spec)
        return placed

    def close(self) -> None:
        """Let go of the process, and of what a killed one has left behind."""
        self._pipe.close()
        self.process.join(DEADLINE_S)
        ended = not self.process.is_alive()
        self.kill()
        # torch's counters of shared device memory, which a process that is killed leaves.
        mine = [
            f"torch_{self.process.pid}_*",
            *([f"{self.pool}*"] if self._setup.rank == 0 else []),
        ]
        for left in (path for pattern in mine for path in SHM_FOLDER.glob(pattern)):
            left.unlink()
        assert ended, "the consumer did not end when its test let go of it"

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def _ask(self, verb: str, *words: object) -> Any:
        self._pipe.send((verb, words))
        return self._answer()

    def _answer(self, seconds: float = DEADLINE_S) -> Any:
        assert self._pipe.poll(seconds), "the consumer does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(pipe: Connection, setup: Setup) -> None:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as opened:
        try:
            instance = Instance(setup, opened)
        except Exception as error:  # the test's to judge
            pipe.send(error)
            return
        pipe.send(instance.address)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                verb, words = pipe.recv()
                try:
                    answer = getattr(instance, verb)(*words)
                except Exception as error:  # the test's to judge
                    answer = error
                pipe.send(answer)


class Instance:
    """The consumer itself."""

    def __init__(self, setup: Setup, opened: contextlib.ExitStack) -> None:
        route = setup.route
        platform = registry.get(route.pair.prefill)
        platform.set_device(setup.device_index)
        config = InstanceConfig(
            instance="prefill_decode-0",
            platform=route.pair.prefill,  # type: ignore[arg-type]
            device_index=setup.device_index,
            control_address="tcp://127.0.0.1:*",
            data_address=setup.data_address,
            pool=setup.pool,
            pool_bytes=setup.pool_bytes,
            path=route.path,
            secret_file=secret_file(),
        )
        self._copies = DeviceCopies(platform, setup.device_index)
        self._worker = WorkerEndpoint(config, self._copies, setup.rank)
        opened.callback(self._worker.close)
        self._placer = Placer(self._copies, self._worker)
        self._fence = LeaseFence()
        self._in_device_memory = route.in_device_memory
        self.address = ""
        if setup.rank == 0:
            scheduler = ConsumerEndpoint(
                config, fingerprint=FINGERPRINT, pool_bytes=setup.pool_bytes
            )
            self._fence = scheduler.fence
            opened.callback(scheduler.close)
            offered = [entry.name for entry in paths.offered(route.path, route.pair.encode)]
            self.address = scheduler.choose(encode_peer(route.pair.encode, offered)).address

    def allow(self, slot: SlotDescriptor) -> None:
        self._fence.allow(slot)

    def take_back(self, slot: SlotDescriptor) -> None:
        self._fence.forbid(slot)
        self._placer.carry_out(WorkerOrders(revoked=[slot.generation]), {})

    def fill(self, nbytes: int, value: int) -> None:
        self._tensor(0, nbytes).fill_(value)
        self._copies.platform.record_event().synchronize(DEADLINE_S)

    def digest(self, offset: int, nbytes: int) -> str:
        return digest(self._tensor(offset, nbytes))

    def place(self, slot: SlotDescriptor, spec: TensorSpec) -> tuple[str, str]:
        item = Placement(
            mm_hash="item", slot=slot, in_device_memory=self._in_device_memory, tensor=spec
        )
        encoder_cache: dict[str, torch.Tensor] = {}
        self._placer.carry_out(WorkerOrders(placements=[item], computes=True), encoder_cache)
        placed = encoder_cache["item"]
        assert (tuple(placed.shape), str(placed.dtype)) == (spec.shape, f"torch.{spec.dtype}")
        return digest(placed), str(placed.device)

    def _tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        memory = self._worker.slab if self._in_device_memory else self._worker.host
        return memory.tensor(offset, nbytes)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()

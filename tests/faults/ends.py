"""Both ends of transfers in one process, without an engine: a real sender, receiver and placer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.sender import Sender
from epd_portable.items.placer import Placer
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.items.table import PromptItem
from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.params import ExpectedTransfer, PrefillParams
from tests.faults.small.pictures import Picture
from tests.faults.small.schedulers import tensor
from tests.faults.small.steps import Item, Request
from tests.faults.small.workers import FINGERPRINT
from tests.keyring import secret_file

LEASE_S, WAIT_S = 1.0, 5.0
PATIENT_S = 30.0
"""Lease and wait where everything is delivered, and a busy machine may take its time."""
DEADLINE_S = 60.0


class Consumer:
    """A PD instance without an engine, stepped by the test.

    Args:
        address: Of its control channel.
        pool: Name of its pool.
        path: Transfer path.
        pool_bytes: Size of the pool.
        data_address: Where bytes come by ``tcp``.
        lease_s: See `InstanceConfig`.
        wait_s: See `InstanceConfig`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        pool: str,
        path: str,
        *,
        pool_bytes: int = 1 << 20,
        data_address: str = "tcp://127.0.0.1:*",
        lease_s: float = LEASE_S,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = InstanceConfig(
            instance="prefill_decode-0",
            platform="cpu",
            control_address=address,
            data_address=data_address,
            pool=pool,
            pool_bytes=pool_bytes,
            path=path,
            wait_timeout_s=wait_s,
            lease_s=lease_s,
            secret_file=secret_file(),
        )
        copies = DeviceCopies(registry.get("cpu"))
        self._end = WorkerEndpoint(config, copies)
        self._placer = Placer(copies, self._end)
        self.shell = ItemShell(config, fingerprint=FINGERPRINT, cache_size=100_000, clock=clock)
        self.prefill = PrefillRequests(config, self.shell)
        self.cache = self.shell.cache
        self.outputs: dict[str, torch.Tensor] = {}
        self.waiting: dict[str, Request] = {}

    def arrive(self, picture: Picture, transfer_id: str) -> None:
        """A request for one picture arrives; its id is the picture's name."""
        request = Request(
            picture.name, (Item(picture.name, picture.num_tokens, picture.shown),), None
        )
        self.waiting[picture.name] = request
        item = request.mm_features[0]
        place = PromptItem(
            input_id=0,
            mm_hash=picture.name,
            begin=1,
            end=1 + picture.num_tokens,
            num_embeds=picture.num_tokens,
            tensor=tensor(item),
        )
        expected = ExpectedTransfer(transfer_id=transfer_id, item_uuid=picture.name)
        self.prefill.arrived(picture.name, [place], PrefillParams(transfers=(expected,)))

    def step(self) -> None:
        """Do what an engine does in one step."""
        self.shell.take_in()
        self.shell.before_step()
        freed = self.cache.get_freed_mm_hashes()
        orders = self.shell.orders.take_orders(freed, computes=True)
        self._placer.carry_out(orders, self.outputs)
        for mm_hash in freed:
            self.outputs.pop(mm_hash, None)
        self.shell.step_done()

    def granted(self) -> int:
        """Return how many transfers a producer may write for."""
        transfers = self.shell._transfers._transfers.values()
        return sum(transfer.grant is not None for transfer in transfers)

    def finish(self, name: str) -> None:
        """End a request."""
        request = self.waiting.pop(name)
        self.prefill.finished(name)
        self.cache.free(request)

    def served(self) -> dict[str, str]:
        """End every request that can be answered; check what it reads.

        Returns:
            How each was had: ``transfer`` or ``local``.
        """
        found = {}
        for name, request in list(self.waiting.items()):
            if name in self.outputs:
                shown = request.mm_features[0].shown
                assert shown is not None and torch.equal(self.outputs[name], shown.output())
                found[name] = "transfer"
            elif not self.prefill.may_schedule(name, 1):
                continue
            elif self.cache.check_and_update_cache(request, 0):
                continue  # It has landed; the next step places it.
            else:
                found[name] = "local"
            self.finish(name)
        return found

    def kept(self) -> dict[str, int]:
        """Return what is still kept when nothing is under way and the cache is emptied."""
        self.cache.reset()
        self.step()
        session = self.shell._transfers
        counts = {
            "bytes": self.shell.pool.capacity_bytes - self.shell.pool.free_bytes,
            "room": self.cache.cache_size - self.cache.num_free_slots,
            "transfers": len(session._transfers),
            "quarantined": len(session._quarantine),
            "outputs": len(self.outputs),
        }
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Stop receiving."""
        self.shell.close()
        self._end.close()


def make_sender(path: str, *, lease_s: float = LEASE_S, wait_s: float = WAIT_S) -> Sender:
    """Return an encode worker's sender."""
    config = InstanceConfig(
        instance="encode-0",
        platform="cpu",
        path=path,
        wait_timeout_s=wait_s,
        lease_s=lease_s,
        secret_file=secret_file(),
    )
    return Sender(config, FINGERPRINT, DeviceCopies(registry.get("cpu")))


def order(picture: Picture, transfer_id: str, consumer: str) -> TransferOrder:
    """Return the order of one picture."""
    return TransferOrder(
        transfer_id=transfer_id,
        mm_hash=picture.name,
        consumer=consumer,
        tensor=tensor(Item(picture.name, picture.num_tokens, picture.shown)),
    )


def deliver(
    consumer: Consumer, sender: Sender, address: str, pictures: Sequence[Picture], seed: int
) -> dict[str, str]:
    """Deliver pictures, encoded at random moments, until every request has been served.

    Args:
        consumer: Gets a request for each.
        sender: Delivers them.
        address: Where it reaches the consumer.
        pictures: What.
        seed: Of the moments.

    Returns:
        How each was had.

    Raises:
        AssertionError: A request was not served in time, or read something else.
    """
    chance = random.Random(seed)
    todo = list(pictures)
    computing: list[tuple[float, Picture]] = []
    sources: dict[str, str] = {}
    end_s = time.monotonic() + DEADLINE_S
    while todo or computing or consumer.waiting:
        assert time.monotonic() < end_s, f"not served: {list(consumer.waiting)}"
        if todo and chance.random() < 0.1:
            picture = todo.pop(0)
            transfer_id = f"t-{picture.name}"
            consumer.arrive(picture, transfer_id)
            sender.submit(order(picture, transfer_id, address), None)
            computing.append((time.monotonic() + chance.uniform(0.0, 0.2), picture))
        for ready in [each for each in computing if each[0] <= time.monotonic()]:
            computing.remove(ready)
            sender.output_ready(ready[1].name, ready[1].output())
        consumer.step()
        sources |= consumer.served()
        time.sleep(0.001)
    return sources


def settle(consumer: Consumer, sender: Sender) -> None:
    """Step until neither end keeps anything; an undelivered item may be kept for its deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        kept = consumer.kept()
        kept |= {"orders": len(sender._outputs.orders), "sent": len(sender._outputs)}
        left = {name: count for name, count in kept.items() if count}
        if not left:
            return
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


def addresses(folder: Path) -> tuple[str, str]:
    """Return control addresses of a consumer and of somebody in front of it."""
    return f"ipc://{folder}/consumer", f"ipc://{folder}/meddler"

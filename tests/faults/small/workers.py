"""The worker processes of small engines: the package's own ends around a dictionary of tensors."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.store_writer import open_writer
from epd_portable.items.placer import Placer
from epd_portable.log import trace
from epd_portable.platforms import registry
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.stores.entry import namespace_of
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from tests.faults.small.pictures import digest
from tests.faults.small.steps import Done, Step
from tests.kit.encode_side import CountedSender

FINGERPRINT = "small"
WEIGHTS = "EPD_TEST_WEIGHTS"
"""Another value is another model."""


def fingerprint() -> str:
    """Return what a small engine serves."""
    return FINGERPRINT + os.environ.get(WEIGHTS, "")


class Worker(Protocol):
    """An end, stepped."""

    def step(self, step: Step) -> Done: ...


def serve(config: InstanceConfig, steps: Connection) -> None:
    """Carry out steps until the scheduler is gone."""
    torch.set_num_threads(1)
    copies = DeviceCopies(registry.get(config.platform))
    worker: Worker = PDWorker(config, copies) if config.pool else EncodeWorker(config, copies)
    steps.send("ready")
    while True:
        steps.send(worker.step(steps.recv()))


class EncodeWorker:
    """Encodes pictures and hands them to a `Sender`."""

    def __init__(self, config: InstanceConfig, copies: DeviceCopies) -> None:
        self._store = open_writer(config, namespace_of(config, fingerprint))
        self._sender = CountedSender(config, copies, fingerprint(), self._store)
        self._cache: dict[str, torch.Tensor] = {}

    def step(self, step: Step) -> Done:
        for order in step.orders:
            self._sender.submit(order, self._cache.get(order.mm_hash))
        for mm_hash in step.freed:
            self._cache.pop(mm_hash, None)
        for mm_hash, output in _encoded(step).items():
            self._cache[mm_hash] = output
            self._sender.output_ready(mm_hash, output)
        sender = self._sender
        unwritten = self._store._waiting_bytes if self._store else 0
        state = {"unwritten": unwritten, "transfers": sender.in_flight, "items": len(self._cache)}
        return Done([], sender.progress.take_ended(), state)


class PDWorker:
    """Places items and computes with them: the digest of their bytes is the answer."""

    def __init__(self, config: InstanceConfig, copies: DeviceCopies) -> None:
        self._placer = Placer(copies, WorkerEndpoint(config, copies))
        self._cache: dict[str, torch.Tensor] = {}

    def step(self, step: Step) -> Done:
        self._placer.carry_out(step.receipts, self._cache)
        for mm_hash in step.freed:
            self._cache.pop(mm_hash, None)
        self._cache |= _encoded(step)
        digests = [digest(self._cache[mm_hash]) for *_, mm_hash in step.read]
        return Done(digests, set(), {"items": len(self._cache)})


def _encoded(step: Step) -> dict[str, torch.Tensor]:
    items = [item.identifier for item in step.encode]
    if not items:
        return {}
    trace("encode.begin", items=items)
    outputs = {}
    for item in step.encode:
        assert item.shown is not None, "an item without pixels cannot be encoded"
        time.sleep(item.shown.encode_s)
        outputs[item.identifier] = item.shown.output()
    trace("encode.end", items=items)
    return outputs

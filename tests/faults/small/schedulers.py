"""The scheduler processes of small engines: vLLM's hooks, called in vLLM's order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.dispatcher import Dispatcher, EncodedItem
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.items.table import ItemTable, PromptItem
from epd_portable.transfer.stores.entry import namespace_of
from epd_portable.wire.descriptors import TensorSpec
from epd_portable.wire.params import CacheNews, EncodeParams, PrefillParams, read_params, to_params
from tests.faults.small.pictures import WIDTH
from tests.faults.small.steps import Answer, Done, Item, Request, Step
from tests.faults.small.workers import fingerprint
from tests.keyring import secret
from tests.unit.builders import encoder_cache, place

CACHE_EMBEDS = 4_000
TEXT_TOKENS = 4
"""Before each picture."""


class Scheduler(ABC):
    """Requests, stepped while there is something to do, as vLLM's engine core steps them."""

    def __init__(
        self, worker: Connection, cache: ItemTable, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self.cache = cache
        self.lock = lock or nullcontext()
        self.requests: dict[str, Request] = {}
        self.news: list[CacheNews] = []
        self._worker = worker
        self._worker_state: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Return whether to step."""
        return bool(self.requests)

    @abstractmethod
    def arrived(self, request: Request) -> None:
        """A request was added."""

    @abstractmethod
    def ended(self, request: Request) -> dict[str, object] | None:
        """A request has ended, well or not; returns what its answer carries."""

    @abstractmethod
    def schedule(self) -> Step:
        """Return the next step."""

    @abstractmethod
    def take_output(self, step: Step, done: Done) -> list[Answer]:
        """Take in what a step brought; returns the answers that are complete."""

    @abstractmethod
    def state(self) -> dict[str, int]:
        """Return counts of what is kept: all as at the start when nothing is under way."""

    def add(self, request: Request) -> None:
        """Take a request in."""
        with self.lock:
            self.requests[request.request_id] = request
            self.arrived(request)

    def abort(self, request_id: str) -> None:
        """End a request without a response."""
        with self.lock:
            self._end(request_id)

    def reset(self) -> None:
        """Empty the encoder cache."""
        with self.lock:
            self.cache.reset()

    def counts(self) -> dict[str, int]:
        """Return counts of what is kept."""
        worker = {f"worker.{name}": count for name, count in self._worker_state.items()}
        with self.lock:
            common = {
                "requests": len(self.requests),
                "cache.items": len(self.cache.items),
                "cache.used": self.cache.cache_size - self.cache.num_free_slots,
                **self.state(),
            }
        return {**common, **worker}

    def step(self) -> list[Answer]:
        """Carry out one step; return the responses that are complete."""
        with self.lock:
            step = self.schedule()
        self._worker.send(step)
        done = self._worker.recv()
        self._worker_state = done.state
        with self.lock:
            answers = self.take_output(step, done)
            return [replace(each, params=self._end(each.request_id)) for each in answers]

    def _end(self, request_id: str) -> dict[str, object] | None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        params = self.ended(request)
        self.cache.free(request)
        return params


class EncodeScheduler(Scheduler):
    """Gives items room, encodes them, and answers when that is done."""

    def __init__(self, config: InstanceConfig, worker: Connection) -> None:
        super().__init__(worker, encoder_cache(CACHE_EMBEDS))
        self._dispatcher = Dispatcher(self.cache, secret())
        self._scheduled: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self._dispatcher.busy

    def arrived(self, request: Request) -> None:
        items = [
            EncodedItem(item.identifier, "image", tensor(item)) for item in request.mm_features
        ]
        assert request.params is not None, "an encode job names its transfers"
        self._dispatcher.request_arrived(
            request.request_id, items, read_params(request.params, EncodeParams)
        )

    def ended(self, request: Request) -> dict[str, object] | None:
        self._dispatcher.request_finished(request.request_id)
        return None

    def schedule(self) -> Step:
        encode: list[Item] = []
        self._scheduled = []
        for request in self.requests.values():
            for input_id, item in enumerate(request.mm_features):
                if self.cache.check_and_update_cache(request, input_id):
                    continue
                if not self.cache.can_allocate(request, input_id, CACHE_EMBEDS, 0):
                    break
                self.cache.allocate(request, input_id)
                encode.append(item)
            else:
                self._scheduled.append(request.request_id)
        freed = self.cache.get_freed_mm_hashes()
        return Step(freed, encode, orders=self._dispatcher.take_orders(self._scheduled))

    def take_output(self, step: Step, done: Done) -> list[Answer]:
        self._dispatcher.transfers_ended(done.ended)
        return [Answer(request_id, None) for request_id in self._scheduled]

    def state(self) -> dict[str, int]:
        dispatcher = self._dispatcher
        return {"busy": int(dispatcher.busy), "sending": len(dispatcher.kept())}


class PDScheduler(Scheduler):
    """Computes the text and the pictures of each request in order."""

    def __init__(self, config: InstanceConfig, worker: Connection) -> None:
        self._shell = ItemShell(
            config,
            fingerprint=fingerprint(),
            cache_size=CACHE_EMBEDS,
            namespace=namespace_of(config, fingerprint),
        )
        self._prefill = PrefillRequests(config, self._shell)
        super().__init__(worker, self._shell.cache, self._shell.lock)
        self._running: set[str] = set()
        self._computed: dict[str, int] = {}
        self._digests: dict[str, list[str]] = {}
        self._shell.listen()

    def arrived(self, request: Request) -> None:
        self._computed[request.request_id] = 0
        self._digests[request.request_id] = []
        params = read_params(request.params, PrefillParams) if request.params is not None else None
        self._prefill.arrived(request.request_id, prompt(request), params)

    def ended(self, request: Request) -> dict[str, object] | None:
        request_id = request.request_id
        computed = self._computed.pop(request_id)
        del self._digests[request_id]
        self._running.discard(request_id)
        outcome = self._prefill.finished(request_id, computed)
        return to_params(outcome) if outcome is not None else None

    def schedule(self) -> Step:
        self._shell.before_step()
        encode: list[Item] = []
        read: list[tuple[str, int, str]] = []
        for request in self.requests.values():
            self._advance(request, encode, read)
        freed = self.cache.get_freed_mm_hashes()
        receipts = self._shell.orders.take_orders(freed, computes=True)
        return Step(freed, encode, read=read, receipts=receipts)

    def _advance(
        self, request: Request, encode: list[Item], read: list[tuple[str, int, str]]
    ) -> None:
        """Compute as much of a request as can be had, each picture in one piece."""
        request_id = request.request_id
        for found in prompt(request):
            computed = self._computed[request_id]
            if found.end <= computed:
                continue
            running = request_id in self._running
            if not self._prefill.may_schedule(request_id, computed, running=running):
                return
            self._running.add(request_id)
            self._computed[request_id] = found.begin
            item = request.mm_features[found.input_id]
            if not self.cache.check_and_update_cache(request, found.input_id):
                if not self.cache.can_allocate(request, found.input_id, CACHE_EMBEDS, 0):
                    return
                self.cache.allocate(request, found.input_id)
                self._prefill.encoded_here(request_id, item.identifier)
                encode.append(item)
            read.append((request_id, found.input_id, item.identifier))
            self._computed[request_id] = found.end

    def take_output(self, step: Step, done: Done) -> list[Answer]:
        self._shell.step_done()
        if (news := self._prefill.take_news()) is not None:
            self.news.append(news)
        for (request_id, input_id, _), found in zip(step.read, done.digests, strict=True):
            self._digests[request_id].append(found)
            self.cache.free_encoder_input(self.requests[request_id], input_id)
        failed = [
            Answer(request_id, problem="an item of this request cannot be had")
            for request_id in self._prefill.take_unavailable()
        ]
        complete = [
            Answer(request_id, " ".join(self._digests[request_id]))
            for request_id, request in self.requests.items()
            if len(self._digests[request_id]) == len(request.mm_features)
        ]
        return failed + complete

    def state(self) -> dict[str, int]:
        shell = self._shell
        return {
            "pool.used": shell.pool.capacity_bytes - shell.pool.free_bytes,
            "waiting": int(any(each.is_pending for each in self.cache.requests.values())),
            "resident": len(shell.pool.resident),
            "retiring": len(shell.pool.retiring),
            "transfers": sum(len(item.transfers) for item in self.cache.items.values()),
            "records": len(self.cache.requests),
        }


def make(config: InstanceConfig, worker: Connection) -> Scheduler:
    """Return the scheduler of one instance, once its worker is there."""
    assert worker.recv() == "ready"
    return (PDScheduler if config.pool else EncodeScheduler)(config, worker)


def tensor(item: Item) -> TensorSpec:
    """Return what the encoder puts out for an item."""
    return TensorSpec(shape=(item.num_tokens, WIDTH), dtype="float32")


def prompt(request: Request) -> list[PromptItem]:
    """Return the places of a request's items."""
    places, begin = [], 0
    for input_id, item in enumerate(request.mm_features):
        begin += TEXT_TOKENS
        places.append(place(item.identifier, tensor(item), begin, input_id=input_id))
        begin = places[-1].end
    return places

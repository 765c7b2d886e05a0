"""A PD scheduler's side with the engine's calls around it, and encode sides, joined by lists.

Everything is the package's own code but three things: `Mailbox` stands for sockets and shared
memory, `PrefillSide` makes the calls that vLLM's scheduler makes, and writes are only noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

from prometheus_client import CollectorRegistry

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.producer import ProducerSession, TransferOrder, Write
from epd_portable.items import shell as shell_module
from epd_portable.items.metrics import ConsumerMetrics
from epd_portable.items.placer import Placement
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.items.table import PromptItem
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import registry
from epd_portable.transfer.paths.base import LeaseFence
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec
from epd_portable.wire.messages import Announce, AnyMessage
from epd_portable.wire.params import ExpectedTransfer, PrefillOutcome, PrefillParams
from tests.unit.builders import FINGERPRINT, Clock, FakeRequest, peer, place, request

WIDTH = 16
ALIGNMENT = 64
TOKEN_BYTES = WIDTH * 4
"""Bytes of a token of `WIDTH` float32, which is one unit of the alignment."""
PD = "tcp://pd:1"
LEASE_S, TIMEOUT_S = 10.0, 30.0


def spec(num_tokens: int) -> TensorSpec:
    return TensorSpec(shape=(num_tokens, WIDTH), dtype="float32")


@dataclass
class Mailbox:
    """Stands for `ConsumerEndpoint`: messages lie in lists until the test moves them."""

    path: str = "shm"
    address: str = ""
    inbox: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    outbox: list[tuple[bytes, AnyMessage]] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    forged: set[str] = field(default_factory=set)
    fingerprint: str = FINGERPRINT
    fence: LeaseFence = field(default_factory=LeaseFence)
    fenced_paths: frozenset[str] = registry.fenced_paths()

    def receive(self) -> list[tuple[bytes, AnyMessage]]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, identity: bytes, message: AnyMessage) -> None:
        self.outbox.append((identity, message))

    def choose(self, producer: PeerDescriptor) -> PathEndpoint:
        return PathEndpoint(path=self.path, address=self.address)

    def verify_transfer(self, announce: Announce) -> bool:
        return announce.transfer_id not in self.forged

    def is_gone(self, producer: PeerDescriptor) -> bool:
        return producer.session in self.gone

    def wake(self) -> None:
        """Do nothing, without a listener."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


@dataclass(frozen=True)
class Item:
    """A place of an item in a prompt: its kind, its size, and the transfer that brings it."""

    mm_hash: str
    num_tokens: int = 2
    transfer_id: str = ""
    has_media: bool = True
    sent_with_media: bool = True
    background: bool = False
    """The instance can encode the item next to its steps."""


CAT = Item("cat", transfer_id="t-cat")
DOG = Item("dog", transfer_id="t-dog")


class PrefillSide:
    """A `ItemShell` and the encoder cache, called as the engine calls them.

    Attributes:
        computed: Tokens that requests have computed, where the engine asks in every step whether
            they may be scheduled.
        encoded: Items that steps have encoded.
        encodings: Items that workers were told to encode beside the steps.
        requested: Transfers for which the front is to ask an encoder.
    """

    def __init__(
        self,
        *,
        pool_tokens: int = 8,
        cache_tokens: int = 100,
        copies: bool = False,
        can_encode: bool = True,
        path: str = "shm",
        lookahead: int = 0,
        min_start_tokens: int = 0,
    ) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.mailbox = Mailbox(path=path)
        self.encoded: set[str] = set()
        config = InstanceConfig(
            instance="prefill_decode-0",
            platform="cpu",
            pool="pool",
            pool_bytes=pool_tokens * TOKEN_BYTES,
            wait_timeout_s=TIMEOUT_S,
            lease_s=LEASE_S,
            can_encode=can_encode,
        )
        with mock.patch.object(
            shell_module, "ConsumerEndpoint", lambda *args, **kwargs: self.mailbox
        ):
            self.shell = ItemShell(
                config,
                fingerprint=FINGERPRINT,
                cache_size=cache_tokens,
                clock=self.clock,
                metrics=ConsumerMetrics(self.registry),
                traits=dataclasses.replace(
                    TRAITS["cpu"], slot_alignment_bytes=ALIGNMENT, needs_device_copy=copies
                ),
            )
        self.prefill = PrefillRequests(
            config, self.shell, lookahead=lookahead, min_start_tokens=min_start_tokens
        )
        self.cache = self.shell.cache
        self.pool = self.shell.pool
        self.requests: dict[str, FakeRequest] = {}
        self.items: dict[str, Sequence[PromptItem]] = {}
        self.failed: set[str] = set()
        self.placements: list[Placement] = []
        self.computed: dict[str, int] = {}
        self.encodings: list[str] = []
        self.requested: list[str] = []

    def arrive(self, request_id: str, *items: Item, lead: int = 1) -> None:
        """Add a request: ``lead`` tokens of text, an item, a token of text, an item, and so on."""
        self.requests[request_id] = request(
            request_id, *((item.mm_hash, item.num_tokens) for item in items)
        )
        prompt = []
        begin = 0
        for index, item in enumerate(items):
            begin += 1 if index else lead
            media = f"media of {item.mm_hash}" if item.background else None
            more = {"input_id": index, "has_media": item.has_media, "media": media}
            prompt.append(place(item.mm_hash, spec(item.num_tokens), begin, **more))
            begin = prompt[-1].end
        transfers = {
            item.mm_hash: ExpectedTransfer(
                transfer_id=item.transfer_id, item_uuid=item.mm_hash, media=item.sent_with_media
            )
            for item in items
            if item.transfer_id
        }
        params = PrefillParams(transfers=tuple(transfers.values()))
        self.items[request_id] = prompt
        self.prefill.arrived(request_id, prompt, params if transfers else None)

    def step(self, *, computes: bool = True) -> list[Placement]:
        """Run one step of the engine; return what the workers place."""
        self.shell.take_in()
        self.shell.before_step()
        for request_id in self.requests:
            self.prefill.may_schedule(request_id, self.computed.get(request_id, 0))
        orders = self.shell.orders.take_orders(self.cache.get_freed_mm_hashes(), computes=computes)
        self.encodings += [encoding.mm_hash for encoding in orders.encodings]
        self.failed |= self.prefill.take_unavailable()
        self.shell.step_done()
        if (news := self.prefill.take_news()) is not None:
            self.requested += news.requested
        return orders.placements

    def finish(self, request_id: str) -> PrefillOutcome | None:
        """End a request, well or not, as vLLM does."""
        computed = self.computed.pop(request_id, 0)
        outcome = self.prefill.finished(request_id, computed)
        self.cache.free(self.requests.pop(request_id))
        del self.items[request_id]
        return outcome

    def encode_here(self, request_id: str, input_id: int) -> bool:
        """Encode an item on this instance if the cache allows it, as vLLM does."""
        engine_request = self.requests[request_id]
        if self.cache.check_and_update_cache(engine_request, input_id):
            return True
        if not self.cache.can_allocate(engine_request, input_id, 1 << 20, 0):
            return False
        self.cache.allocate(engine_request, input_id)
        mm_hash = engine_request.mm_features[input_id].identifier
        self.encoded.add(mm_hash)
        self.prefill.encoded_here(request_id, mm_hash)
        return True

    def forget_everything(self) -> None:
        """Empty the encoder cache and let the workers hear of it."""
        self.cache.reset()
        self.step()


class EncodeSide:
    """A `ProducerSession` whose writes end when the test says so.

    Attributes:
        under_way: Transfers that are ordered once, as a `Dispatcher` does it.
    """

    def __init__(
        self, name: str, clock: Clock, life: int = 1, *, fingerprint: str = FINGERPRINT
    ) -> None:
        self.session_id = f"{name}-life-{life}"
        self.identity = self.session_id.encode()
        self.clock = clock
        self.session = ProducerSession(
            peer(name, session=self.session_id, fingerprint=fingerprint), wait_timeout_s=TIMEOUT_S
        )
        self.sent: list[tuple[str, AnyMessage]] = []
        self.outbox: list[AnyMessage] = []
        self.writes: dict[str, Write] = {}
        self.ended: list[str] = []
        self.under_way: set[str] = set()

    def submit(self, item: Item, *, ready: bool = False, consumer: str = PD) -> None:
        if item.transfer_id in self.under_way:
            return
        self.under_way.add(item.transfer_id)
        self.session.submit(
            TransferOrder(
                transfer_id=item.transfer_id,
                mm_hash=item.mm_hash,
                consumer=consumer,
                tensor=spec(item.num_tokens),
            ),
            ready=ready,
            now=self.clock(),
        )

    def receive(self, message: AnyMessage, *, consumer: str = PD) -> None:
        self.session.receive(consumer, message, self.clock())

    def poll(self) -> None:
        actions = self.session.poll(self.clock())
        self.sent += actions.messages
        self.outbox += [message for _, message in actions.messages]
        for write in actions.writes:
            assert write.order.transfer_id not in self.writes
            self.writes[write.order.transfer_id] = write
        ended = [finished.order.transfer_id for finished in actions.finished]
        self.under_way.difference_update(ended)
        self.ended += ended

    def finish_write(self, transfer_id: str, problem: str = "") -> Write:
        write = self.writes.pop(transfer_id)
        self.session.write_ended(write.attempt, problem, self.clock())
        return write


class Pair:
    """An encode side and a PD side with a channel without losses."""

    def __init__(self, pd: PrefillSide | None = None) -> None:
        self.pd = pd or PrefillSide()
        self.encode = EncodeSide("encode-0", self.pd.clock)

    def to_pd(self) -> None:
        """Let the encode side act and its messages arrive (the PD side reads them in its step)."""
        self.encode.poll()
        self.pd.mailbox.inbox += [(self.encode.identity, m) for m in self.encode.outbox]
        self.encode.outbox.clear()

    def to_encode(self) -> None:
        for identity, message in self.pd.mailbox.outbox:
            if identity == self.encode.identity:
                self.encode.receive(message)
        self.pd.mailbox.outbox.clear()

    def round(self) -> list[Placement]:
        """Encode side, PD step, encode side; writes do not end by themselves."""
        self.to_pd()
        placements = self.pd.step()
        self.to_encode()
        self.encode.poll()
        return placements

    def settle(self) -> list[Placement]:
        """End every write and run until nothing moves any more."""
        placements = []
        for _ in range(12):
            placements += self.round()
            for transfer_id in list(self.encode.writes):
                self.encode.finish_write(transfer_id)
        return placements


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """Return every sample that is not zero, as the exposition writes it without quotes."""
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            if sample.value and not sample.name.endswith(("_bucket", "_created", "_sum")):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def sources(pd: PrefillSide, request_id: str) -> dict[str, str]:
    """End a request; return how each of its items was had."""
    outcome = pd.finish(request_id)
    assert outcome is not None
    return {item.mm_hash: item.source for item in outcome.items}


def assert_everything_is_back(pd: PrefillSide) -> None:
    pd.forget_everything()
    assert pd.pool.free_bytes == pd.pool.capacity_bytes
    assert pd.cache.num_free_slots == pd.cache.num_freeable_slots == pd.cache.cache_size
    assert not pd.shell.cache.requests
    assert not pd.cache.items
    assert not pd.pool.slots
    assert not pd.cache.requests
    assert not pd.cache.incomplete

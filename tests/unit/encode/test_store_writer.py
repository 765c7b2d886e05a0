from __future__ import annotations

import threading

import pytest
import torch
from prometheus_client import CollectorRegistry

from epd_portable.config.instance import InstanceConfig
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.store_writer import StoreWriter, ToHost, open_writer
from epd_portable.errors import StoreError, StoreFullError, TransportError
from epd_portable.transfer.circuit_breaker import CircuitBreaker
from epd_portable.transfer.stores.metrics import StoreMetrics
from epd_portable.wire.descriptors import TensorSpec
from tests.unit.transfer.stores.memory import (
    DEADLINE_S,
    NAMESPACE,
    SEAL,
    SPEC,
    MemoryStore,
    entry,
    key,
)
from tests.waiting import until


def output(
    name: str, *, to_host: ToHost | None = None, tensor: TensorSpec = SPEC
) -> tuple[TransferOrder, ToHost]:
    def host() -> torch.Tensor:
        return torch.full((tensor.nbytes,), 1, dtype=torch.uint8)

    order = TransferOrder(
        transfer_id=name, mm_hash=name, consumer="", tensor=tensor, item_uuid=name
    )
    return order, to_host or host


class Side:
    def __init__(self, store: MemoryStore, *, queued: int = 100) -> None:
        self.store = store
        self.registry = CollectorRegistry()
        self.breaker = CircuitBreaker(first_s=1000.0)
        self.writer = StoreWriter(
            store,
            SEAL,
            NAMESPACE,
            queue_bytes=queued * SPEC.nbytes,
            breaker=self.breaker,
            metrics=StoreMetrics("encode", self.registry),
        )

    def count(self, name: str, reason: str = "") -> float:
        labels = {"reason": reason} if reason else {}
        return self.registry.get_sample_value(f"epd_encode_store_{name}", labels) or 0.0

    def until(self, name: str, value: float, reason: str = "") -> None:
        until(lambda: self.count(name, reason) >= value)

    def close(self) -> None:
        self.writer.close(DEADLINE_S)


def test_instance_without_a_store_writes_none() -> None:
    assert open_writer(InstanceConfig(instance="encode-0", platform="cpu"), NAMESPACE) is None


def test_outputs_are_written_sealed_under_their_keys() -> None:
    side = Side(MemoryStore())
    side.store.evicts = 2
    side.writer.save_caches(*output("cat"))
    side.close()
    head, payload = side.store.entries[key("cat")]
    SEAL.check(SEAL.open(head, key("cat")), memoryview(payload))
    assert (side.count("writes_total"), side.count("written_bytes_total")) == (1, SPEC.nbytes)
    assert (side.count("evictions_total"), side.count("queued_bytes")) == (2, 0)


def test_known_entry_is_neither_copied_nor_written() -> None:
    def never() -> torch.Tensor:
        raise AssertionError("it was copied")

    side = Side(MemoryStore(entry("cat")))
    side.writer.save_caches(*output("cat", to_host=never))
    side.close()
    assert (side.count("known_total"), side.count("writes_total")) == (1, 0)


def test_damaged_entry_is_written_again() -> None:
    store = MemoryStore(entry("cat"))
    store.entries[key("cat")] = (b"\x80\x04", b"")
    side = Side(store)
    side.writer.save_caches(*output("cat"))
    side.close()
    SEAL.open(store.entries[key("cat")][0], key("cat"))


def test_hung_store_drops_outputs_without_blocking() -> None:
    side = Side(MemoryStore(), queued=4)
    side.store.gate.clear()
    for number in range(10):
        side.writer.save_caches(*output(f"{number}"))
    assert side.count("drops_total", "full") == 6
    assert side.count("queued_bytes") == 4 * SPEC.nbytes
    side.store.gate.set()
    side.until("writes_total", 4)
    side.close()
    assert side.count("queued_bytes") == 0


def test_outputs_are_written_together_up_to_a_size() -> None:
    large = TensorSpec(shape=(3 << 19, 1), dtype="float16")
    side = Side(MemoryStore(), queued=1 << 20)
    side.store.gate.clear()
    for name in ("first", "second", "third", "fourth"):
        side.writer.save_caches(*output(name, tensor=large))
        until(lambda: side.store.asked)  # The first is looked up alone.
    side.store.gate.set()
    side.close()
    assert side.store.batches == [1, 2, 1], "of 3 MiB each, of at most 8 MiB"


@pytest.mark.parametrize(
    ("error", "reason"), [(StoreError("gone"), "error"), (StoreFullError("full"), "full")]
)
def test_a_store_that_takes_nothing_is_left_alone(error: StoreError, reason: str) -> None:
    side = Side(MemoryStore())
    side.store.error = error
    side.store.gate.clear()
    side.writer.save_caches(*output("cat"))
    until(lambda: side.store.asked)
    side.writer.save_caches(*output("dog"))
    side.store.gate.set()
    side.until("drops_total", 1, reason)
    side.until("drops_total", 1, "unavailable")
    assert side.breaker.state == "open"
    for number in range(5):
        side.writer.save_caches(*output(f"{number}"))
    side.close()
    assert side.count("drops_total", "unavailable") == 6
    assert side.store.asked == 1


def test_reset_drops_outputs_that_wait() -> None:
    side = Side(MemoryStore())
    side.store.gate.clear()
    side.writer.save_caches(*output("cat"))
    until(lambda: side.store.asked)
    side.writer.save_caches(*output("dog"))
    side.writer.reset()
    side.store.gate.set()
    side.close()
    assert side.store.entries.keys() == {key("cat")}
    assert (side.count("drops_total", "unavailable"), side.count("queued_bytes")) == (1, 0)


def test_closing_closes_the_store() -> None:
    side = Side(MemoryStore())
    side.store.gate.clear()
    side.close()
    assert side.store.gate.is_set()


def test_an_output_that_cannot_be_copied_costs_no_other() -> None:
    def lost() -> torch.Tensor:
        raise TransportError("the device has failed")

    def odd() -> torch.Tensor:
        raise RuntimeError("nobody foresaw this")

    side = Side(MemoryStore())
    side.store.gate.clear()
    side.writer.save_caches(*output("lost", to_host=lost))
    side.writer.save_caches(*output("cat"))
    side.store.gate.set()
    side.until("writes_total", 1)
    assert key("cat") in side.store.entries and key("lost") not in side.store.entries
    side.writer.save_caches(*output("odd", to_host=odd))
    side.until("drops_total", 2, "error")
    until(lambda: side.breaker.state == "open")
    side.close()
    assert not any(each.name == "epd-store-writer" for each in threading.enumerate())

"""Encoder outputs are kept for as long as a transfer needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epd_portable.connector.copies import DeviceCopies
from epd_portable.connector.producer import TransferOrder
from epd_portable.errors import TransportError
from epd_portable.platforms import registry
from epd_portable.runners.metrics import SenderMetrics
from epd_portable.runners.outputs import KeptOutputs
from epd_portable.runners.stream_clock import StreamClock
from epd_portable.wire.descriptors import TensorSpec

OUTPUT = torch.ones(2, 8)


@pytest.fixture
def outputs() -> Iterator[KeptOutputs]:
    copies = DeviceCopies(registry.get("cpu"), 0)
    clock = StreamClock(copies, "epd-test")
    yield KeptOutputs(copies, clock, SenderMetrics(), None, 1.0)
    clock.close()


def order(transfer_id: str, mm_hash: str = "cat") -> TransferOrder:
    return TransferOrder(
        transfer_id=transfer_id,
        mm_hash=mm_hash,
        consumer="tcp://127.0.0.1:1",
        tensor=TensorSpec(shape=(2, 8), dtype="float32"),
    )


def test_an_output_is_kept_until_the_last_of_its_transfers_ends(outputs: KeptOutputs) -> None:
    assert not outputs.add_order(order("t-0"), None)
    assert not outputs.add_order(order("t-1"), None)
    assert outputs.add("cat", OUTPUT)
    outputs.end_order("t-0")
    assert torch.equal(outputs.output_for("t-1").tensor, OUTPUT)
    outputs.end_order("t-1")
    assert len(outputs) == 0


def test_an_output_that_no_transfer_needs_is_not_kept(outputs: KeptOutputs) -> None:
    assert not outputs.add("cat", OUTPUT)
    assert outputs.add_order(order("t-0"), OUTPUT)
    outputs.end_order("t-0")
    assert not outputs.add("cat", OUTPUT)
    assert len(outputs) == 0


def test_an_output_of_another_shape_than_was_announced_is_refused(outputs: KeptOutputs) -> None:
    outputs.add_order(order("t-0"), torch.ones(3, 8))
    with pytest.raises(TransportError, match=r"announced was \(2, 8\) float32"):
        outputs.output_for("t-0")

"""Limits of messages and defaults of omitted fields: both ends of a connection rely on them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeAlias

import msgspec
import pytest

from epd_portable.errors import ProtocolError
from epd_portable.wire import codec, jobs
from epd_portable.wire.descriptors import PeerDescriptor, TensorSpec
from epd_portable.wire.messages import PROTOCOL_VERSION, Foreign, Grant, Later, NotNeeded
from epd_portable.wire.params import (
    EncodeParams,
    ExpectedTransfer,
    ItemOutcome,
    OutputSample,
    PrefillOutcome,
    PrefillParams,
)
from tests.unit.builders import peer, slot

Fields: TypeAlias = dict[str, Any]

GRANT = Grant(transfer_id="t", slot=slot(1), path="shm", address="x", lease_s=1.0)
ITEM: Fields = {"item": "i", "modality": "image", "length": 1, "fields": {"a": 0}}
TRANSFER = {"transfer_id": "t", "item_uuid": "u", "consumer": "c"}
TENSOR = {"dtype": "int32", "shape": [1]}

LIMITS: list[tuple[type, Fields, str, Any, Any]] = [
    (Later, {}, "transfer_id", "x" * 512, "x" * 513),
    (Grant, msgspec.to_builtins(GRANT), "path", "x" * 64, "x" * 65),
    (Grant, msgspec.to_builtins(GRANT), "address", "x" * 4096, "x" * 4097),
    (Grant, msgspec.to_builtins(GRANT), "lease_s", 86400.0, 86400.1),
    (PeerDescriptor, msgspec.to_builtins(peer()), "paths",
     [{"path": "p"}] * 16, [{"path": "p"}] * 17),
    (TensorSpec, {"dtype": "float32"}, "shape", [1] * 8, [1] * 9),
    (EncodeParams, {}, "transfers", [TRANSFER] * 4096, [TRANSFER] * 4097),
    (OutputSample, {"dtype": "float32", "shape": [1]}, "numbers", bytes(1028), bytes(1029)),
    (jobs.JobItem, ITEM, "fields", dict.fromkeys(map(str, range(64)), 0),
     dict.fromkeys(map(str, range(65)), 0)),
    (jobs.JobItem, ITEM, "length", 1 << 22, (1 << 22) + 1),
    (jobs.KvJob, {"job": "j", "proof": "p"}, "tensors", [TENSOR] * 8192, [TENSOR] * 8193),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "others", "name", "longest", "beyond"),
    [pytest.param(*row, id=f"{row[0].__name__}.{row[2]}") for row in LIMITS],
)
def test_field_is_taken_up_to_its_limit(
    kind: type, others: Fields, name: str, longest: Any, beyond: Any
) -> None:
    tag = {"kind": config.tag} if (config := kind.__struct_config__).tag else {}  # type: ignore[attr-defined]
    read = codec.reader(kind, "it")
    assert read(msgspec.msgpack.encode({**tag, **others, name: longest}))
    with pytest.raises(ProtocolError, match=rf"not it: .*`\$\.{name}`"):
        read(msgspec.msgpack.encode({**tag, **others, name: beyond}))


DEFAULTS: dict[type, Fields] = {
    NotNeeded: {"attempt": 0},
    Foreign: {"kind": "", "transfer_id": "", "attempt": 0, "protocol": 0},
    ExpectedTransfer: {"modality": "image", "media": True, "store": "", "on_demand": False},
    PrefillParams: {"sample": False},
    ItemOutcome: {"encoder": "", "path": "", "nbytes": 0, "wait_ms": 0.0, "transfer_ms": 0.0},
    PrefillOutcome: {"mm_inputs_done": 0, "mm_inputs_total": 0},
    jobs.JobTensor: {"repeats": 1, "run": 0},
    jobs.JobItem: {"offset": 0, "embeds": b""},
    jobs.KvJob: {"items": (), "lora": None, "priority": 0, "trace_headers": {}, "expected": (),
                 "cache_salt": None, "sample": False},
    jobs.Load: {"jobs": 0, "seconds": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_omitted_field_has_the_default_of_the_protocol(kind: type) -> None:
    found = {each.name: each for each in msgspec.structs.fields(kind)}
    optional = {
        name: each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        for name, each in found.items()
        if not each.required
    }
    assert optional == DEFAULTS[kind]


@pytest.mark.parametrize("more", [0, 1])
def test_messages_are_taken_up_to_their_limit(more: int) -> None:
    def padded(nbytes: int) -> bytes:
        header = {"kind": "later", "fields": "x" * nbytes}
        return msgspec.msgpack.encode([PROTOCOL_VERSION + 1, "s", header])

    job = jobs.KvJob(job="j", proof="p", tensors=(jobs.JobTensor(dtype="int32", shape=(4,)),))

    def salted(nbytes: int) -> jobs.KvJob:
        return msgspec.structs.replace(job, cache_salt="x" * nbytes)

    most, most_head = 16 << 10, 1 << 20
    long = most - len(padded(most)) + most + more
    long_head = most_head - len(jobs.encode(salted(most_head), "s")) + most_head + more
    for read in (
        lambda: codec.decode(padded(long)),
        lambda: jobs.encode_head(salted(long_head), "s"),
    ):
        with pytest.raises(ProtocolError, match="at most") if more else nullcontext():
            assert read()

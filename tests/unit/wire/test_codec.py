from __future__ import annotations

import json

import msgspec
import pytest
import torch

from epd_portable.errors import ProtocolError
from epd_portable.wire import codec
from epd_portable.wire.descriptors import DTYPE_BYTES, TensorSpec
from epd_portable.wire.jobs import JOB_DTYPES, JobTensor
from epd_portable.wire.messages import (
    MAX_REASON,
    PROTOCOL_VERSION,
    Abort,
    Announce,
    AnyMessage,
    Foreign,
    Grant,
    Injected,
    Later,
    Nack,
    NackCode,
    NotNeeded,
    Written,
)
from epd_portable.wire.params import (
    EncodeParams,
    EncodeTransfer,
    ExpectedTransfer,
    ItemOutcome,
    PrefillOutcome,
    PrefillParams,
    read_params,
    to_params,
)
from tests.unit.builders import SPEC, peer, slot

MESSAGES: list[AnyMessage] = [
    Announce(
        transfer_id="t",
        mm_hash="item",
        tensor=SPEC,
        producer=peer(),
        item_uuid="uuid",
        proof="p" * 32,
    ),
    Grant(transfer_id="t", slot=slot((1 << 60) + 1), path="shm", address="x", lease_s=1.5),
    NotNeeded(transfer_id="t"),
    Later(transfer_id="t"),
    Written(transfer_id="t", generation=(1 << 60) + 1),
    Injected(transfer_id="t"),
    Abort(transfer_id="t", reason="why ü"),
    Nack(transfer_id="t", code=NackCode.UNEXPECTED, detail="d"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was_with_its_session(message: AnyMessage) -> None:
    assert codec.decode(codec.encode(message, session="life")) == (message, "life")


def test_every_kind_of_message_is_tested_above() -> None:
    assert {type(message) for message in MESSAGES} == set(AnyMessage.__args__)


OTHER = PROTOCOL_VERSION + 1


def test_message_of_another_version_gives_its_header() -> None:
    body = {"kind": "announce", "transfer_id": "t", "attempt": 7, "fields": {"of": "the future"}}
    message, session = codec.decode(msgspec.msgpack.encode([OTHER, "life", body]))
    wanted = Foreign(kind="announce", transfer_id="t", attempt=7, protocol=OTHER)
    assert (message, session) == (wanted, "life")
    assert f"protocol {OTHER} at the sender, {PROTOCOL_VERSION} at the receiver" in wanted.problem


def test_refusal_has_the_same_bytes_in_every_version() -> None:
    foreign = Foreign(kind="announce", transfer_id="t", attempt=7, protocol=OTHER)
    body = {
        "kind": "nack",
        "transfer_id": "t",
        "attempt": 7,
        "code": "incompatible",
        "detail": foreign.problem,
    }
    data = codec.encode(foreign.refusal(), session="life", protocol=OTHER)
    assert data == msgspec.msgpack.encode([OTHER, "life", body])


@pytest.mark.parametrize("body", [1, ["announce"], {"kind": 1}, {"transfer_id": "t" * 513}])
def test_message_of_another_version_without_header_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(msgspec.msgpack.encode([OTHER, "life", body]))


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "unheard of", "transfer_id": "t"},
        {"transfer_id": "t"},
        {"kind": "written", "transfer_id": "t"},
        {"kind": "written", "transfer_id": "t", "generation": "one"},
        {
            "kind": "announce",
            "transfer_id": "t",
            "mm_hash": "x",
            "tensor": {"shape": [0, 1], "dtype": "float32"},
            "producer": msgspec.to_builtins(peer()),
        },
    ],
    ids=["kind", "no-kind", "field", "type", "shape"],
)
def test_a_body_that_is_no_message_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a control message"):
        codec.decode(msgspec.msgpack.encode([PROTOCOL_VERSION, "life", body]))


@pytest.mark.parametrize("parts", [0, 2])
def test_a_message_in_other_than_one_part_is_refused(parts: int) -> None:
    data = codec.encode(Later(transfer_id="t"), session="life")
    with pytest.raises(ProtocolError, match=f"of {parts} parts"):
        codec.decode(*[data] * parts)


@pytest.mark.parametrize(
    "message",
    [
        Abort(transfer_id="t", reason="x" * 70_000),
        Nack(transfer_id="t", code=NackCode.UNEXPECTED, detail="ü" * 70_000),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_explanation_of_any_length_arrives_cut(message: AnyMessage) -> None:
    received, _ = codec.decode(codec.encode(message, session="life"))
    text = received.detail if isinstance(received, Nack) else received.reason  # type: ignore[union-attr]
    assert len(text) == MAX_REASON
    assert text.endswith("…")


def test_unknown_fields_of_a_later_minor_change_are_ignored() -> None:
    body = {"kind": "later", "transfer_id": "t", "new": 1}
    data = msgspec.msgpack.encode([PROTOCOL_VERSION, "life", body])
    assert codec.decode(data) == (Later(transfer_id="t"), "life")


@pytest.mark.parametrize("dtype", JOB_DTYPES)
def test_a_spec_has_the_bytes_of_the_tensor(dtype: str) -> None:
    tensor = torch.empty((3, 5), dtype=getattr(torch, dtype))
    assert JobTensor(shape=(3, 5), dtype=dtype).nbytes == tensor.nbytes
    if dtype in DTYPE_BYTES:
        assert TensorSpec(shape=(3, 5), dtype=dtype).nbytes == tensor.nbytes


@pytest.mark.parametrize("shape", [(), (0, 4), (4, -1)])
def test_a_shape_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TensorSpec(shape=shape, dtype="float32")


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'torch\.float32'.*float32"):
        TensorSpec(shape=(1, 1), dtype="torch.float32")


ENCODE = EncodeParams(
    transfers=(EncodeTransfer(transfer_id="t", item_uuid="h", consumer="tcp://x"),)
)
PREFILL = PrefillParams(
    transfers=(ExpectedTransfer(transfer_id="t", item_uuid="h", on_demand=True),)
)


def test_params_survive_json() -> None:
    assert read_params(json.loads(json.dumps(to_params(ENCODE))), EncodeParams) == ENCODE
    assert read_params(json.loads(json.dumps(to_params(PREFILL))), PrefillParams) == PREFILL


def test_an_outcome_names_only_what_is_known() -> None:
    item = ItemOutcome(mm_hash="h", source="local")
    params = to_params(PrefillOutcome(instance="pd-0", items=(item,), mm_inputs_total=1))
    assert json.loads(json.dumps(params)) == {
        "instance": "pd-0",
        "items": [{"mm_hash": "h", "source": "local"}],
        "mm_inputs_done": 0,
        "mm_inputs_total": 1,
    }

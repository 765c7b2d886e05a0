"""Input of peers: any bytes at all are a message or a `ProtocolError`, at a bounded cost."""

from __future__ import annotations

import base64
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from epd_portable.errors import NoCommonPathError, ProtocolError, TransportError
from epd_portable.transfer import registry
from epd_portable.transfer.sessions import process_is_gone
from epd_portable.transfer.slab import _read_address
from epd_portable.wire import codec, jobs
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor
from epd_portable.wire.messages import PROTOCOL_VERSION, Announce, Foreign, Received
from epd_portable.wire.params import (
    CacheNews,
    EncodeParams,
    EncodeTransfer,
    ExpectedTransfer,
    PrefillParams,
    read_params,
)
from tests.property.budget import budget
from tests.unit.builders import peer
from tests.unit.items.harness import CAT, DOG, EncodeSide, PrefillSide
from tests.unit.wire.test_codec import MESSAGES

TENSORS = (jobs.JobTensor(dtype="int32", shape=(9,)), jobs.JobTensor(dtype="uint8", shape=(4,)))
ITEM = jobs.JobItem(item="cat", modality="image", offset=2, length=4, fields={"x": {"tensor": 1}})
JOBS: list[jobs.FromFront | jobs.FromHub] = [
    jobs.Beat(front="f"),
    jobs.EncodeJob(
        job="j",
        items=(ITEM,),
        tensors=TENSORS,
        transfer=EncodeTransfer(transfer_id="t", item_uuid="cat", consumer="tcp://h:1"),
        lora=jobs.JobLora(name="a", path="/a"),
    ),
    jobs.KvJob(
        job="j",
        items=(ITEM,),
        tensors=TENSORS,
        proof="p",
        expected=(ExpectedTransfer(transfer_id="t", item_uuid="cat", media=False),),
        cache_salt="s",
    ),
    jobs.Cancel(jobs=("j",)),
    jobs.Reset(job="j"),
    jobs.Leave(),
    jobs.Here(
        name="n", role="prefill", vllm="0", fingerprint="", most=1, well=True, load=jobs.Load()
    ),
    jobs.News(news=CacheNews(entries={"cat": True}, requested=("t",))),
    jobs.Done(job="j", reason="stop", kv={"remote_host": "h"}, load=jobs.Load(jobs=1)),
    jobs.Full(job="j", retry_s=1.0, load=jobs.Load()),
    jobs.Failed(job="j", reason="r"),
    jobs.VersionRefused(version=9, reason="r"),
]
VALID_JOBS = [jobs.encode(message, "life") for message in JOBS]
VALID = [codec.encode(message, session="life") for message in MESSAGES]
BOMBS = {
    "nested arrays": b"\x91" * codec.MAX_MESSAGE_BYTES,
    "nested in a field that nobody reads": b"\x93\x02\xa1s\x81\xa1x" + b"\x91" * 16_000,
    "nested maps": b"\x81\xa0" * (codec.MAX_MESSAGE_BYTES // 2),
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "a huge map": b"\xdf\xff\xff\xff\xff",
    "a huge text": b"\x93\x02\xdb\xff\xff\xff\xff",
    "huge bytes": b"\x93\x02\xc6\xff\xff\xff\xff",
    "a huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "many empty arrays": b"\xdc\x3f\xf0" + b"\x90" * 16_000,
    "many empty maps": b"\x93\x02\xa1s\xdc\x3f\xe0" + b"\x80" * 16_000,
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from(["t-cat", "cat", "t-dog", "dog", "shm", "tcp", "cpu:0", "float32", "x" * 600])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, valid: list[bytes] = VALID) -> bytes:
    """Draw a valid message with a few edits of its bytes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        edit = draw(st.sampled_from(["set", "cut", "insert", "splice"]))
        if edit == "set" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif edit == "cut":
            del data[place : place + draw(st.integers(1, 8))]
        elif edit == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=9))
        else:
            data[place:] = draw(st.sampled_from(valid))[place:]
    return bytes(data)


@st.composite
def shaped(
    draw: st.DrawFn, messages: list[Any] = MESSAGES, version: int = PROTOCOL_VERSION
) -> bytes:
    """Draw a message whose fields hold anything, most often what they should."""
    body: dict[str, Any] = msgspec.to_builtins(draw(st.sampled_from(messages)))
    if messages is MESSAGES:
        body["transfer_id"] = draw(st.sampled_from(["t-cat", "t-dog"]))
    target = body
    while inner := [name for name, value in target.items() if isinstance(value, dict)]:
        if not draw(st.booleans()):
            break
        target = target[draw(st.sampled_from(inner))]
    target[draw(st.sampled_from([*target, "more"]))] = draw(values)
    return msgspec.msgpack.encode([version, "life", body])


def decoded(data: bytes) -> Received | None:
    try:
        return codec.decode(data)[0]
    except ProtocolError:
        return None


@budget(150)
@given(data=damaged() | st.binary(max_size=100) | shaped())
def test_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    message = decoded(data)
    if isinstance(message, Foreign):
        message = message.refusal()
    if message is not None:
        assert decoded(codec.encode(message, session="life")) == message


@budget(150)
@given(
    data=damaged(VALID_JOBS) | st.binary(max_size=100) | shaped(JOBS, jobs.JOBS_VERSION),
    read=st.sampled_from([jobs.decode_from_front, jobs.decode_from_hub]),
)
def test_any_bytes_about_jobs_are_a_message_or_a_protocol_error(data: bytes, read: Any) -> None:
    try:
        message, life = read(data)
    except ProtocolError:
        return
    assert read(jobs.encode(message, life)) == (message, life)
    if isinstance(message, jobs.EncodeJob | jobs.KvJob):
        begins, count = jobs.offsets(message.tensors)
        ends = [begin + each.nbytes for begin, each in zip(begins, message.tensors, strict=True)]
        assert ends[-1] == count and sorted(begins) == begins


@budget(60)
@given(data=st.lists(damaged() | shaped(), min_size=1, max_size=8), sender=st.booleans())
def test_decoded_messages_are_harmless_at_both_ends(data: list[bytes], sender: bool) -> None:
    pd = PrefillSide()
    encode = EncodeSide("encode-0", pd.clock)
    pd.arrive("r", CAT, DOG)
    encode.submit(CAT, ready=True)
    encode.poll()
    pd.mailbox.inbox += [(encode.identity, message) for message in encode.outbox]
    for each in data:
        message = decoded(each)
        if message is not None:
            encode.receive(message)
            encode.poll()
            pd.mailbox.inbox.append((encode.identity if sender else b"stranger", message))
            pd.step()
    pd.clock.now += 1e5
    pd.step()
    assert not any(item.transfers for item in pd.cache.items.values())
    for claim in pd.shell.cache.requests["r"].claims.values():
        assert claim.item.is_here or not claim.item.transfers


@budget(80)
@given(data=shaped())
def test_producer_has_a_path_or_a_reason_against_it(data: bytes) -> None:
    message = decoded(data)
    if isinstance(message, Announce):
        process_is_gone(message.producer.session)
        try:
            registry.choose(message.producer, peer("pd", paths=(PathEndpoint(path="shm"),)))
        except NoCommonPathError:
            return


@pytest.mark.parametrize("device", ["tpu:0", "", ":", "cpu", "x" * 64])
def test_a_producer_on_a_platform_that_nobody_knows_has_no_path(device: str) -> None:
    with pytest.raises(NoCommonPathError):
        registry.choose(peer(device=device), peer("pd", paths=()))


@pytest.mark.parametrize("pid", ["9" * 20, "9" * 400, "٣", "0", "00000000001"])
def test_a_session_may_name_any_process(pid: str) -> None:
    _, start, namespace, unique = (
        new for new in peer(session=process_session()).session.split("-")
    )
    assert process_is_gone(f"{pid}-{start}-{namespace}-{unique}") in (True, False)


def process_session() -> str:
    from epd_portable.transfer.sessions import new_session

    return new_session()


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_message_of_any_form_takes_little_memory_to_refuse(bomb: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            codec.decode(BOMBS[bomb])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * codec.MAX_MESSAGE_BYTES


def test_memory_of_the_largest_announcement_is_bounded() -> None:
    largest = PeerDescriptor(
        instance="i" * 512,
        session="s" * 512,
        host="h" * 512,
        device="d" * 64,
        fingerprint="f" * 512,
        paths=tuple(PathEndpoint(path="p" * 64, address="a" * 4096) for _ in range(16)),
    )
    (valid,) = (message for message in MESSAGES if isinstance(message, Announce))
    announced = msgspec.structs.replace(valid, producer=largest)
    with pytest.raises(ProtocolError, match="at most"):
        codec.decode(codec.encode(announced, session="life"))


@budget(100)
@given(
    raw=st.dictionaries(st.sampled_from(["transfers", "more"]), values)
    | st.builds(
        lambda fields: {"transfers": [fields]},
        st.dictionaries(
            st.sampled_from(["transfer_id", "mm_hash", "consumer", "encoder", "modality"]),
            st.text(st.characters(codec=None), max_size=600) | scalars,
        ),
    )
)
def test_transfer_params_are_valid_or_a_protocol_error(raw: dict[str, Any]) -> None:
    for kind in (EncodeParams, PrefillParams):
        try:
            msgspec.msgpack.encode(read_params(raw, kind))
        except ProtocolError:
            continue


def test_transfer_parameters_have_limits() -> None:
    transfer = {"transfer_id": "t", "item_uuid": "h", "consumer": "c"}
    with pytest.raises(ProtocolError, match="4096"):
        read_params({"transfers": [transfer] * 5000}, PrefillParams)
    with pytest.raises(ProtocolError, match="512"):
        read_params({"transfers": [transfer | {"item_uuid": "h" * 600}]}, EncodeParams)
    with pytest.raises(ProtocolError):
        read_params({"transfers": [transfer | {"transfer_id": "\ud800"}]}, PrefillParams)


@budget(80)
@given(
    address=st.one_of(
        st.text(st.characters(exclude_categories=()), max_size=200),
        st.binary(max_size=200).map(lambda data: base64.b85encode(data).decode()),
        st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=9), st.lists, max_leaves=9)
        .map(msgspec.msgpack.encode)
        .map(lambda data: base64.b85encode(data).decode()),
    )
)
def test_any_text_is_an_address_of_device_memory_or_an_error(address: str) -> None:
    try:
        _read_address(address)
    except TransportError:
        return

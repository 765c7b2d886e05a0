"""Jobs of a front at an engine of another machine: the messages, independent of vLLM's releases.

::

    front                                   hub of an engine
      │ Beat ─────────────────────────────▶ │
      │ ◀─────────────────────── Here, News │
      │ Job, then its bytes in chunks ────▶ │
      │ ◀──────────── Done │ Full │ Failed  │
      │ Cancel, Reset, Leave ─────────────▶ │

A `Job` is an `EncodeJob` or a `KvJob`.

Fields of an item are named tensors; each end makes vLLM's own types of them. Their bytes follow a
`Job` in messages of at most `CHUNK_BYTES`, one tensor after the other, each at a multiple of
`ALIGNMENT`. So no message is larger than a hub accepts before it has checked a key.

Two things are equal in every version, so that other versions are refused at once: `VersionRefused`,
and the `epd_portable.wire.codec.Envelope`, whose session names one process of the sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from epd_portable.errors import ProtocolError
from epd_portable.wire import codec
from epd_portable.wire.codec import Envelope, reader
from epd_portable.wire.descriptors import DTYPE_BYTES, MAX_DIMS, Name, Word
from epd_portable.wire.messages import MAX_REASON
from epd_portable.wire.params import MAX_TRANSFERS, CacheNews, EncodeTransfer, ExpectedTransfer

JOBS_VERSION = 2
CHUNK_BYTES = 1 << 20
"""Most bytes of a job in one message. Longer messages are refused."""
ALIGNMENT = 64
"""Bytes; the beginning of each tensor is a multiple."""
BEAT_S = 1.0
"""Between two heartbeats of either end, which do not wait for each other: those of a front may
stand behind pixels."""
MISSED_BEATS = 5
"""Heartbeats sent without a message from the other end, after which that has gone."""
MAX_TENSORS = 8192
MAX_FIELDS = 64
MAX_TOKENS = 1 << 22
"""Most tokens of a prompt."""
JOB_DTYPES = DTYPE_BYTES | dict.fromkeys(("uint8", "int8", "bool"), 1) | {
    "int16": 2, "int32": 4, "int64": 8
}  # fmt: skip
"""Bytes of one element of a tensor that a job may have."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat", tag_field="kind"):
    """Front → hub: heartbeat.

    Attributes:
        front: Name of the front, which its API servers have in common.
    """

    front: Name


class JobTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, contiguous.

    Attributes:
        dtype: A key of `JOB_DTYPES`.
        repeats: Times that each run of `run` elements stands in it; it is sent once. The frames of
            a still image to models that take pairs of frames are equal.
        run: Elements; 0 where nothing repeats.
    """

    dtype: Word
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 32)], ...], Meta(max_length=MAX_DIMS)]
    repeats: Annotated[int, Meta(ge=1, le=64)] = 1
    run: Annotated[int, Meta(ge=0)] = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return math.prod(self.shape) * JOB_DTYPES[self.dtype] // self.repeats

    def __post_init__(self) -> None:
        if self.dtype not in JOB_DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: one of {', '.join(sorted(JOB_DTYPES))}")
        rows = self.run * self.repeats
        if self.repeats > 1 and (not rows or not self.shape or self.shape[-1] % rows):
            raise ValueError(f"shape {self.shape} is no multiple of {self.repeats} x {self.run}")


class JobLora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, where it changes what the engine computes."""

    name: Name
    path: Name


class JobItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of a prompt.

    Attributes:
        item: Name of the item in encoder caches.
        offset: Its first place in the prompt.
        length: Its places.
        fields: What the model's processor made of it, as for a batch of one item. A mapping with
            the key ``tensor`` stands for the tensor of that index.
        embeds: A byte for each of these places, 1 where an embedding stands; empty for all.
    """

    item: Name
    modality: Word
    offset: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    fields: Annotated[dict[Word, Any], Meta(min_length=1, max_length=MAX_FIELDS)]
    embeds: Annotated[bytes, Meta(max_length=MAX_TOKENS)] = b""


class _Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Front → hub: the head of a job.

    Attributes:
        job: Unique at the hub.
        items: In the order of the prompt.
        tensors: Whose bytes follow: the prompt's token ids (int32), then those of the items.
        trace_headers: Of the span to which it belongs.
    """

    job: Name
    items: Annotated[tuple[JobItem, ...], Meta(max_length=MAX_TRANSFERS)] = ()
    tensors: Annotated[tuple[JobTensor, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    lora: JobLora | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    trace_headers: Annotated[dict[Word, Name], Meta(max_length=16)] = {}


class EncodeJob(_Job, frozen=True, kw_only=True, omit_defaults=True, tag="encode"):
    """Encode one item and bring it to its consumer; the prompt is the item's places."""

    transfer: EncodeTransfer


class KvJob(_Job, frozen=True, kw_only=True, omit_defaults=True, tag="prefill"):
    """Compute the KV of a prompt, for a decode engine to read.

    Attributes:
        expected: Items that encode engines bring. Other items have their media.
        cache_salt: Prompts with another one share no KV.
        sample: As in `PrefillParams`.
        proof: Shows that a holder of the secret sends it, see `Secret.sign_transfer`.
    """

    proof: Word
    expected: Annotated[tuple[ExpectedTransfer, ...], Meta(max_length=MAX_TRANSFERS)] = ()
    cache_salt: Annotated[str, Meta(max_length=CHUNK_BYTES)] | None = None
    sample: bool = False


Job: TypeAlias = EncodeJob | KvJob


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel", tag_field="kind"):
    """Front → hub: these jobs of the front need not be done any more; there is no reply."""

    jobs: Annotated[tuple[Name, ...], Meta(max_length=4096)]


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag="reset", tag_field="kind"):
    """Front → hub: compute every requested item from now on, cached ones as well.

    Attributes:
        job: Name for the `Done` that completes it.
    """

    job: Name


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave", tag_field="kind"):
    """Front → hub: its last message in this session; its jobs are cancelled."""


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Backlog of the engine for other fronts than the receiver.

    Attributes:
        jobs: Jobs in the backlog.
        seconds: Estimated duration of these jobs, by earlier ones.
    """

    jobs: int = 0
    seconds: float = 0.0


class Here(msgspec.Struct, frozen=True, kw_only=True, tag="here", tag_field="kind"):
    """Hub → front: heartbeat, and reply to the first one of a front.

    Attributes:
        vllm: Release of its vLLM, for the log.
        fingerprint: See `epd_portable.wire.fingerprint`.
        kv: Form of the KV that it computes, see `agreement.kv_form`; empty for none.
        most: Jobs that it takes at a time.
        well: Its engine responds.
    """

    name: Name
    role: Word
    vllm: Word
    fingerprint: Annotated[str, Meta(max_length=1 << 16)]
    kv: Annotated[str, Meta(max_length=1 << 16)] = ""
    most: int
    well: bool
    load: Load


class News(msgspec.Struct, frozen=True, kw_only=True, tag="news", tag_field="kind"):
    """Hub → every front: changes of the engine's encoder cache; at first, all that is there."""

    news: CacheNews


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="kind"):
    """Hub → front: the engine has ended a job.

    Attributes:
        reason: vLLM's word for how: ``stop`` and ``length`` are well.
        params: ``ec_transfer_params`` of the end.
        kv: ``kv_transfer_params`` of the end.
    """

    job: Name
    reason: Word
    params: dict[str, Any] | None = None
    kv: dict[str, Any] | None = None
    load: Load


class Full(msgspec.Struct, frozen=True, kw_only=True, tag="full", tag_field="kind"):
    """Hub → front: no capacity for a job at the moment.

    Attributes:
        retry_s: Seconds after which there is, by the pace of the jobs before.
    """

    job: Name
    retry_s: float
    load: Load


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="kind"):
    """Hub → front: a job is invalid here, and the engine has not seen it."""

    job: Name
    reason: str


class VersionRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="kind"):
    """Hub → front: the sender speaks another version. The same in every version."""

    version: int
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


FromFront: TypeAlias = Beat | EncodeJob | KvJob | Cancel | Reset | Leave
FromHub: TypeAlias = Here | News | Done | Full | Failed | VersionRefused


_read_envelope = reader(Envelope, "a message about jobs")
_read_from_front = reader(FromFront, "a front's message about jobs")
_read_from_hub = reader(FromHub, "a hub's message about jobs")
_read_refusal = reader(VersionRefused, "a hub's message of another version")


class OtherVersionError(ProtocolError):
    """A message of another version of these messages."""


def encode(message: FromFront | FromHub, session: str) -> bytes:
    """Return the bytes of one message of a sender."""
    return codec.encode(message, session=session, protocol=JOBS_VERSION)


def encode_head(job: Job, session: str) -> bytes:
    """Return the bytes of a job's head, which a hub takes.

    Raises:
        ProtocolError: What a client set is longer or larger than a hub takes.
    """
    try:
        data = encode(job, session)
        if len(data) > CHUNK_BYTES:
            raise ProtocolError(f"a job's head of {len(data)} bytes: at most {CHUNK_BYTES}")
        decode_from_front(data)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"a job for another machine: {error}") from error
    return data


def decode_from_front(data: bytes | memoryview) -> tuple[FromFront, str]:
    """Return a front's message and its session.

    Raises:
        OtherVersionError: It is of another version; the message has the version and the remedy.
        ProtocolError: The bytes are no message.
    """
    envelope = _read_envelope(data)
    if envelope.protocol != JOBS_VERSION:
        raise OtherVersionError(_versions(envelope.protocol))
    message: FromFront = _read_from_front(memoryview(envelope.body))
    return message, envelope.session


def decode_from_hub(data: bytes | memoryview) -> tuple[FromHub, str]:
    """Return a hub's message and its session; raises as `decode_from_front`."""
    envelope = _read_envelope(data)
    if envelope.protocol != JOBS_VERSION:
        try:
            refused: VersionRefused = _read_refusal(memoryview(envelope.body))
        except ProtocolError:
            raise OtherVersionError(_versions(envelope.protocol)) from None
        return refused, envelope.session
    message: FromHub = _read_from_hub(memoryview(envelope.body))
    return message, envelope.session


def offsets(tensors: Sequence[JobTensor]) -> tuple[list[int], int]:
    """Return where the bytes of each tensor begin among a job's, and how many there are in all."""
    found, end = [], 0
    for each in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        found.append(begin)
        end = begin + each.nbytes
    return found, end


def _versions(sender: int) -> str:
    return (
        f"version {sender} of jobs at the sender, {JOBS_VERSION} at the receiver. Run one release "
        "of epd-portable at front and engine"
    )

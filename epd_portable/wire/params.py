"""Content of ``ec_transfer_params`` in OpenAI requests and responses.

The field is vLLM's own (0.26 and later). It reaches the connector as a plain dictionary; what the
connector returns when a request ends comes back in the response.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from epd_portable.errors import ProtocolError
from epd_portable.wire.descriptors import MAX_DIMS, Name, Word

FIELD = "ec_transfer_params"
MAX_TRANSFERS = 4096
SAMPLED_VALUES = 256
"""Maximum number of values of an `OutputSample`."""


class EncodeTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Item that an encode instance has to deliver.

    Attributes:
        transfer_id: Unique name of the transfer of this item to one PD request.
        item_uuid: The item's ``uuid`` in the request, which the front set.
        consumer: ZMQ address of the PD instance's control channel.
        modality: ``image``, ``video`` or ``audio``.
        proof: Shows that a holder of the secret wants this transfer of this item to this consumer,
            see `epd_portable.config.secret.Secret.sign_transfer`.
    """

    transfer_id: Name
    item_uuid: Name
    consumer: Name
    modality: Word = "image"
    proof: Word = ""


class EncodeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Front → encode instance."""

    transfers: Annotated[tuple[EncodeTransfer, ...], Meta(max_length=MAX_TRANSFERS)]


class ExpectedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """An item that a PD request will receive.

    Attributes:
        transfer_id: As in `EncodeTransfer`, as are ``item_uuid`` and ``modality``.
        media: Whether the request holds the item's media; if not, it cannot be encoded here.
        store: Key of the item's entry in the store, for the PD instance to load; empty if an encode
            instance delivers the item.
        on_demand: No encoder delivers it before the PD instance requests it, see `CacheNews`: the
            item is most likely in its encoder cache.
    """

    transfer_id: Name
    item_uuid: Name
    modality: Word = "image"
    media: bool = True
    store: Name = ""
    on_demand: bool = False


class PrefillParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Front → PD instance, which replies with `CacheNews`.

    Attributes:
        transfers: Distinct items in the order of their first place in the prompt.
        sample: Whether to report an `OutputSample` of each item, wherever it was encoded.
    """

    transfers: Annotated[tuple[ExpectedTransfer, ...], Meta(max_length=MAX_TRANSFERS)]
    sample: bool = False


class OutputSample(msgspec.Struct, frozen=True, kw_only=True):
    """Some values of one encoder output, by which a front compares engines.

    Attributes:
        dtype: Of the output, a key of `epd_portable.wire.descriptors.DTYPE_BYTES`.
        numbers: Float32, little endian: the Euclidean norm of all values, then values at equal
            distances, from the first to the last.
    """

    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    dtype: Word
    numbers: Annotated[bytes, Meta(max_length=4 * (1 + SAMPLED_VALUES))]


class CacheNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PD engine → front, with the outputs of a step.

    Attributes:
        entries: Items that its encoder cache got (``True``) or lost since the last, by ``mm_hash``.
        requested: Transfers on demand whose items it does not have, and those whose encoder has
            given them up.
        refused: Requests that it fails because an item is larger than a limit: limit and remedy.
        samples: Of items with `PrefillParams.sample`, by ``mm_hash``.
    """

    entries: dict[str, bool] = {}
    requested: tuple[Name, ...] = ()
    refused: dict[str, str] = {}
    samples: dict[str, OutputSample] = {}


Source = Literal["transfer", "encoder_cache", "prefix_cache", "local", "store"]


class ItemOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PD instance → front and client: where one item came from.

    Attributes:
        source: ``transfer`` (written by an encode instance), ``encoder_cache`` (already there),
            ``prefix_cache`` (covered by cached KV), ``local`` (encoded by the PD instance) or
            ``store`` (loaded from the store).
        encoder: Instance that encoded it, if it was transferred.
        nbytes: Bytes transferred or loaded.
        wait_ms: From the arrival of the request to the item's.
        transfer_ms: From the grant to *written*.
    """

    mm_hash: str
    source: Source
    encoder: str = ""
    path: str = ""
    nbytes: int = 0
    wait_ms: float = 0.0
    transfer_ms: float = 0.0


class PrefillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``ec_transfer_params`` in a PD response.

    Attributes:
        items: Distinct items, in the order of the prompt.
        mm_inputs_done: Places of items whose tokens were all computed when the request ended.
        mm_inputs_total: Places of items in the prompt.
    """

    instance: str
    items: tuple[ItemOutcome, ...]
    mm_inputs_done: int = 0
    mm_inputs_total: int = 0


ParamsT = TypeVar("ParamsT", EncodeParams, PrefillParams)


to_params = msgspec.to_builtins
"""Returns the plain dictionary of `EncodeParams`, `PrefillParams` or `PrefillOutcome`."""


def is_encode_job(raw: dict[str, Any] | None) -> bool:
    """Return whether a request's parameters are for an encode job, which has no output."""
    transfers = (raw or {}).get("transfers")
    return isinstance(transfers, (list, tuple)) and any(
        isinstance(each, dict) and "consumer" in each for each in transfers
    )


def read_params(raw: dict[str, Any], kind: type[ParamsT]) -> ParamsT:
    """Return a request's `EncodeParams` or `PrefillParams`, or raise `ProtocolError`."""
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"ec_transfer_params, read as {kind.__name__}: {error}") from error

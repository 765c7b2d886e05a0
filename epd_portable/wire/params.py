"""What travels in the ``ec_transfer_params`` field of OpenAI requests and responses.

The field is vLLM's own (0.26 and later): it reaches the connector of the instance as a plain
dictionary, and what the connector returns when a request ends comes back in the response.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from epd_portable.errors import ProtocolError
from epd_portable.wire.descriptors import Name, Word

MAX_TRANSFERS = 4096
"""Of one request."""


class EncodeTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One item that an encode instance is asked to deliver.

    Attributes:
        transfer_id: Unique name of the item's way to one PD request.
        mm_hash: The ``uuid`` that the router gave the item.
        consumer: ZMQ address of the PD instance's control channel.
        modality: What it is to the model: ``image``, ``video`` or ``audio``.
        proof: The router's word, made with the secret, that it wants this item brought to this
            consumer by this transfer, see `epd_portable.config.secret.Secret.vouch`; empty vouches
            for nothing.
    """

    transfer_id: Name
    mm_hash: Name
    consumer: Name
    modality: Word = "image"
    proof: Word = ""


class EncodeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Router → encode instance."""

    transfers: Annotated[tuple[EncodeTransfer, ...], Meta(max_length=MAX_TRANSFERS)]


class EncodedItem(msgspec.Struct, frozen=True, kw_only=True):
    """Encode instance → router: what a PD instance must know of an item in place of its media.

    Attributes:
        mm_hash: The engine's identifier.
        modality: As the engine calls it: ``image``, ``video`` or ``audio``.
        metadata: Fields that size the item's place in the prompt, such as Qwen-VL's
            ``image_grid_thw``. Empty if the model's items cannot be sent without their media;
            ``None`` if they can, but the engine does not hold this one's fields any more.
    """

    mm_hash: Name
    modality: Word
    metadata: dict[Word, list[Any]] | None = None


class EncodeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the response of an encode instance carries in ``ec_transfer_params``.

    Attributes:
        instance: Who answered.
        items: Of the request.
        namespace: Of the entries that it writes into the store; empty without one.
    """

    instance: Name
    items: Annotated[tuple[EncodedItem, ...], Meta(max_length=MAX_TRANSFERS)]
    namespace: Word = ""


class ExpectedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One item that a PD request will receive.

    Attributes:
        transfer_id: As in `EncodeTransfer`.
        mm_hash: As in `EncodeTransfer`.
        encoder: Name of the instance that was asked first, for the log when nothing comes.
        modality: As in `EncodeTransfer`.
        media: Whether the request holds the item's media; if not, it must never be encoded here.
        store: Key of its entry in the store, from which the PD instance loads it by itself; empty
            if an encode instance brings it.
    """

    transfer_id: Name
    mm_hash: Name
    encoder: Name = ""
    modality: Word = "image"
    media: bool = True
    store: Name = ""


class PrefillParams(msgspec.Struct, frozen=True, kw_only=True):
    """Router → PD instance.

    Attributes:
        transfers: Distinct items in the order of their first place in the prompt.
        reply_to: ZMQ identity of the router on the PD instance's control channel, for `Nack`s
            that concern this request.
    """

    transfers: Annotated[tuple[ExpectedTransfer, ...], Meta(max_length=MAX_TRANSFERS)]
    reply_to: Name = ""


Source = Literal["transfer", "encoder_cache", "prefix_cache", "local", "store"]


class ItemOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PD instance → router and client: where one item came from.

    Attributes:
        mm_hash: The engine's identifier.
        source: ``transfer`` (written by an encode instance), ``encoder_cache`` (already there),
            ``prefix_cache`` (covered by cached KV), ``local`` (encoded by the PD instance) or
            ``store`` (loaded from the store).
        encoder: Instance that encoded it, if it was transferred.
        path: Transfer path used.
        nbytes: Bytes transferred or loaded.
        wait_ms: From the arrival of the request to the item's presence.
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
    """What a PD response carries in ``ec_transfer_params``.

    Attributes:
        instance: Who answered.
        items: Where each distinct item came from, in the order of the prompt.
        mm_inputs_done: Items whose tokens were all computed when the request ended.
        mm_inputs_total: Items of the prompt, one that comes twice counted twice.
    """

    instance: str
    items: tuple[ItemOutcome, ...]
    mm_inputs_done: int = 0
    mm_inputs_total: int = 0


def to_params(
    value: EncodeParams | EncodeOutcome | PrefillParams | PrefillOutcome,
) -> dict[str, Any]:
    """Return the plain dictionary that JSON carries."""
    return dict(msgspec.to_builtins(value))


def encode_params(raw: dict[str, Any]) -> EncodeParams:
    """Read what an encode instance received.

    Raises:
        ProtocolError: The dictionary has another form.
    """
    try:
        return msgspec.convert(raw, EncodeParams)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"ec_transfer_params of an encode request: {error}") from error


def prefill_params(raw: dict[str, Any]) -> PrefillParams:
    """Read what a PD instance received.

    Raises:
        ProtocolError: The dictionary has another form.
    """
    try:
        return msgspec.convert(raw, PrefillParams)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"ec_transfer_params of a PD request: {error}") from error

"""What travels in the ``ec_transfer_params`` field of OpenAI requests and responses.

The field is vLLM's own (0.26 and later): it reaches the connector of the instance as a plain
dictionary, and what the connector returns when a request ends comes back in the response.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from epd_portable.errors import ProtocolError


class EncodeTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One item that an encode instance is asked to deliver.

    Attributes:
        transfer_id: Unique name of the item's way to one PD request.
        mm_hash: The ``uuid`` that the router gave the item.
        consumer: ZMQ address of the PD instance's control channel.
    """

    transfer_id: str
    mm_hash: str
    consumer: str


class EncodeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Router → encode instance."""

    transfers: tuple[EncodeTransfer, ...]


class ExpectedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One item that a PD request will receive.

    Attributes:
        transfer_id: As in `EncodeTransfer`.
        mm_hash: As in `EncodeTransfer`.
        encoder: Name of the instance that was asked first, for the report.
    """

    transfer_id: str
    mm_hash: str
    encoder: str = ""


class PrefillParams(msgspec.Struct, frozen=True, kw_only=True):
    """Router → PD instance.

    Attributes:
        transfers: Distinct items in the order of their first place in the prompt.
        reply_to: ZMQ identity of the router on the PD instance's control channel, for `Nack`s
            that concern this request.
    """

    transfers: tuple[ExpectedTransfer, ...]
    reply_to: str = ""


Source = Literal["transfer", "encoder_cache", "prefix_cache", "local"]


class ItemOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PD instance → router and client: how one item was had.

    Attributes:
        mm_hash: The engine's identifier.
        source: ``transfer`` (written by an encode instance), ``encoder_cache`` (already there),
            ``prefix_cache`` (covered by cached KV) or ``local`` (encoded by the PD instance).
        encoder: Instance that encoded it, if it was transferred.
        path: Transfer path used.
        nbytes: Bytes transferred.
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
    """What a PD response carries in ``ec_transfer_params``."""

    instance: str
    items: tuple[ItemOutcome, ...]


def to_params(
    value: EncodeParams | PrefillParams | PrefillOutcome,
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
    except msgspec.ValidationError as error:
        raise ProtocolError(f"ec_transfer_params of an encode request: {error}") from error


def prefill_params(raw: dict[str, Any]) -> PrefillParams:
    """Read what a PD instance received.

    Raises:
        ProtocolError: The dictionary has another form.
    """
    try:
        return msgspec.convert(raw, PrefillParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"ec_transfer_params of a PD request: {error}") from error

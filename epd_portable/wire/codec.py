"""Messages to bytes and back (msgpack).

Bytes of a peer are decoded into the types that are named here; any other bytes are a
`ProtocolError`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from epd_portable.errors import ProtocolError, TransportError
from epd_portable.wire.descriptors import Name
from epd_portable.wire.messages import PROTOCOL_VERSION, AnyMessage, Foreign, Received

MAX_MESSAGE_BYTES = 16 * 1024
"""A larger control message is refused before it is decoded."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A message with the sender's protocol version, and the name of one process."""

    protocol: int
    session: Name
    body: msgspec.Raw


def reader(expected: Any, what: str) -> Callable[[bytes | memoryview], Any]:
    """Return a decoder of msgpack to a type, which raises `ProtocolError` about ``what``."""
    decoder = msgspec.msgpack.Decoder(expected)

    def read(data: bytes | memoryview) -> Any:
        try:
            return decoder.decode(data)
        # RecursionError: arrays within arrays, in a field that is not read.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not {what}: {error}") from error

    return read


def as_address(fields: msgspec.Struct) -> str:
    """Return fields that producers need to reach a consumer, as the text of an address."""
    return base64.b85encode(msgspec.msgpack.encode(fields)).decode()


def address_reader(expected: Any, path: str) -> Callable[[str], Any]:
    """Return a function that reads what `as_address` wrote, or raises `TransportError`."""
    read_fields = reader(expected, f"an address of {path}")

    def read(address: str) -> Any:
        try:
            return read_fields(base64.b85decode(address.encode()))
        except (ProtocolError, ValueError) as error:
            raise TransportError(f"{address[:40]!r} is no address of {path}: {error}") from error

    return read


_encoder = msgspec.msgpack.Encoder()
_read_envelope = reader(Envelope, "a control message")
_read_body = reader(AnyMessage, "a control message")
_read_header = reader(Foreign, "a control message of another version")


def encode(message: msgspec.Struct, *, session: str, protocol: int | None = None) -> bytes:
    """Return the bytes of one message; ``protocol`` is that of the peer, for `Foreign.refusal`."""
    body = msgspec.Raw(_encoder.encode(message))
    protocol = PROTOCOL_VERSION if protocol is None else protocol
    return _encoder.encode(Envelope(protocol=protocol, session=session, body=body))


def decode(*parts: bytes) -> tuple[Received, str]:
    """Return a message, or the header of one of another version, and the session that sent it.

    Args:
        parts: Of a ZMQ message; there must be one.

    Raises:
        ProtocolError: The bytes are no message.
    """
    if len(parts) != 1:
        raise ProtocolError(f"control message of {len(parts)} parts: it must have one")
    (data,) = parts
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"control message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are allowed"
        )
    envelope: Envelope = _read_envelope(data)
    if envelope.protocol != PROTOCOL_VERSION:
        header: Foreign = _read_header(memoryview(envelope.body))
        return msgspec.structs.replace(header, protocol=envelope.protocol), envelope.session
    message: AnyMessage = _read_body(memoryview(envelope.body))
    return message, envelope.session

"""Messages to bytes and back (msgpack)."""

from __future__ import annotations

import msgspec

from epd_portable.errors import IncompatiblePeerError, ProtocolError
from epd_portable.wire.messages import PROTOCOL_VERSION, AnyMessage

MAX_MESSAGE_BYTES = 64 * 1024
"""Control messages are small; a larger one is refused before it is decoded."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A message with what is needed before it can be trusted.

    Attributes:
        protocol: Version of the sender.
        session: One life of the sending process.
        body: The message.
    """

    protocol: int
    session: str
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_body_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage, *, session: str) -> bytes:
    """Return the bytes of one message."""
    body = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(Envelope(protocol=PROTOCOL_VERSION, session=session, body=body))


def decode(data: bytes) -> tuple[AnyMessage, str]:
    """Return a message and the session that sent it.

    Raises:
        IncompatiblePeerError: The sender speaks another version of the protocol.
        ProtocolError: The bytes are no message.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"control message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are allowed"
        )
    try:
        envelope = _envelope_decoder.decode(data)
        if envelope.protocol != PROTOCOL_VERSION:
            raise IncompatiblePeerError(
                f"peer speaks protocol {envelope.protocol}, this process {PROTOCOL_VERSION}: "
                "run the same version of epd-portable at both ends"
            )
        return _body_decoder.decode(envelope.body), envelope.session
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"not a control message: {error}") from error

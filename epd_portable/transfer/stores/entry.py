"""Entries of a store: their keys, and the seals by which forged ones are recognised.

An entry is a *head*, which describes and seals the bytes, and a *payload*, the contiguous encoder
output. Both are plain data. The front reads heads.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from epd_portable.config.secret import Secret
from epd_portable.errors import ConfigError, CorruptEntryError
from epd_portable.transfer.stores.base import Entry
from epd_portable.wire.descriptors import Name, TensorSpec, Word

if TYPE_CHECKING:
    from epd_portable.config.instance import InstanceConfig

FORMAT = 1
MAX_HEAD_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = (1 << 31) - 1
_MAC_CHARACTERS = 32
_NONCE_BYTES = 16
_KEY_BYTES = 16


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an entry.

    Attributes:
        key: The entry's key; under another one the entry is invalid.
        modality: The engine's: ``image``, ``video`` or ``audio``.
        nonce: For the key of ``tag``, in hexadecimal digits.
        tag: Authentication code of the payload, in hexadecimal digits.
    """

    format: int = FORMAT
    key: Name
    mm_hash: Name
    modality: Word
    tensor: TensorSpec
    nonce: Word
    tag: Word


_heads = msgspec.json.Decoder(Head)


def namespace_of(config: InstanceConfig, stored_as: Callable[[], str]) -> str:
    """Return the namespace of an engine's entries; empty without a store.

    Platforms have namespaces of their own: nothing compares their outputs in a store.

    Args:
        stored_as: Returns a digest of everything else that the entries depend on.

    Raises:
        ConfigError: As `Seal`, or the secret cannot be read.
    """
    if config.store is None:
        return ""
    return Seal(Secret.read(config.secret_file)).namespace(f"{config.platform} {stored_as()}")


class Seal:
    """Makes and verifies keys and heads.

    Keys differ by deployment and by what its engines serve, so that entries of others are never
    found; heads and payloads have authentication codes that only holders of the secret can make.

    Raises:
        ConfigError: The library that seals is not installed.
    """

    def __init__(self, secret: Secret) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "store: the package cryptography is not installed, which seals entries: "
                "pip install 'epd-portable[store]'"
            ) from error
        self._cipher = AESGCM
        self._key = secret.derive("store")

    def namespace(self, fingerprint: str) -> str:
        """Return the prefix of the keys of all engines with one fingerprint, 16 digits."""
        return hashlib.blake2b(
            b"namespace" + fingerprint.encode(), key=self._key, digest_size=8
        ).hexdigest()

    def key(self, namespace: str, item: str, modality: str) -> str:
        """Return the key of an item, by its ``item_uuid`` and the front's word for its modality.

        It has letters, digits and one dash.
        """
        digest = hashlib.blake2b(key=self._key, digest_size=_KEY_BYTES)
        for field in (namespace, modality, item):
            data = field.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return f"{namespace}-{digest.hexdigest()}"

    def entry(
        self,
        payload: memoryview,
        *,
        key: str,
        mm_hash: str,
        modality: str,
        tensor: TensorSpec,
    ) -> Entry:
        """Return an entry to be written, its head sealed; the arguments are those of `Head`.

        Raises:
            ValueError: The payload is not ``tensor``, or larger than `MAX_PAYLOAD_BYTES`.
        """
        if payload.nbytes != tensor.nbytes or payload.nbytes > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a payload of {payload.nbytes} bytes for {tensor} of {tensor.nbytes}: they must "
                f"be equal, and at most {MAX_PAYLOAD_BYTES}"
            )
        nonce = secrets.token_hex(_NONCE_BYTES)
        head = Head(
            key=key,
            mm_hash=mm_hash,
            modality=modality,
            tensor=tensor,
            nonce=nonce,
            tag=self._tag(nonce, payload),
        )
        text = msgspec.json.encode(head)
        return Entry(
            key=key,
            head=self._mac(text).encode() + text,
            payload=payload,
            mm_hash=mm_hash,
            dtype=tensor.dtype,
            shape=tensor.shape,
        )

    def open(self, raw: bytes, key: str) -> Head:
        """Return a head; `CorruptEntryError` if this deployment did not make it for this key."""
        mac, text = raw[:_MAC_CHARACTERS], raw[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, self._mac(text).encode()):
            raise CorruptEntryError(f"entry {key}: its head is not sealed by this deployment")
        try:
            head = _heads.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptEntryError(f"entry {key}: its head cannot be read: {error}") from error
        if head.format != FORMAT or head.key != key:
            raise CorruptEntryError(
                f"entry {key}: its head is that of {head.key} in format {head.format}"
            )
        return head

    def check(self, head: Head, payload: memoryview) -> None:
        """Raise `CorruptEntryError` if a payload is not the one that a head was made for."""
        if payload.nbytes != head.tensor.nbytes:
            raise CorruptEntryError(
                f"entry {head.key}: {payload.nbytes} bytes, its head has {head.tensor.nbytes}"
            )
        if not hmac.compare_digest(self._tag(head.nonce, payload), head.tag):
            raise CorruptEntryError(f"entry {head.key}: its bytes are not those that were written")

    def _mac(self, text: bytes) -> str:
        # The length is that of the field at the front, so no other text has these bytes.
        return hashlib.blake2b(
            b"head" + text, key=self._key, digest_size=_MAC_CHARACTERS // 2
        ).hexdigest()

    def _tag(self, nonce: str, payload: memoryview) -> str:
        """Return an authentication code of bytes: GMAC, several GB/s, with a key of its own."""
        once = hashlib.blake2b(b"tag" + nonce.encode(), key=self._key, digest_size=32).digest()
        return self._cipher(once).encrypt(bytes(12), b"", payload).hex()

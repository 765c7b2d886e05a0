"""The secret that the parts of one deployment share, and what is derived from it.

Who holds it may take part in the channels between instances, all of which are encrypted, and
register instances at the router. It is in a file that only its owner can read, never on a command
line, in the environment or in a log. Where nobody names such a file, the launcher makes one for its
run, which opens the channels and registers nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from epd_portable.errors import ConfigError

MIN_CHARACTERS = 32
MAX_BYTES = 4096
_PROOF_BYTES = 16


class Secret:
    """The content of a secret file; what is derived from it does not tell it.

    Args:
        text: At least `MIN_CHARACTERS` characters.
    """

    def __init__(self, text: str) -> None:
        self._key = hashlib.blake2b(text.encode()).digest()

    @classmethod
    def read(cls, path: str) -> Secret:
        """Read a secret file.

        Raises:
            ConfigError: None is named, it cannot be read, others may read it, or it is too short.
        """
        if not path:
            raise ConfigError(
                "there is no secret_file, and without one no process speaks to another: "
                "epd-launch secret FILE makes one; name it as secret_file to the router and to "
                "every instance that is started by hand (epd-launch makes one for its own)"
            )
        try:
            with Path(path).expanduser().open("rb") as opened:
                if (mode := os.fstat(opened.fileno()).st_mode & 0o777) & 0o077:
                    raise ConfigError(
                        f"secret_file {path} has mode {mode:04o}: others can read or change it; "
                        f"chmod 600 {path}, and make a new secret if they may have read this one"
                    )
                text = opened.read(MAX_BYTES).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"secret_file {path} cannot be read: {error}; epd-launch secret {path} makes one"
            ) from error
        if len(text) < MIN_CHARACTERS:
            raise ConfigError(
                f"secret_file {path} holds {len(text)} characters: at least {MIN_CHARACTERS} that "
                f"nobody can guess are needed; epd-launch secret FILE makes such a file"
            )
        return cls(text)

    def token(self) -> str:
        """Return what a caller of the router's ``/epd/`` addresses shows as bearer token."""
        return self.derive("router token").hex()

    def vouch(self, transfer_id: str, item: str, consumer: str) -> str:
        """Return the router's proof that it wants an item brought to a consumer by a transfer.

        Args:
            transfer_id: Of the transfer.
            item: The router's name of the item, ``EncodeTransfer.mm_hash``.
            consumer: Address of the consumer's control channel, as the router writes it.
        """
        key = self.derive("transfers")
        digest = hashlib.blake2b(key=key, digest_size=_PROOF_BYTES)
        for field in (transfer_id, item, consumer):
            # With its length: the ends of fields must not be anybody's choice.
            data = field.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def vouched(self, proof: str, transfer_id: str, item: str, consumer: str) -> bool:
        """Tell whether a proof is the router's, for exactly these, see `vouch`."""
        expected = self.vouch(transfer_id, item, consumer)
        return hmac.compare_digest(proof.encode("utf-8", "surrogatepass"), expected.encode())

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose; those of one purpose tell nothing of another's."""
        message = f"epd-portable {purpose}".encode()
        return hashlib.blake2b(message, key=self._key, digest_size=32).digest()


def make_secret_file(path: str) -> None:
    """Write a fresh secret of 256 bits into a new file that only its owner can read.

    Raises:
        ConfigError: There is such a file, or it cannot be written.
    """
    try:
        descriptor = os.open(
            Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600
        )
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is left as it is; remove it first, or name another file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")

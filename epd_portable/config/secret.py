"""The secret that the parts of one deployment share, and what is derived from it.

Its holders may take part in the encrypted channels between instances, and register instances at
the front. It is in a file that only its owner can read, never on a
command line, in the environment or in a log. Where no file is named, the launcher makes one for its
run, with which no instance can be registered.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable

from epd_portable.config.folders import expanded
from epd_portable.errors import ConfigError, RequestError

MIN_CHARACTERS = 32
MAX_BYTES = 1 << 20
SIGNATURE_SCHEME = "EPD-HMAC"
SIGNATURE_TOLERANCE_S = 30
"""Largest difference between the time of a signature and the clock."""
MAX_SIGNATURES = 65_536
"""Most signatures remembered at once; further requests are refused."""
_PROOF_BYTES = 16
_SIGNATURE = re.compile(
    rf"{SIGNATURE_SCHEME} time=([0-9]{{1,12}}), nonce=([0-9a-f]{{32}}), mac=([0-9a-f]{{64}})",
    re.ASCII,
)


def read_private_file(path: str, *, key: str, remedy: str = "") -> str:
    """Return the text of a file that others cannot read, without white space around it.

    Its group may read one that belongs to root, as Kubernetes mounts Secrets into Pods of others.

    Args:
        path: The file; of larger ones the first `MAX_BYTES` are read.
        key: That names it, for messages.
        remedy: What to add where it cannot be read.

    Raises:
        ConfigError: It cannot be read, or others can read or change it.
    """
    try:
        with expanded(path).open("rb") as opened:
            found = os.fstat(opened.fileno())
            others = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
            if (mode := found.st_mode & 0o777) & others:
                raise ConfigError(
                    f"{key} {path} has mode {mode:04o}: others can read or change it; chmod 600 "
                    f"{path}, and replace its content if they may have read it"
                )
            return opened.read(MAX_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key} {path} cannot be read: {reason}{remedy}") from error


class Secret:
    """The content of a secret file; what is derived from it does not reveal it.

    Args:
        text: At least `MIN_CHARACTERS` characters.
    """

    def __init__(self, text: str) -> None:
        self._key = hashlib.blake2b(text.encode()).digest()

    @classmethod
    def read(cls, path: str) -> Secret:
        """Read a secret file; see `read_secret_file`."""
        return cls(read_secret_file(path))

    def sign(
        self, method: str, target: str, body: bytes = b"", *, clock: Callable[[], float] = time.time
    ) -> str:
        """Return the ``authorization`` header of one HTTP request, valid once and briefly.

        ``target`` is path and query as they go over the wire, ``clock`` Unix time in seconds.
        """
        at, nonce = str(int(clock())), secrets.token_hex(16)
        mac = self._mac(method, target, at, nonce, body)
        return f"{SIGNATURE_SCHEME} time={at}, nonce={nonce}, mac={mac}"

    def signed(self, mac: str, method: str, target: str, at: str, nonce: str, body: bytes) -> bool:
        """Return whether a signature's mac is that of exactly this request, see `sign`."""
        return _same(mac, self._mac(method, target, at, nonce, body))

    def _mac(self, method: str, target: str, at: str, nonce: str, body: bytes) -> str:
        content = hashlib.blake2b(body).digest()
        return self._digest("signatures", method, target, at, nonce, content, nbytes=32)

    def sign_transfer(self, transfer_id: str, item: str, consumer: str) -> str:
        """Return the front's proof that it wants an item brought to a consumer by a transfer.

        ``item`` is ``EncodeTransfer.item_uuid``, ``consumer`` the address of its control channel.
        """
        return self._digest("transfers", transfer_id, item, consumer, nbytes=_PROOF_BYTES)

    def verify_transfer(self, proof: str, transfer_id: str, item: str, consumer: str) -> bool:
        """Return whether a proof is the front's, for exactly these, see `sign_transfer`."""
        return _same(proof, self.sign_transfer(transfer_id, item, consumer))

    def _digest(self, purpose: str, *fields: str | bytes, nbytes: int) -> str:
        digest = hashlib.blake2b(key=self.derive(purpose), digest_size=nbytes)
        for field in fields:
            data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
            # With its length, so that no other split of the fields has the same digest.
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose, from which those of others cannot be found."""
        message = f"epd-portable {purpose}".encode()
        return hashlib.blake2b(message, key=self._key, digest_size=32).digest()


def _same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


class SignatureCheck:
    """Accepts each signed request of a holder of the secret once, see `Secret.sign`.

    It remembers signatures in its process only: a request can be replayed once to each process that
    serves the address, until it is too old.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, secret: Secret, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock
        self._forget_at: dict[str, float] = {}  # by nonce, in the order in which they came

    def check(self, authorization: str, method: str, target: str, body: bytes = b"") -> None:
        """Return if a request is signed, see `Secret.sign`, and its signature was not used before.

        Raises:
            RequestError: 401; no signature, a wrong one, one of another time, or one that was used.
                503; more requests came within the tolerance than are remembered.
        """
        if not authorization:
            raise _unauthorized(
                "this address takes signed requests only: use epd-launch, and name it this "
                f"front's secret_file (header authorization, scheme {SIGNATURE_SCHEME})"
            )
        found = _SIGNATURE.fullmatch(authorization)
        if found is None:
            raise _unauthorized(
                f"the authorization header is no signature ({SIGNATURE_SCHEME} time=…, nonce=…, "
                "mac=…): use epd-launch of the front's version"
            )
        at, nonce, mac = found.groups()
        if not self._secret.signed(mac, method, target, at, nonce, body):
            raise _unauthorized(
                "the signature is wrong: it was made with another secret_file than this front's, "
                "or method, address or body were changed on the way; use the same file"
            )
        now = self._clock()
        late_s = now - int(at)
        if abs(late_s) > SIGNATURE_TOLERANCE_S:
            raise _unauthorized(
                f"the signature's time is {abs(late_s):.0f} s {'behind' if late_s > 0 else 'ahead'}"
                f", and {SIGNATURE_TOLERANCE_S} s are allowed: set the clocks of both machines, "
                "and sign each request when it is sent"
            )
        self._forget(now)
        if nonce in self._forget_at:
            raise _unauthorized("this signature was used before: sign each request again")
        if len(self._forget_at) >= MAX_SIGNATURES:
            raise RequestError(
                f"{MAX_SIGNATURES} signed requests came within {2 * SIGNATURE_TOLERANCE_S} s, "
                "and no more are remembered at once: send fewer requests",
                status=503,
                code="too_many_signatures",
                retry_after_s=SIGNATURE_TOLERANCE_S,
            )
        # By then its time is outside the tolerance.
        self._forget_at[nonce] = now + 2 * SIGNATURE_TOLERANCE_S

    def _forget(self, now: float) -> None:
        while (oldest := next(iter(self._forget_at), None)) and self._forget_at[oldest] < now:
            del self._forget_at[oldest]


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="unauthorized")


def read_secret_file(path: str) -> str:
    """Return the secret in a file.

    Raises:
        ConfigError: None is named, it cannot be read, others may read it, or it is too short.
    """
    if not path:
        raise ConfigError(
            "there is no secret_file, and without one no process speaks to another: "
            "epd-launch secret FILE makes one; name it as secret_file to the front and to "
            "every instance that is started by hand (epd-launch makes one for its own)"
        )
    text = read_private_file(
        path, key="secret_file", remedy=f"; epd-launch secret {path} makes one"
    )
    if len(text) < MIN_CHARACTERS:
        raise ConfigError(
            f"secret_file {path} holds {len(text)} characters: at least {MIN_CHARACTERS} that "
            f"cannot be guessed are needed; epd-launch secret FILE makes such a file"
        )
    return text


def make_secret_file(path: str, secret: str = "") -> None:
    """Write a secret into a new file that only its owner can read.

    Args:
        path: The file.
        secret: The content; a fresh secret of 256 bits if it is empty.

    Raises:
        ConfigError: There is such a file, or it cannot be written.
    """
    try:
        descriptor = os.open(expanded(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is left as it is; remove it first, or name another file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write((secret or secrets.token_hex(32)) + "\n")

"""API keys of clients and of trusted gateways, from a file that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping

from epd_portable.config.folders import file_stamp
from epd_portable.config.secret import read_private_file
from epd_portable.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
MIN_CHARACTERS = 16


class ApiKeys:
    """The keys of one file, one a line; empty lines and those that begin with ``#`` are none.

    Raises:
        ConfigError: It cannot be read, others may read it, or it holds no usable key.
    """

    def __init__(self, path: str, key: str = "front.api_keys_file") -> None:
        self._path = path
        self._key = key
        self._stamp, self._digests = _read(path, key)
        self._next_look = time.monotonic() + LOOK_EVERY_S

    def find(self, headers: Mapping[str, str]) -> bytes:
        """Return the digest of the key in ``authorization`` (bearer) or ``x-api-key``.

        It is empty if there is no key, or another one.
        """
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            shown = headers.get("x-api-key", "")
        return _digest(shown) if self.holds(shown) else b""

    def holds(self, shown: str) -> bool:
        """Return whether this is one of the keys."""
        self._look_again()
        digest = _digest(shown)
        # All are compared, so that the time does not depend on which one was near.
        return any([hmac.compare_digest(digest, known) for known in self._digests])

    def _look_again(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            if file_stamp(self._path) == self._stamp:
                return
            self._stamp, self._digests = _read(self._path, self._key)
        except ConfigError as error:
            # The keys that are known go on being good: a file is not always written at once.
            logger.warning("keys stay as they are: %s", error)
        else:
            logger.info("keys of %s were read again: there are %d", self._key, len(self._digests))


def _digest(shown: str) -> bytes:
    return hashlib.sha256(shown.strip().encode()).digest()


def _read(path: str, key: str) -> tuple[tuple[int, int, int], list[bytes]]:
    stamp = file_stamp(path)
    # Read after that: a change meanwhile is seen the next time.
    lines = read_private_file(path, key=key).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys or min(map(len, keys)) < MIN_CHARACTERS:
        raise ConfigError(
            f"{key} {path} holds {len(keys)} keys: at least one is needed, and each "
            f"of at least {MIN_CHARACTERS} characters, one a line"
        )
    return stamp, [_digest(each) for each in keys]

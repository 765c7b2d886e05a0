"""Who may ask: keys of clients, from a file that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from epd_portable.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
MIN_CHARACTERS = 16


class ApiKeys:
    """The keys of one file, one a line; empty lines and those that begin with ``#`` are none.

    Args:
        path: Of the file.

    Raises:
        ConfigError: It cannot be read, others may read it, or it holds no usable key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp, self._digests = _read(path)
        self._next_look = time.monotonic() + LOOK_EVERY_S

    def check(self, headers: Mapping[str, str]) -> None:
        """Look for a key in ``authorization`` (bearer) or ``x-api-key``.

        Raises:
            RequestError: 401; there is none, or it is not one of these.
        """
        self._look_again()
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            shown = headers.get("x-api-key", "")
        digest = hashlib.sha256(shown.strip().encode()).digest()
        # All are compared, so that the time tells nothing of which one was near.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(found):
            raise RequestError(
                "the API key is missing or wrong: send one of this router's keys as "
                "'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )

    def _look_again(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            if _stamp(self._path) == self._stamp:
                return
            self._stamp, self._digests = _read(self._path)
        except (OSError, ConfigError) as error:
            # The keys that are known go on being good: a file is not always written at once.
            logger.warning("API keys stay as they are: %s", error)
        else:
            logger.info("API keys were read again: there are %d", len(self._digests))


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(Path(path).expanduser())
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: str) -> tuple[tuple[int, int, int], list[bytes]]:
    try:
        stamp = _stamp(path)
        if (mode := os.stat(Path(path).expanduser()).st_mode & 0o777) & 0o077:
            raise ConfigError(
                f"router.api_keys_file {path} has mode {mode:04o}: others can read or change it; "
                f"chmod 600 {path}"
            )
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.api_keys_file {path} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys or min(map(len, keys)) < MIN_CHARACTERS:
        raise ConfigError(
            f"router.api_keys_file {path} holds {len(keys)} keys: at least one is needed, and each "
            f"of at least {MIN_CHARACTERS} characters, one a line"
        )
    return stamp, [hashlib.sha256(key.encode()).digest() for key in keys]

"""Storage of encoder outputs beyond the instances that made them."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from epd_portable.config.quantities import Seconds, Section, Size
from epd_portable.config.secret import read_private_file

SCHEMES = ("redis", "rediss")
_OF_ONE_KIND = {"redis": ("url", "password_file", "tls_ca_file"), "file": ("path",)}
"""Keys that the other kind has no use for."""


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"expected {' or '.join(f'{each}://host:port' for each in SCHEMES)}")
    if parts.password is not None:
        # It would be in plans, on command lines and in logs. Nor is it repeated here.
        raise ValueError(
            "a password does not belong into a URL, which others can read: write it into a file "
            "for store.password_file"
        )
    if parts.query or parts.fragment:
        raise ValueError("options of clients are not read: leave out what follows the ? or #")
    return url


class StoreSection(Section):
    """A store of encoder outputs that all instances and the front reach."""

    model_config = ConfigDict(hide_input_in_errors=True)

    kind: Literal["redis", "file"]
    """`redis`: a Redis or Valkey server. `file`: a folder that all instances and the front share.
    """
    url: Annotated[str, AfterValidator(_check_url)] | None = None
    """`redis`: `redis://host:port`, or `rediss://` with TLS, and `user@` for a user. A password in
    it is refused."""
    password_file: Annotated[str, Field(min_length=1)] | None = None
    """`redis`: file of mode 600 with the password."""
    tls_ca_file: Annotated[str, Field(min_length=1)] | None = None
    """`redis`: CA certificates (PEM). None: those of the system."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """`file`: the folder."""
    max_bytes: Annotated[Size, Field(ge=1 << 20)] = 8 << 30
    """Size of all entries. The least recently used are removed first. At least 1 MiB."""
    ttl_s: Seconds = 86400.0
    """Entries unused for this time are removed."""
    timeout_ms: Annotated[float, Field(ge=1, le=60_000)] = 500.0
    """Longest time of one lookup or load. Beyond it the [circuit
    breaker](store.md#slow-full-or-unreachable-store) opens."""

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> StoreSection:
        needed = _OF_ONE_KIND[self.kind][0]
        if getattr(self, needed) is None:
            raise ValueError(f"kind is {self.kind}, and {needed} is missing")
        for kind, keys in _OF_ONE_KIND.items():
            unused = [key for key in keys if key in self.model_fields_set and kind != self.kind]
            if unused and any(getattr(self, key) is not None for key in unused):
                raise ValueError(f"kind is {self.kind}, and {', '.join(unused)} belongs to {kind}")
        return self

    @property
    def timeout_s(self) -> float:
        """`timeout_ms` in seconds."""
        return self.timeout_ms / 1000

    @property
    def where(self) -> str:
        """The store in a few words, without anything secret."""
        return f"redis at {self.url}" if self.kind == "redis" else f"files in {self.path}"

    def password(self) -> str | None:
        """Return the password of the server; ``None`` for none.

        Raises:
            ConfigError: The file cannot be used, or others may read it.
        """
        if self.password_file is None:
            return None
        return read_private_file(self.password_file, key="store.password_file")

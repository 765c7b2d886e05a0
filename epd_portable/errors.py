"""Every error that the package raises on purpose.

::

    EPDError
    ├── ConfigError                  a configuration file, option or variable is wrong
    ├── LaunchError                  an instance could not be started or did not become ready
    │   ├── PortInUseError
    │   └── RefusedError             another process refuses, and will until a setting is changed
    ├── PlatformError
    │   ├── PlatformUnavailableError     requested, but its runtime or device is not here
    │   └── UnsupportedError             this platform never supports the request
    ├── EngineError                  the installed vLLM is not one that the plug-in knows
    ├── ProtocolError                a peer's message cannot be understood or is not allowed now
    ├── TransportError               the bytes of an item did not arrive
    │   ├── TransportTimeoutError
    │   ├── LeaseExpiredError            the consumer took the slot back
    │   ├── PeerLostError                the other end is gone
    │   └── NoCommonPathError            no transfer path that both ends have
    ├── StoreError                   a store of encoder outputs has failed
    │   ├── StoreFullError               it has no space; reading continues
    │   └── CorruptEntryError            an entry is damaged, or not of this deployment
    ├── CapacityError                something bounded is full; waiting may help
    ├── MeasurementError             a measurement could not be made, or not as requested
    └── RequestError                 a client's request is refused; carries its HTTP status

Errors of libraries are translated where they cross into the package, with ``from``.
A message names the value, the limit and the remedy; but no password of a URL.
"""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^\s:/@]*):(?!\d+(?:[/?#\s,;)\]}'\"]|:\s|$))[^@\n]*@(?:\S*@)?")
"""Password of a URL: text between a user name and the last @ before a host, and no port."""


def without_passwords(text: str) -> str:
    """Return a text in which no URL has a password: terminals and logs are read by others."""
    return _PASSWORD.sub(r"\1:***@", text)


class EPDError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(EPDError):
    """A configuration file, command-line option or environment variable is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


class LaunchError(EPDError):
    """An instance could not be started or did not become ready."""


class RefusedError(LaunchError):
    """Another process refuses the request, and will until a setting is changed."""


class PortInUseError(LaunchError):
    """A port that the topology needs is taken by another process."""


class PlatformError(EPDError):
    """A device runtime failed."""


class PlatformUnavailableError(PlatformError):
    """The platform was requested, but its runtime or device is not on this machine."""


class UnsupportedError(PlatformError):
    """The platform does not support the request, with any installation."""


class EngineError(EPDError):
    """The installed engine is not one that the plug-in knows."""


class ProtocolError(EPDError):
    """A peer's message cannot be understood, or is not allowed in the present state."""


class TransportError(EPDError):
    """The bytes of an item did not arrive."""


class TransportTimeoutError(TransportError):
    """A transfer did not complete within its deadline."""


class LeaseExpiredError(TransportError):
    """The consumer took the slot back; request a new grant."""


class PeerLostError(TransportError):
    """The other end of a transfer is gone."""


class NoCommonPathError(TransportError):
    """No transfer path is usable at both ends."""


class StoreError(EPDError):
    """A store of encoder outputs cannot be reached, or did not reply in time."""


class StoreFullError(StoreError):
    """A store has no space for an entry; what is in it can be read."""


class CorruptEntryError(StoreError):
    """An entry of a store is damaged, incomplete, or was not made by this deployment's engines."""


class CapacityError(EPDError):
    """Exhaustion of something bounded; waiting may help."""


class MeasurementError(EPDError):
    """A measurement could not be made, or not as requested."""


class RequestError(EPDError):
    """A client's request is refused.

    Attributes:
        status: HTTP status, 4xx or 5xx.
        code: Short machine-readable word, for example ``invalid_data_url``.
        retry_after_s: Seconds after which trying again makes sense, or ``None``.
    """

    def __init__(
        self, message: str, *, status: int, code: str, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

"""How things end: the words that router, instances, logs, metrics and pages share.

`docs/glossary.md` has the same list for operators.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias


class FailureKind(enum.StrEnum):
    """Why something did not happen."""

    FULL = "full"
    """No room: it answered 429, or a queue or all slots are taken."""
    TIMEOUT = "timeout"
    """Not within its time."""
    LOST = "lost"
    """The connection ended early, or the process went down."""
    UNREACHABLE = "unreachable"
    """No connection could be made."""
    ERROR = "error"
    """It answered 5xx, or something that is no HTTP."""
    REFUSED = "refused"
    """The item or the request itself is at fault."""
    TOO_LARGE = "too_large"
    """It never fits."""
    UNAVAILABLE = "unavailable"
    """No instance is usable, or this process can open no connection."""
    MISSING = "missing"
    """A store's entry, an item or its metadata are not where they were said to be."""


Fallback: TypeAlias = Literal[
    "retried",
    "local",
    "original_media",
    "left_out",
    "incomplete",
    "error",
    "refused",
    "unavailable",
    "timeout",
]
"""What is done about a failure.

``retried``: another instance is asked, or the same once more. ``local``: the instance that answers
encodes the item, or computes the prompt. ``original_media``: the request goes with its media in
place of their metadata. ``left_out``: it goes without the item (``router.partial_results``).
``incomplete``: the answer itself says so, if it has events. ``error``: it gets the
instance's own error. ``refused``: 400 or 413. ``unavailable``: 503. ``timeout``: 504.
"""

ItemResult: TypeAlias = Literal[
    "encoded", "retried", "stored", "local", "local_first", "not_needed", "left_out", "cancelled"
]
"""What became of an item of a request.

``encoded``: by the encoder asked first. ``retried``: by another one. ``stored``: it came from the
store. ``local``: encoders failed or none was usable, and the instance that answers encodes it.
``local_first``: that one encodes it by choice: its role, a decider of ``router.choice``, or elastic
encoding. ``not_needed``: its job failed when the answer had already begun. ``left_out``: the
request is answered without it. ``cancelled``: the request ended first.
"""

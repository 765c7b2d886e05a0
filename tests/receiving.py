"""Receiving ends of paths, as an instance opens them."""

from __future__ import annotations

from typing import Any

from epd_portable.connector.transport import LeaseFence, ReceiveMemory, ReceivingEnd
from tests.keyring import keys


def receiving_end(memory: ReceiveMemory, **changes: Any) -> ReceivingEnd:
    """What a CPU instance gives to the receiver of a path in its scheduler's process."""
    given: dict[str, Any] = {
        "platform": "cpu",
        "host": "127.0.0.1",
        "data_address": "tcp://127.0.0.1:*",
        "fence": LeaseFence(),
        "keys": keys(),
    }
    return ReceivingEnd(memory=lambda: memory, **{**given, **changes})

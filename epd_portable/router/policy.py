"""Which instance gets what. Pure: names and loads come in, a name comes out.

Encoders are chosen per item by rendezvous hashing under a load bound: the same picture meets the
encoder that still has it in its cache, unless that one is busier than the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

LOAD_BOUND = 1.25
"""No encoder takes more than this multiple of the average load."""


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """Return the names in the order of preference of a key.

    When a name leaves, only the keys that preferred it move.
    """
    return sorted(names, key=lambda name: (_score(key, name), name), reverse=True)


def choose_encoder(
    mm_hash: str, loads: Mapping[str, int], *, bound: float = LOAD_BOUND
) -> str | None:
    """Return the encoder of one item.

    Args:
        mm_hash: Of the item.
        loads: Encode jobs in flight by name of instance; usable instances only.
        bound: Multiple of the average load, at least 1.

    Returns:
        The most preferred instance that stays within the bound, or ``None`` if there is none.
    """
    if not loads:
        return None
    limit = math.ceil(bound * (sum(loads.values()) + 1) / len(loads))
    order = rendezvous(mm_hash, loads)
    return next(name for name in order if loads[name] < limit)


def choose_pd(key: str, loads: Mapping[str, int]) -> str | None:
    """Return the instance with the fewest requests in flight; the key decides between equals.

    Args:
        key: Of the request.
        loads: Requests in flight by name of instance; usable instances only.
    """
    if not loads:
        return None
    least = min(loads.values())
    return rendezvous(key, (name for name, load in loads.items() if load == least))[0]


def _score(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()

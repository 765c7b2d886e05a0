"""When requests are sent, and the seeds of everything that is random. Pure."""

from __future__ import annotations

import hashlib
import random


def seed_of(*parts: str | int | float) -> int:
    """Return a seed that is the same for the same parts, in every process and version of Python."""
    text = "\0".join(map(repr, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def arrivals(rate: float, seconds: float, *, cv: float, seed: int) -> tuple[float, ...]:
    """Return the times at which requests arrive, whatever becomes of those before them.

    The gaps are gamma-distributed: with a coefficient of variation of 1 the arrivals are Poisson's,
    with more they come in bursts, with 0 they are evenly spread.

    Args:
        rate: Mean requests a second, positive.
        seconds: Length of the window; every time is below it.
        cv: Standard deviation of the gaps by their mean, 0 or more.
        seed: Decides the gaps.
    """
    draw = random.Random(seed)
    shape = 1 / cv**2 if cv else 0.0
    times: list[float] = []
    # An even flow begins with a request; a random one has been going on before the window.
    now_s = draw.gammavariate(shape, 1 / (shape * rate)) if shape else 0.0
    while now_s < seconds:
        times.append(now_s)
        now_s += draw.gammavariate(shape, 1 / (shape * rate)) if shape else 1 / rate
    return tuple(times)

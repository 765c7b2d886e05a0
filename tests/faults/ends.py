"""Deliveries between both ends of transfers in one process, encoded at random moments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.contract.pairs import Pair, Route
from tests.kit.encode_side import CountedSender, make_sender, order, output
from tests.kit.ends import PrefillSide

Close = Callable[[Callable[[], None]], object]
"""Takes what is to be called at the end."""
FAST: Mapping[str, float] = {"lease_s": 1.0, "wait_timeout_s": 5.0}
PATIENT: Mapping[str, float] = {"lease_s": 30.0, "wait_timeout_s": 30.0}
"""Lease and wait where everything is delivered, and a busy machine may take its time."""
DEADLINE_S = 60.0


def consumer(path: str, address: str, close: Close, **options: Any) -> PrefillSide:
    """Return a PD instance on the CPU, which is closed at the end; `FAST` by default."""
    route, folder = Route(path, Pair("cpu", "cpu")), Path()
    made = PrefillSide(route, folder, address=address, **{**FAST, **options})
    close(made.close)
    return made


def producer(path: str, close: Close, **options: float) -> CountedSender:
    """Return the sender of an encode worker, which is closed at the end; `FAST` by default."""
    made = make_sender(path, **{**FAST, **options})
    close(made.close)
    return made


def deliver(
    pd: PrefillSide, sender: CountedSender, address: str, items: Mapping[str, int], seed: int
) -> dict[str, str]:
    """Deliver items, encoded at random moments, until every request has been served.

    Args:
        pd: Gets a request for each.
        sender: Delivers them.
        address: Where it reaches the instance.
        items: Tokens of each, by name.
        seed: Of the moments.

    Returns:
        How each was had.

    Raises:
        AssertionError: A request was not served in time, or read something else.
    """
    chance = random.Random(seed)
    todo = list(items.items())
    computing: list[tuple[float, str]] = []
    sources: dict[str, str] = {}
    end_s = time.monotonic() + DEADLINE_S
    while todo or computing or pd.requests:
        assert time.monotonic() < end_s, f"not served: {list(pd.requests)}"
        if todo and chance.random() < 0.1:
            name, num_tokens = todo.pop(0)
            pd.arrive(name, name, num_tokens)
            sender.submit(order(f"t-{name}", name, address, num_tokens), None)
            computing.append((time.monotonic() + chance.uniform(0.0, 0.2), name))
        for ready in [each for each in computing if each[0] <= time.monotonic()]:
            computing.remove(ready)
            sender.output_ready(ready[1], output(ready[1], items[ready[1]]))
        pd.step()
        sources |= pd.served()
        time.sleep(0.001)
    return sources


def settle(pd: PrefillSide, sender: CountedSender) -> None:
    """Step until neither end keeps anything; an undelivered item may be kept for its deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        kept = pd.kept() | {"sent": sender.in_flight}
        left = {name: count for name, count in kept.items() if count}
        if not left:
            return
        assert time.monotonic() < end_s, left
        time.sleep(0.01)


def addresses(folder: Path) -> tuple[str, str]:
    """Return control addresses of a consumer and of somebody in front of it."""
    return f"ipc://{folder}/consumer", f"ipc://{folder}/meddler"

"""Many clients at a time, of which some go away while their requests are under way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Outcome:
    """Result of the run.

    Attributes:
        answered: How many were answered rightly and in time.
        left: How many went away before their answer.
        wrong: What happened to the others.
    """

    answered: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)


def ask_and_leave(
    url: str,
    asked: Sequence[tuple[dict[str, Any], str]],
    patience_s: Mapping[int, float],
    *,
    at_once: int,
    deadline_s: float,
) -> Outcome:
    """Ask everything, a few at once.

    Args:
        url: Base address of the front.
        asked: Bodies of chat requests, and their right answers.
        patience_s: After how long a client goes away, by its place in ``asked``.
        at_once: How many requests are under way.
        deadline_s: Of every request whose client stays.
    """
    outcome = Outcome()
    places = iter(range(len(asked)))

    async def ask(client: httpx.AsyncClient) -> None:
        for place in places:
            body, right = asked[place]
            begin_s = time.monotonic()
            request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            done, _ = await asyncio.wait({request}, timeout=patience_s.get(place))
            if not done:
                request.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await request
                outcome.left += 1
                continue
            took_s = time.monotonic() - begin_s
            try:
                answer = request.result()
            except httpx.RequestError as error:
                outcome.wrong.append(f"{place}: {error!r} after {took_s:.1f} s")
                continue
            if answer.status_code != httpx.codes.OK:
                outcome.wrong.append(f"{place}: {answer.status_code} {answer.text[:200]}")
            elif (found := answer.json()["choices"][0]["message"]["content"]) != right:
                outcome.wrong.append(f"{place}: {found!r} instead of {right!r}")
            elif took_s > deadline_s:
                outcome.wrong.append(f"{place}: took {took_s:.1f} s")
            else:
                outcome.answered += 1

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=deadline_s, trust_env=False) as client:
            await asyncio.gather(*(ask(client) for _ in range(at_once)))

    asyncio.run(ask_all())
    return outcome

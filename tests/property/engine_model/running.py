"""Run of one seed, and its result."""

from __future__ import annotations

import logging
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from tests.kit.memory import Violation


class Seeded(Protocol):
    """A world made of a seed."""

    trace: deque[str]
    seen: Counter[str]

    def __init__(self, seed: int, *, traced: bool = False) -> None: ...

    def run(self) -> None:
        """Let everything happen; raises what does not hold."""

    def close(self) -> None: ...


@dataclass
class Failure:
    """A seed for which something did not hold, and how it came to that."""

    seed: int
    what: str
    trace: list[str]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.what}", *self.trace])


def attempt(seed: int, world: type[Seeded], *, lines: int = 0) -> Failure | Counter[str]:
    """Run a seed; return how it failed, with the end of its trace, or what happened in it."""
    logging.disable(logging.CRITICAL)
    made = world(seed, traced=lines > 0)
    try:
        made.run()
    except Violation as error:
        return Failure(seed, str(error), list(made.trace)[-lines:] if lines else [])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.name}, {where.filename.rpartition('/')[2]}:{where.lineno}"
        what = f"{type(error).__name__}: {error} in {place}"
        return Failure(seed, what, list(made.trace)[-lines:] if lines else [])
    finally:
        made.close()
        logging.disable(logging.NOTSET)
    return made.seen

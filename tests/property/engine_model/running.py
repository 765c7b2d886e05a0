"""Run of one seed, and its result."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from dataclasses import dataclass

from tests.kit.memory import Violation
from tests.property.engine_model.world import World


@dataclass
class Failure:
    """A seed for which something did not hold, and how it came to that."""

    seed: int
    what: str
    trace: list[str]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.what}", *self.trace])


def attempt(seed: int, *, lines: int = 0) -> Failure | Counter[str]:
    """Run a seed; return how it failed, with the end of its trace, or what happened in it."""
    logging.disable(logging.CRITICAL)
    world = World(seed, traced=lines > 0)
    try:
        world.run()
    except Violation as error:
        return Failure(seed, str(error), list(world.trace)[-lines:] if lines else [])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.name}, {where.filename.rpartition('/')[2]}:{where.lineno}"
        what = f"{type(error).__name__}: {error} in {place}"
        return Failure(seed, what, list(world.trace)[-lines:] if lines else [])
    finally:
        logging.disable(logging.NOTSET)
    world.seen["steps"] = world.engine.steps
    return world.seen

"""Budget of the property tests: few fixed examples in each run of CI, and more in ``make full``.

``make full`` runs ``pytest tests/property --hypothesis-profile=thorough``, which tries twenty times
as much, with another seed in every run.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, seed, settings

THOROUGH = "thorough"
TIMES = 20

T = TypeVar("T")


def is_thorough() -> bool:
    """Tell whether more than CI's share was asked for."""
    return settings.get_current_profile_name() == THOROUGH


def budget(examples: int, *, steps: int = 50) -> settings:
    """Return the settings of a property.

    Args:
        examples: Tries in CI.
        steps: Most steps in each, for state machines.
    """
    return settings(
        max_examples=examples * (TIMES if is_thorough() else 1),
        stateful_step_count=steps,
        derandomize=not is_thorough(),
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def seeded(number: int, test: T) -> T:
    """Give a test, or a state machine, tries of its own that are the same in every run of CI."""
    return test if is_thorough() else seed(number)(test)  # type: ignore[type-var]

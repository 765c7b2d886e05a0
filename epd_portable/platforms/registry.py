"""Table of platforms, and of those that can be used here."""

from __future__ import annotations

import functools
import importlib

from epd_portable.errors import ConfigError, PlatformUnavailableError
from epd_portable.platforms.base import Availability, Platform
from epd_portable.platforms.traits import TRAITS


def availability(name: str) -> Availability:
    """Return whether a platform can be used in this process, with the reason.

    Raises:
        ConfigError: There is no platform of that name.
    """
    _check_name(name)
    problem = _torch_problem()
    if problem:
        return Availability(ok=False, reason=problem)
    try:
        platform = _load(name)
    except (ImportError, OSError) as error:
        return Availability(ok=False, reason=f"its module cannot be imported: {error}")
    return platform.availability()


def get(name: str) -> Platform:
    """Return a platform that was requested by name.

    Raises:
        ConfigError: There is no platform of that name.
        PlatformUnavailableError: It cannot be used here; the message has the reason.
    """
    state = availability(name)
    if not state.ok:
        raise PlatformUnavailableError(f"platform {name!r}: {state.reason}")
    return _load(name)


def _check_name(name: str) -> None:
    if name not in TRAITS:
        raise ConfigError(f"unknown platform {name!r}; choose one of {', '.join(TRAITS)}")


@functools.cache
def _torch_problem() -> str:
    """Return why torch cannot be imported; empty when it can.

    Cached: after a failure halfway, a second import fails for another, misleading reason.
    """
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        # RuntimeError: a device backend that torch loads itself is broken.
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        texts = dict.fromkeys(str(each).strip().partition("\n")[0] for each in causes)
        return f"torch cannot be imported: {': '.join(filter(None, texts))}"
    return ""


@functools.cache
def _load(name: str) -> Platform:
    module, _, attribute = TRAITS[name].implementation.partition(":")
    platform: Platform = getattr(importlib.import_module(module), attribute)()
    return platform

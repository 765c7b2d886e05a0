"""What ends when the instance goes down that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from epd_portable.errors import EPDError
from epd_portable.router.fleet.instances import Use


class WentDownError(EPDError):
    """An instance went down while something of it was waited for."""


@contextlib.contextmanager
def while_up(use: Use) -> Iterator[Use]:
    """Hold an instance in use, and end what is done meanwhile when it goes down.

    Args:
        use: From `Instance.working` or `Instance.held`.

    Raises:
        WentDownError: It has gone down; says why.
    """
    with anyio.CancelScope() as scope, use:
        use.on_down(scope.cancel)
        yield use
    if scope.cancelled_caught:
        raise WentDownError(f"went down: {use.instance.reason}")

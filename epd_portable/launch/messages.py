"""How commands end when something is wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import click

from epd_portable.errors import ConfigError, EPDError, PlatformUnavailableError, PortInUseError

BAD_INPUT = (ConfigError, PlatformUnavailableError, PortInUseError)


@contextlib.contextmanager
def messages(
    command: str = "epd-launch", *, bad_input: tuple[type[EPDError], ...] = BAD_INPUT
) -> Iterator[None]:
    """Turn errors raised on purpose into one message and an exit status.

    Args:
        command: Who says it.
        bad_input: Errors of what the user wrote: status 2. The others are 1.
    """
    try:
        yield
    except EPDError as error:
        click.echo(f"{command}: {error}", err=True)
        sys.exit(2 if isinstance(error, bad_input) else 1)

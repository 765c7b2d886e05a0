"""Options that several commands have."""

from __future__ import annotations

import click

from epd_portable.config.instance import PLATFORMS, platform_names


class PlatformType(click.ParamType):  # type: ignore[type-arg]  # none before click 8.2
    """A platform of this package, or of an installed one.

    Unlike `click.Choice` it does not list the choices before a name is met that is not built in:
    installed packages are looked at only then.
    """

    name = "platform"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return what ``--help`` shows; click before 8.2 gives no context."""
        return f"[{'|'.join(PLATFORMS)}|…]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name.

        Raises:
            click.BadParameter: There is no such platform.
        """
        # All names are asked for only where one is not built in.
        if value not in PLATFORMS and value not in platform_names():
            names = ", ".join(map(repr, platform_names()))
            self.fail(f"{value!r} is not one of {names}.", param, ctx)
        return value

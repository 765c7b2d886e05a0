"""Options of ``epd-bench`` that take more than a type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from epd_portable.bench.commands import TOKEN_BYTES
from epd_portable.config.quantities import parse_size
from epd_portable.connector import registry
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import TRAITS

F = TypeVar("F", bound=Callable[..., Any])


def read_sizes(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> list[int]:
    """Read sizes of items, with a binary unit if wanted; a callback of click.

    Raises:
        click.BadParameter: A size is not one of whole embeddings.
    """
    found = []
    for text in texts:
        try:
            nbytes = int(parse_size(text))
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        if nbytes <= 0 or nbytes % TOKEN_BYTES:
            raise click.BadParameter(
                f"{text} is not a positive multiple of {TOKEN_BYTES} bytes: items are made of "
                f"embeddings of that size; try {max(1, round(nbytes / TOKEN_BYTES)) * 4}KiB"
            )
        found.append(nbytes)
    return list(dict.fromkeys(found))


def choose_paths(
    asked: Sequence[str], platform: str, devices: int
) -> tuple[list[str], dict[str, str]]:
    """Return the transfer paths to measure.

    Args:
        asked: Paths; all that the platform has if empty.
        platform: Of both ends.
        devices: How many the platform has here.

    Returns:
        The paths, and those that nobody asked for and cannot be measured, with the reason.

    Raises:
        ConfigError: A path that was asked for cannot be measured.
    """
    described = registry.describe(platform, platform)
    reasons = {name: reason for name, usable, reason in described if not usable}
    for entry in registry.offered(registry.AUTO, platform):
        in_group = entry.capabilities.same_platform and not entry.capabilities.one_sided
        if in_group and TRAITS[platform].needs_device_copy and devices < 2:
            reasons[entry.name] = "each of the two ends of a group needs a device of its own"
    names = [entry.name for entry in registry.paths()]
    usable = [name for name in names if name not in reasons]
    for path in asked:
        if path in reasons:
            raise ConfigError(
                f"--path {path}: {reasons[path]}; on {platform} there are {', '.join(usable)} here"
            )
    return (list(dict.fromkeys(asked)), {}) if asked else (usable, reasons)


def file_options(command: F) -> F:
    """Add the options that say where results are kept."""
    file = click.Path(dir_okay=False, path_type=Path)
    command = click.option("--markdown", "markdown_file", type=file, help="Write the tables.")(
        command
    )
    return click.option("--json", "json_file", type=file, help="Write every sample and a summary.")(
        command
    )


def output_options(command: F) -> F:
    """Add `file_options`, and that of a picture."""
    file = click.Path(dir_okay=False, path_type=Path)
    drawn = click.option(
        "--png", "png_file", type=file, help="Draw charts; needs the extra 'bench'."
    )(command)
    return file_options(drawn)

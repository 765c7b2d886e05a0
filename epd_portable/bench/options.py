"""Options of ``epd-bench`` that take more than a type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from epd_portable.bench.commands import TOKEN_BYTES
from epd_portable.config.schema import parse_size

F = TypeVar("F", bound=Callable[..., Any])

MIN_PIXELS = 28
MAX_PIXELS = 4096


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


def read_pixels(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read sides of pictures, separated by commas; a callback of click.

    Raises:
        click.BadParameter: A side is no number, or too small or large for any model.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected pixels, as in 112,448") from error
    for side in found:
        if not MIN_PIXELS <= side <= MAX_PIXELS:
            raise click.BadParameter(f"{side} pixels: expected {MIN_PIXELS} to {MAX_PIXELS}")
    return found


def output_options(command: F) -> F:
    """Add the options that say where results are kept."""
    file = click.Path(dir_okay=False, path_type=Path)
    options = [
        click.option("--json", "json_file", type=file, help="Write every sample and a summary."),
        click.option("--markdown", "markdown_file", type=file, help="Write the tables."),
        click.option("--png", "png_file", type=file, help="Draw them; needs the extra 'bench'."),
    ]
    for option in reversed(options):
        command = option(command)
    return command

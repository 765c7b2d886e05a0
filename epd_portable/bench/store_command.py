"""``epd-bench store``: its options."""

from __future__ import annotations

from pathlib import Path

import click

from epd_portable.bench import console, report, store
from epd_portable.bench.options import file_options, read_sizes
from epd_portable.launch.commands.options import PlatformType

HELP = """Measure how long a load of an encoder output from a store takes.

Without engines, and with --config also with real ones, beside the time to encode.

\b
  epd-bench store --kind redis --bytes 4MiB
  epd-bench store --config configs/1e1pd.yaml --model shape

Exit status: 0; 1 when something failed; 2 on bad input.
"""


@click.command("store", help=HELP)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    default=("redis", "file"),
    show_default=True,
    type=click.Choice(["redis", "file"]),
    help="Kind of store; redis starts a redis-server. May be repeated.",
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=("256KiB", "1MiB", "4MiB", "16MiB", "64MiB"),
    show_default=True,
    callback=read_sizes,
    metavar="SIZE",
    help="Size of an item, as in 1MiB; may be repeated.",
)
@click.option(
    "--repeat",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Measured items of each size, and pictures of each --side.",
)
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Run redis-benchmark as a baseline, in turns with each size.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure real engines, too: this topology encodes pictures, is restarted, and loads them.",
)
@click.option(
    "--platform", default="cpu", show_default=True, type=PlatformType(), help="Of the topology."
)
@click.option("--model", help="Replaces the model of the topology file; 'shape' as in `load`.")
@click.option(
    "--side",
    "sides",
    multiple=True,
    default=(448, 896),
    show_default=True,
    type=click.IntRange(min=28, max=4096),
    help="Side of the pictures for the topology, in pixels; may be repeated.",
)
@file_options
def store_command(
    kinds: tuple[str, ...],
    sizes: list[int],
    repeat: int,
    peer: bool,
    config: Path | None,
    platform: str,
    model: str | None,
    sides: tuple[int, ...],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure loads from a store; users read `HELP`."""
    with console.stopping_at_sigterm():
        load_before = report.load_average()
        samples = store.measure(kinds, sizes, repeat=repeat, peer=peer, report=console.progress)
        engines: list[store.EngineSample] = []
        if config is not None:
            engines = store.measure_engines(
                config,
                platform=platform,
                model=model,
                sides=sides,
                repeat=repeat,
                kind=kinds[0],
                report=console.progress,
            )
        made = store.make_report(
            samples, engines, command=console.command(), load_before=load_before
        )
        console.finish(made, [], json_file, markdown_file, None)

"""Topologies on a Ray cluster: what ``up``, ``status`` and ``logs`` do there, and ``stop``."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import click

from epd_portable.errors import ConfigError
from epd_portable.launch.commands.command_line import json_option, show, stopping_at_sigterm
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.request import PlanRequest

F = TypeVar("F", bound=Callable[..., Any])

STOP_HELP = """End a topology on a Ray cluster: open requests have router.drain_s, nothing is left.

One that `up` runs in the foreground ends by Ctrl-C, or by SIGTERM to its launcher.

\b
  epd-launch stop --cluster auto
"""


def cluster_options(command: F) -> F:
    """Add ``--cluster`` and ``--name``."""
    address = click.option(
        "--cluster",
        metavar="ADDRESS",
        help="Of a Ray cluster: auto for the one that this machine is of, or ray://HOST:10001.",
    )
    name = click.option(
        "--name",
        default="epd",
        show_default=True,
        metavar="NAME",
        help="Of a topology on the cluster, where there are several.",
    )
    return address(name(command))


@contextlib.contextmanager
def on_cluster(address: str, name: str) -> Iterator[ModuleType]:
    """Connect to a cluster; yield `epd_portable.ray_cluster`."""
    # Else Ray prints what it learns of nodes among what a command prints, and ends at SIGTERM with
    # a dump, without what was started.
    os.environ.update(RAY_DEDUP_LOGS="1", RAY_DEDUP_LOGS_SKIP_REGEX=".")
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    try:
        ray_cluster = importlib.import_module("epd_portable.ray_cluster")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--cluster {address}: {error.name} is not installed; pip install 'epd-portable[ray]'"
        ) from error
    # Ray has set a handler of its own by then.
    with ray_cluster.connected(address, name), stopping_at_sigterm():
        yield ray_cluster


def up_on_cluster(
    request: PlanRequest, address: str, name: str, say: Callable[[Notice], None]
) -> None:
    """Start a topology there, and return when it is ready."""
    with on_cluster(address, name) as ray_cluster:
        url = ray_cluster.deploy(request, say)
    text = f"ready: {url}/v1; `epd-launch stop --cluster {address}` ends it"
    say(Notice("ready", text, {"url": f"{url}/v1"}))


@click.command(help=STOP_HELP)
@cluster_options
@json_option
def stop(cluster: str | None, name: str, as_json: bool) -> None:
    """End a topology on a cluster."""
    if cluster is None:
        raise ConfigError(
            "name the --cluster; Ctrl-C stops a topology of this machine, or SIGTERM to the "
            "launcher whose pid `epd-launch status` shows"
        )
    with on_cluster(cluster, name) as ray_cluster:
        ray_cluster.stop()
    show(f"{name} has ended", as_json=as_json, stopped=name)

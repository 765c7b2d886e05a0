"""``epd-launch secret``, ``join``, ``leave`` and ``instances``: who takes part in a deployment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

from epd_portable import envs
from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.launch.messages import messages
from epd_portable.launch.router_client import RouterClient

F = TypeVar("F", bound=Callable[..., Any])

SECRET_HELP = """Make FILE with a fresh secret that only you can read.

Name it as secret_file in the topology file, and copy it, mode 600, to every host that takes
part:

\b
  epd-launch secret ~/epd.secret
  epd-launch --platform cpu --config configs/1e1pd.yaml --set secret_file=~/epd.secret
"""

JOIN_HELP = """Let an instance that runs already join a router that serves already.

The router warms it up, and sends it clients' requests after that. Asking twice is asking once:

\b
  epd-launch join encode-7 --router http://10.0.0.1:8000 --secret-file ~/epd.secret \\
    --role encode --url http://10.0.0.2:20000
  epd-launch join pd-3 --router http://10.0.0.1:8000 --secret-file ~/epd.secret \\
    --role prefill-decode --url http://10.0.0.2:20001 --control tcp://10.0.0.2:20002

A router forgets at its end who has joined. With --keep the command stays beside the instance,
registers it again with a router that has restarted, and lets it leave at SIGTERM or Ctrl-C:
stop the instance when the command has ended.

Exit status: 0 when it is up (with --keep: has left), 1 when it is not, 2 on bad input.
"""

LEAVE_HELP = """Let an instance leave its router: no new work, and what is under way ends.

When the command has ended with status 0 the instance can be stopped and no request is lost:

\b
  epd-launch leave pd-3 --router http://10.0.0.1:8000 --secret-file ~/epd.secret
"""


def _router_options(command: F) -> F:
    options = [
        click.option(
            "--router", required=True, metavar="URL", help="The router, as in http://10.0.0.1:8000."
        ),
        click.option(
            "--secret-file",
            required=True,
            envvar=envs.EPD_SECRET_FILE.name,
            metavar="FILE",
            help="The deployment's secret, a copy of the router's secret_file.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(help=SECRET_HELP)
@click.argument("file")
def secret(file: str) -> None:
    """Make a secret file."""
    with messages():
        make_secret_file(file)
        click.echo(f"{file} holds a secret of 256 bits; keep it as you keep a private key")


@click.command(help=JOIN_HELP)
@click.argument("name")
@_router_options
@click.option("--role", type=click.Choice(("encode", "prefill-decode")), required=True)
@click.option("--url", required=True, help="The instance's server, as in http://10.0.0.2:20000.")
@click.option(
    "--control",
    default="",
    metavar="ADDRESS",
    help="Control channel of a prefill-decode instance, exactly as its control_address says: "
    "tcp://10.0.0.2:20001.",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    show_default=True,
    help="Seconds to wait until it is up; with --keep also until it has left.",
)
@click.option("--keep", is_flag=True, help="Stay, and keep it registered until stopped.")
def join(
    name: str,
    router: str,
    secret_file: str,
    role: str,
    url: str,
    control: str,
    timeout_s: float,
    keep: bool,
) -> None:
    """Register an instance at a router."""
    stop = threading.Event()
    if keep:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    with messages():
        client = RouterClient(router, Secret.read(secret_file))
        body = {"name": name, "role": role, "url": url, "control": control}
        seen = client.join(body, timeout_s=timeout_s, until=stop)
        problem = f"; serving all the same: {seen['problem']}" if seen["problem"] else ""
        if not stop.is_set():
            click.echo(f"{name} has joined {router}{problem}")
        if keep:
            client.keep(body, until=stop, say=click.echo)
            client.leave(name, timeout_s=timeout_s)
            click.echo(f"{name} has left {router}")


@click.command(help=LEAVE_HELP)
@click.argument("name")
@_router_options
@click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    show_default=True,
    help="Seconds to wait until what it works on has ended.",
)
def leave(name: str, router: str, secret_file: str, timeout_s: float) -> None:
    """Let an instance leave its router."""
    with messages():
        RouterClient(router, Secret.read(secret_file)).leave(name, timeout_s=timeout_s)
        click.echo(f"{name} has left {router}")


@click.command()
@_router_options
def instances(router: str, secret_file: str) -> None:
    """Show the instances of a router: their states, and what they work on."""
    with messages():
        for seen in RouterClient(router, Secret.read(secret_file)).instances():
            why = seen["reason"] or seen["problem"]
            click.echo(
                f"{seen['name']:24} {seen['role']:16} {seen['state']:9} "
                f"{seen['in_flight']:4} in flight  {seen['url']}{why and '  ' + why}"
            )

"""``epd-launch secret``, ``join``, ``leave``, ``instances``: who takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

from epd_portable.config.roles import ROLES
from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.errors import ConfigError
from epd_portable.launch.commands.command_line import SECONDS, address, json_option, show
from epd_portable.launch.run.router_client import RouterClient

F = TypeVar("F", bound=Callable[..., Any])

SECRET_HELP = """Write a new secret to FILE, readable by you only.

Name FILE as secret_file in the topology file, and copy it, mode 600, to every host that takes
part:

\b
  epd-launch secret ~/epd.secret
  epd-launch --platform cpu --config configs/1e1pd.yaml --set secret_file=~/epd.secret
"""

JOIN_HELP = """Register a running instance with a running router.

The router warms it up, and then sends it clients' requests. The command is idempotent:

\b
  epd-launch join encode-7 --router http://10.0.0.1:8000 --secret-file ~/epd.secret \\
    --role encode --url http://10.0.0.2:20000
  epd-launch join pd-3 --router http://10.0.0.1:8000 --secret-file ~/epd.secret \\
    --role prefill-decode --url http://10.0.0.2:20001 --control tcp://10.0.0.2:20002

A restarted router does not know what had joined: run the command again, or start the instance by
a launcher with router.join, which keeps it registered.

Exit status: 0 when the instance is up, 1 when it is not, 2 on bad input.
"""

LEAVE_HELP = """Take an instance out of its router: it gets no new requests and finishes its own.

When the command has ended with status 0, the instance can be stopped and no request is lost:

\b
  epd-launch leave pd-3 --router http://10.0.0.1:8000 --secret-file ~/epd.secret
"""

INSTANCES_HELP = """Show the instances of a router: states, requests in flight, why one is down.

\b
  epd-launch instances --router http://10.0.0.1:8000 --secret-file ~/epd.secret
"""


def _router_options(command: F) -> F:
    router = click.option(
        "--router",
        required=True,
        metavar="URL",
        callback=address("http", "https"),
        help="The router, as in http://10.0.0.1:8000.",
    )
    secret_file = click.option(
        "--secret-file",
        required=True,
        metavar="FILE",
        help="The deployment's secret, a copy of the router's secret_file.",
    )
    return router(secret_file(command))


def _timeout_option(what: str) -> Callable[[F], F]:
    return click.option(
        "--timeout",
        "timeout_s",
        default=600.0,
        show_default=True,
        type=SECONDS,
        metavar="SECONDS",
        help=f"Longest wait until {what}.",
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ConfigError(f"--label {text!r}: write it as key=value")
    return key, value


@click.command(help=SECRET_HELP)
@click.argument("file")
@json_option
def secret(file: str, as_json: bool) -> None:
    """Make a secret file."""
    make_secret_file(file)
    text = f"{file} holds a secret of 256 bits; keep it as you keep a private key"
    show(text, as_json=as_json, secret_file=file)


@click.command(help=JOIN_HELP)
@click.argument("name")
@_router_options
@click.option(
    "--role", type=click.Choice(ROLES), required=True, help="Stages that the instance has."
)
@click.option(
    "--url",
    required=True,
    metavar="URL",
    callback=address("http", "https"),
    help="The instance's server, as in http://10.0.0.2:20000.",
)
@click.option(
    "--control",
    default="",
    metavar="ADDRESS",
    callback=address("tcp"),
    help="Control channel, for every role but encode: exactly the control_address of the "
    "instance's settings, as in tcp://10.0.0.2:20001.",
)
@click.option(
    "--weight",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True, max=1000),
    help="Share of the load, relative to others of its role: 2 gets twice as much.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Label for the filters of router.choice, as in zone=east; may be repeated.",
)
@_timeout_option("it is up")
@json_option
def join(
    name: str,
    router: str,
    secret_file: str,
    role: str,
    url: str,
    control: str,
    weight: float,
    labels: tuple[str, ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Register an instance at a router."""
    if role == "encode" and control:
        raise ConfigError("--control: encode instances have no control channel; leave it out")
    if role != "encode" and not control:
        raise ConfigError(
            f"--control is missing: a {role} instance has a control channel, whose address its "
            "control_address says, as tcp://10.0.0.2:20001"
        )
    body: dict[str, Any] = {"name": name, "role": role, "url": url, "control": control}
    if weight != 1:
        body["weight"] = weight
    if labels:
        body["labels"] = dict(map(_label, labels))
    client = RouterClient(router, Secret.read(secret_file))
    client.register(body)
    seen = client.wait_up(name, timeout_s=timeout_s, until=threading.Event())
    problem = f"; serving all the same: {seen['problem']}" if seen["problem"] else ""
    show(f"{name} has joined {router}{problem}", as_json=as_json, instance=seen)


@click.command(help=LEAVE_HELP)
@click.argument("name")
@_router_options
@_timeout_option("its requests have ended")
@json_option
def leave(name: str, router: str, secret_file: str, timeout_s: float, as_json: bool) -> None:
    """Let an instance leave its router."""
    RouterClient(router, Secret.read(secret_file)).leave(name, timeout_s=timeout_s)
    show(f"{name} has left {router}", as_json=as_json, left=name)


@click.command(help=INSTANCES_HELP)
@_router_options
@json_option
def instances(router: str, secret_file: str, as_json: bool) -> None:
    """Show the instances of a router."""
    found = RouterClient(router, Secret.read(secret_file)).instances()
    lines = [
        f"{seen['name']:24} {seen['role']:16} {seen['state']:9} {seen['in_flight']:4} in flight  "
        f"{seen['url']}  {seen['reason'] or seen['problem']}".rstrip()
        for seen in found
    ]
    show("\n".join(lines), as_json=as_json, instances=found)

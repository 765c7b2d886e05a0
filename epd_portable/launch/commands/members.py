"""``epd-launch secret`` and ``instances``: members of a deployment."""

from __future__ import annotations

import click

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.launch.commands.command_line import address, json_option, show
from epd_portable.launch.run.front_client import FrontClient

SECRET_HELP = """Write a new secret to FILE, readable by you only.

Name FILE as secret_file in the topology file, and copy it, mode 600, to every host that takes
part:

\b
  epd-launch secret ~/epd.secret
  epd-launch --platform cpu --config configs/1e1pd.yaml --set secret_file=~/epd.secret
"""

INSTANCES_HELP = """Show the instances of a front: states, requests in flight, why one is down.

\b
  epd-launch instances --front http://10.0.0.1:8000 --secret-file ~/epd.secret
"""


@click.command(help=SECRET_HELP)
@click.argument("file")
@json_option
def secret(file: str, as_json: bool) -> None:
    """Make a secret file."""
    make_secret_file(file)
    text = f"{file} holds a secret of 256 bits; keep it as you keep a private key"
    show(text, as_json=as_json, secret_file=file)


@click.command(help=INSTANCES_HELP)
@click.option(
    "--front",
    required=True,
    metavar="URL",
    callback=address("http", "https"),
    help="The front, as in http://10.0.0.1:8000.",
)
@click.option(
    "--secret-file",
    required=True,
    metavar="FILE",
    help="The deployment's secret, a copy of the front's secret_file.",
)
@json_option
def instances(front: str, secret_file: str, as_json: bool) -> None:
    """Show the instances of a front."""
    found = FrontClient(front, Secret.read(secret_file)).instances()
    lines = [
        f"{seen['name']:24} {seen['role']:16} {seen['state']:9} {seen['in_flight']:4} in flight  "
        f"{seen['url']}  {seen['reason'] or seen['problem']}".rstrip()
        for seen in found
    ]
    show("\n".join(lines), as_json=as_json, instances=found)

"""The command ``epd-launch``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from epd_portable.config.document import dotted
from epd_portable.config.folders import temp_folder
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.load import Check
from epd_portable.config.roles import DUTIES, ROLES, Role
from epd_portable.config.secret import Secret, make_secret_file, read_secret_file
from epd_portable.errors import ConfigError
from epd_portable.launch.commands import gateway, status
from epd_portable.launch.commands.command_line import (
    FAILED,
    PORT,
    CommandLine,
    ServerUrl,
    json_lines_option,
    json_option,
    printer,
    show,
    topology_options,
)
from epd_portable.launch.environment import new_run_id, run_secret_file
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.advice import Traffic, advice_rows, ways
from epd_portable.launch.plan.check import findings_table, inspect, inspect_environment
from epd_portable.launch.plan.file_checks import fronts_to_join, named_files
from epd_portable.launch.plan.machine import probed_machine
from epd_portable.launch.plan.processes import columns, plan_table
from epd_portable.launch.plan.request import PlanRequest, python_of, refusals, store_warnings
from epd_portable.launch.run.fronts import FrontClient
from epd_portable.launch.run.logs import make_private_folder, use_log_folder
from epd_portable.launch.run.running import RUN_FOLDER
from epd_portable.launch.run.supervisor import Supervisor
from epd_portable.platforms.traits import TRAITS

HELP = """Run a multimodal model as separate encode and prefill+decode instances of vLLM.

One encode and one prefill+decode instance on a CPU, with the bundled model; the same on NVIDIA or
Ascend, with another model and port; three prefill+decode instances, bytes over TCP:

  epd-launch --platform cpu --config configs/1e1pd.yaml
  epd-launch --platform cuda --config configs/1e1pd.yaml --model Qwen/Qwen2.5-VL-3B-Instruct
  epd-launch --platform npu --config configs/1e1pd.yaml --port 9000
  epd-launch --platform cpu --config configs/1e1pd.yaml \\
    --set instances.prefill_decode.count=3 --set transfer.path=tcp

Each command has examples of its own: epd-launch COMMAND --help.

`up` is the command when none is named; `epd-launch up --help` lists its options. It runs in the
foreground until Ctrl-C or SIGTERM; then the front finishes open requests and the instances end. A
second Ctrl-C ends everything at once.
"""
main = CommandLine(name="epd-launch", help=HELP, default="up")
"""The command ``epd-launch``."""

for _command in (gateway.gateway, status.status, status.logs):
    main.add_command(_command)


_port_option = click.option("--port", type=PORT, metavar="N", help="Short for --set front.port=N.")
_log_dir_option = click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for one log file per process. By default a temporary folder, which is removed "
    "after a stop by Ctrl-C or SIGTERM and kept after a failure.",
)


@main.command()
@topology_options
@_port_option
@_log_dir_option
@json_lines_option
def up(log_dir: Path | None, as_json: bool, **options: Any) -> None:
    """Start the topology, and serve until Ctrl-C or SIGTERM.

    At a stop open requests have front.drain_s seconds to end; a second signal cuts them. A terminal
    that is closed is a stop, unless the launcher runs under nohup.

    With --json every line of standard output is an object with schema_version, time, event, text
    and the event's own fields. The last event is stopped, or error. All events: the page
    'Operating' of the documentation.

      epd-launch up --platform cpu --config configs/1e1pd.yaml --port 8000 --log-dir logs

    Exit status: 0 when a stop was requested, 1 when a process did not start, 2 on bad input.
    """
    _serve(PlanRequest.from_options(**options), log_dir, as_json=as_json)


@main.command()
@topology_options
@click.option(
    "--role",
    type=click.Choice([role for role in ROLES if DUTIES[role] != "decode"]),
    default="encode",
    help="What it does for the fronts.",
)
@_log_dir_option
@json_lines_option
def engine(role: Role, log_dir: Path | None, as_json: bool, **options: Any) -> None:
    r"""Start one engine that joins fronts on other machines.

    The file has launch.join and secret_file. One engine of --role is started, regardless of
    its counts; its name ends in launch.host. Engines that prefill do so for decode instances of the
    fronts. At Ctrl-C or SIGTERM it leaves the fronts, has front.drain_s seconds for its open jobs,
    and ends.

      epd-launch engine --platform cpu --config configs/1e1pd.yaml \
        --set secret_file=~/epd.secret --set launch.host=auto \
        --set launch.join=http://10.0.0.1:8000

    Output, log files and exit status are those of `up`.
    """
    request = PlanRequest.from_options(alone=role, **options)
    _serve(request, log_dir, fronts_to_join, as_json=as_json)


def _serve(request: PlanRequest, log_dir: Path | None, *checks: Check, as_json: bool) -> None:
    """Run a plan in the foreground."""
    topology = request.load(*checks, named_files)
    run_id = new_run_id()
    machine = probed_machine(request.traits, os.environ)
    encoders = None
    if topology.encodes_apart:
        traits = request.for_encode(topology).traits
        encoders = probed_machine(traits, os.environ, python_of(topology))
    temp_dir = _temp_dir(run_id)
    plan = request.plan(topology, run_id, machine, temp_dir=str(temp_dir), encode_machine=encoders)
    refused = refusals(topology, plan)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        lines = "".join(f"\n  {error}" for error in refused)
        raise ConfigError(f"{len(refused)} problems of this machine{lines}")
    say = printer(as_json=as_json)
    for warning in (*plan.warnings, *store_warnings(topology.store)):
        say(Notice("warning", warning))
    logs = log_dir or Path(f"{temp_dir}-logs")
    use_log_folder(logs)
    names = [spec.name for spec in plan.processes]
    say(
        Notice(
            "starting",
            f"starting {', '.join(names)} on {plan.platform}; logs in {logs}",
            {
                "run_id": run_id,
                "platform": plan.platform,
                "model": plan.model,
                "instances": names,
                "logs": str(logs.absolute()),
            },
        )
    )
    with _run_folder(temp_dir, topology.secret_file):
        Supervisor(
            plan,
            topology.launch,
            secret=Secret.read(run_secret_file(str(temp_dir))),
            drain_s=topology.front.drain_s,
            log_dir=logs,
            temp_dir=temp_dir,
            say=say,
            config=str(request.config),
        ).run()
    if log_dir is None:
        shutil.rmtree(logs)


@main.command()
@topology_options
@_port_option
@click.option(
    "--advise",
    metavar="NAME=NUMBER,...",
    help="Compare ways to use the devices of the plan: ms of encode (an image), prefill (a prompt) "
    "and token (a step by its requests), images and output tokens of a request, optionally remote "
    "(ms of an image elsewhere) and rate (requests a second).",
)
@json_option
def plan(advise: str | None, as_json: bool, **options: Any) -> None:
    r"""Show the processes that would be started.

    It needs no device, and starts nothing. With --hardware it plans for the devices of that
    profile, regardless of this machine. What `up` would refuse here, such as a port in use, is a
    warning.

      epd-launch plan --platform cuda --config configs/1e3pd.yaml --set transfer.path=shm
      epd-launch plan --hardware h200 --config configs/h200-8.yaml \
        --advise encode=16,prefill=9,token=0.11,output=128,images=0.5
    """
    request = PlanRequest.from_options(**options)
    topology = request.load()
    run_id, machine = new_run_id(), request.expected_machine(os.environ)
    temp_dir = str(_temp_dir(run_id))
    # Ports are chosen again at a start, and the host may be another machine.
    result = request.plan(topology, run_id, machine, temp_dir=temp_dir, free=lambda *_: True)
    warnings = [*result.warnings]
    if not request.hardware:
        # A machine that is not here has other files and ports.
        missing = named_files(topology.model_dump())
        refused = [f"{dotted(path)}: {problem}" for path, problem in missing]
        refused += map(str, refusals(topology, result))
        warnings += [f"up refuses this here: {problem}" for problem in refused]
        warnings += store_warnings(topology.store)
    result = dataclasses.replace(result, warnings=tuple(warnings))
    for warning in () if as_json else warnings:
        printer(as_json=False)(Notice("warning", warning))
    text, content = plan_table(result), result.as_json()
    if advise:
        traffic = Traffic.read(advise)
        engines = [spec for spec in result.processes if spec.role != "front"]
        found = ways(traffic, len(result.devices) or sum(len(spec.cores) or 1 for spec in engines))
        text += "\n\n" + "\n".join(columns(advice_rows(found, traffic)))
        content["advice"] = [dataclasses.asdict(way) for way in found]
    show(text, as_json=as_json, **content)


@main.command()
@click.option(
    "--platform", type=click.Choice(PLATFORMS), help="Check this platform only.  [default: all]"
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Topology file: the environment of its encode instances is checked too.",
)
@json_option
def check(platform: str | None, config: Path | None, as_json: bool) -> None:
    """Show which platforms, devices and paths can be used.

    Of each that cannot, the reason.

      epd-launch check
      epd-launch check --platform npu --config configs/1e1pd.yaml

    Exit status: 0 when a platform can be used (with --platform: that one; with --config: each that
    the file needs), otherwise 1; 2 on bad input.
    """
    findings = inspect([platform] if platform else list(TRAITS))
    if config:
        request = PlanRequest.from_options(platform=platform, config=config)
        topology = request.load()
        if topology.encodes_apart:
            encode = request.for_encode(topology).traits.name
            findings += inspect_environment(python_of(topology), encode)
    found = [dataclasses.asdict(finding) for finding in findings]
    show(findings_table(findings), as_json=as_json, findings=found)
    usable = [finding.usable for finding in findings if finding.kind == "platform"]
    if not (all(usable) if config else any(usable)):
        sys.exit(FAILED)


@main.command()
@click.argument("file")
@json_option
def secret(file: str, as_json: bool) -> None:
    """Write a new secret to FILE, readable by you only.

    Name FILE as secret_file in the topology file, and copy it, mode 600, to every host that takes
    part:

      epd-launch secret ~/epd.secret
      epd-launch --platform cpu --config configs/1e1pd.yaml --set secret_file=~/epd.secret
    """
    make_secret_file(file)
    text = f"{file} holds a secret of 256 bits; keep it as you keep a private key"
    show(text, as_json=as_json, secret_file=file)


@main.command()
@click.option(
    "--front",
    required=True,
    metavar="URL",
    type=ServerUrl(),
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
    """Show the instances of a front, and why one is down.

    For each the state, the requests in flight and the last problem with another instance.

      epd-launch instances --front http://10.0.0.1:8000 --secret-file ~/epd.secret
    """
    found = asyncio.run(FrontClient(front, Secret.read(secret_file)).instances())
    lines = [
        f"{seen['name']:24} {seen['role']:16} {seen['state']:9} {seen['in_flight']:4} in flight  "
        f"{seen['url']}  {seen['reason'] or seen['problem']}".rstrip()
        for seen in found
    ]
    show("\n".join(lines), as_json=as_json, instances=found)


def _temp_dir(run_id: str) -> Path:
    return temp_folder() / f"{RUN_FOLDER}{run_id}"


@contextlib.contextmanager
def _run_folder(path: Path, secret_file: str | None) -> Iterator[None]:
    """Make the folder of a run with its secret, for this user only, and remove it at the end.

    A file of the user's is copied: it may be replaced, and a process that is restarted then has to
    have the secret of the others.
    """
    make_private_folder(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Cleaners of temporary folders leave a locked one alone: a process that is restarted after
        # days needs the secret.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        given = read_secret_file(secret_file) if secret_file else ""
        make_secret_file(run_secret_file(str(path)), given)
        yield
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()

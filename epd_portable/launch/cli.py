"""The command ``epd-launch``."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from epd_portable import envs
from epd_portable.config.instance import PlatformName
from epd_portable.config.load import PLATFORMS, load_topology
from epd_portable.config.schema import Topology
from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.errors import ConfigError
from epd_portable.launch import members
from epd_portable.launch.check import inspect, planned
from epd_portable.launch.machine import (
    assumed_machine,
    described_machine,
    probed_machine,
    require_shm,
)
from epd_portable.launch.messages import messages
from epd_portable.launch.model import resolve_model
from epd_portable.launch.plan import Machine, Plan, make_plan, new_run_id, run_secret_file
from epd_portable.launch.ports import port_source, require_free
from epd_portable.launch.private_files import make_private_folder, use_log_folder
from epd_portable.launch.show import findings_table, plan_table
from epd_portable.launch.supervisor import Supervisor
from epd_portable.launch.target import Target, find_hardware, find_target, require_platform
from epd_portable.platforms.traits import PlatformTraits

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_COMMAND = "up"


class _Group(click.Group):
    """A group whose command may be left out before the options: it is then ``up``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "--version"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


def _topology_options(command: F) -> F:
    options = [
        click.option(
            "--platform",
            type=click.Choice(PLATFORMS),
            envvar=envs.EPD_PLATFORM.name,
            help="What the instances run on; may be left out with --hardware.",
        ),
        click.option(
            "--hardware",
            metavar="PROFILE",
            help="Hold the plan against a hardware profile: a name in the folder hardware beside "
            "the topology file or in configs/hardware, for example 910b-64g, or a file.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            required=True,
            metavar="FILE",
            help="Topology file, for example configs/1e1pd.yaml.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Replace one key of the file, as in transfer.path=tcp; may be repeated.",
        ),
        click.option("--model", metavar="M", help="Short for --set model=M."),
        click.option(
            "--port",
            type=click.IntRange(1, 65535),
            metavar="N",
            help="Short for --set router.port=N.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


HELP = """Run a multimodal model as separate encode and prefill+decode instances of vLLM.

\b
Start one encode and one prefill+decode instance on a CPU, with the bundled model:
  epd-launch --platform cpu --config configs/1e1pd.yaml
The same on NVIDIA or Ascend, with another model and port:
  epd-launch --platform cuda --config configs/1e1pd.yaml --model Qwen/Qwen2.5-VL-3B-Instruct
  epd-launch --platform npu --config configs/1e1pd.yaml --port 9000
Three prefill+decode instances, bytes over TCP:
  epd-launch --platform cpu --config configs/1e1pd.yaml \\
    --set instances.prefill_decode.count=3 --set transfer.path=tcp
See what would be started, and what this machine can do:
  epd-launch plan --platform npu --config configs/1e1pd.yaml
  epd-launch check
Plan for a machine that is not here:
  epd-launch plan --hardware 910b-64g --config configs/1e1pd.yaml
Let instances join and leave a router that serves, with a secret that both sides hold:
  epd-launch secret ~/epd.secret
  epd-launch join --help

It runs in the foreground until Ctrl-C or SIGTERM; then the router ends what is open, the instances
end, and nothing is left. A second Ctrl-C ends it at once. SIGHUP starts the instances again, one
after the other, without losing a request: for a new version of what they run. `up` is the command
when none is named; `epd-launch up --help` lists its options.
"""
"""The page of ``epd-launch --help``; a line of ``\\b`` keeps the lines of its paragraph."""


@click.group(
    help=HELP, cls=_Group, no_args_is_help=True, context_settings={"max_content_width": 100}
)
@click.version_option(package_name="epd-portable")
def main() -> None:
    """Run the command ``epd-launch``."""


@main.command()
@_topology_options
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep one log file a process here. By default logs are in a temporary folder that is "
    "removed when a stop was asked for, and kept when something failed.",
)
def up(
    platform: str | None,
    hardware: str | None,
    config: Path,
    overrides: tuple[str, ...],
    model: str | None,
    port: int | None,
    log_dir: Path | None,
) -> None:
    """Start the topology, serve in the foreground, stop on Ctrl-C or SIGTERM.

    At a stop open requests have router.drain_s seconds to end; a second signal ends that. SIGHUP
    updates the instances: one after the other gets no more requests, ends when it has answered
    those that it has, is started again, and serves again before the next one's turn. When the
    terminal is closed, SIGHUP is a stop.

    Exit status: 0 when a stop was asked for, 1 when a process did not start, 2 on bad input.
    """
    with messages():
        target = find_target(platform, hardware, config)
        topology = _load(target.traits, config, overrides, model, port)
        if topology.secret_file is not None:
            Secret.read(topology.secret_file)
        run_id = new_run_id()
        plan = _plan(topology, target, run_id, probed_machine(target.traits, os.environ))
        require_free(topology.router.port, topology.router.host)
        require_shm(topology.transfer.pool_bytes, topology.instances.prefill_decode.count)
        _warn(plan)
        logs = log_dir or Path(f"{_temp_dir(run_id)}-logs")
        use_log_folder(logs)
        names = ", ".join(spec.name for spec in plan.processes)
        click.echo(f"starting {names} on {plan.platform}; logs in {logs}")
        with _run_folder(_temp_dir(run_id), make_secret=topology.secret_file is None) as folder:
            Supervisor(
                plan,
                topology.launch,
                secret=Secret.read(topology.secret_file or run_secret_file(str(folder))),
                drain_s=topology.router.drain_s,
                log_dir=logs,
                temp_dir=folder,
                say=click.echo,
            ).run()
        if log_dir is None:
            shutil.rmtree(logs)


@main.command()
@_topology_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(
    platform: str | None,
    hardware: str | None,
    config: Path,
    overrides: tuple[str, ...],
    model: str | None,
    port: int | None,
    as_json: bool,
) -> None:
    """Show the processes that would be started; needs no device and starts nothing.

    With --hardware it plans for the devices of that profile, whatever this machine has.
    """
    with messages():
        target = find_target(platform, hardware, config)
        topology = _load(target.traits, config, overrides, model, port)
        if target.hardware:
            machine = described_machine(target.hardware.profile.devices_per_node.value)
        else:
            machine = assumed_machine(target.traits, os.environ)
        result = _plan(topology, target, new_run_id(), machine)
        if not as_json:
            _warn(result)
        click.echo(json.dumps(result.as_json(), indent=2) if as_json else plan_table(result))


@main.command()
@click.option("--platform", type=click.Choice(PLATFORMS), help="Look at this platform only.")
@click.option(
    "--hardware",
    metavar="PROFILE",
    help="Compare the devices with a hardware profile: a name in configs/hardware, or a file.",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Say what this topology asks too much of, such as CPU cores; needs --platform.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check(platform: str | None, hardware: str | None, config: Path | None, as_json: bool) -> None:
    """Say which platforms, devices and transfer paths can be used here, and why others cannot.

    Exit status: 0 when the platform, or any platform, can be used, and with --hardware is what the
    profile says; otherwise 1; 2 on bad input. What a topology asks too much of is a warning.
    """
    with messages():
        expected = find_hardware(hardware) if hardware else None
        if expected:
            require_platform(expected, platform)
            platform = expected.profile.platform
        if config is not None and platform is None:
            raise ConfigError(f"--config {config}: name the --platform that it is planned for")
        findings = inspect([platform] if platform else list(PLATFORMS), expected)
        if config is not None and platform is not None:
            target = find_target(cast("PlatformName", platform), None, config)
            topology = _load(target.traits, config, (), None, None)
            machine = assumed_machine(target.traits, os.environ)
            plan = _plan(topology, target, new_run_id(), machine)
            findings.append(planned(config.name, plan.warnings))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(findings_table(findings))
    platforms = [finding.usable for finding in findings if finding.kind == "platform"]
    compared = [finding.usable for finding in findings if finding.kind == "hardware"]
    if not any(platforms) or not all(compared):
        sys.exit(1)


def _load(
    traits: PlatformTraits,
    config: Path,
    overrides: tuple[str, ...],
    model: str | None,
    port: int | None,
) -> Topology:
    shortcuts = []
    if model is not None:
        shortcuts.append(f"model={json.dumps(model)}")
    if port is not None:
        shortcuts.append(f"router.port={port}")
    name = cast("PlatformName", traits.name)
    return load_topology(config, name, overrides=[*overrides, *shortcuts])


def _plan(topology: Topology, target: Target, run_id: str, machine: Machine) -> Plan:
    avoid = target.hardware.profile.ports_to_avoid if target.hardware else ()
    return make_plan(
        topology,
        model=resolve_model(topology.model, served_name=topology.served_model_name),
        traits=target.traits,
        machine=machine,
        run_id=run_id,
        free_port=port_source(
            run_id,
            reserved=frozenset({topology.router.port, *avoid}),
            host=topology.launch.host,
        ),
        temp_dir=str(_temp_dir(run_id)),
        hardware=target.hardware,
    )


def _temp_dir(run_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"epd-{run_id}"


@contextlib.contextmanager
def _run_folder(path: Path, *, make_secret: bool) -> Iterator[Path]:
    """Make the folder of a run, for nobody but this user, and remove it at the end."""
    make_private_folder(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # What cleans temporary folders of old files leaves a locked one alone: a process that is
        # started again after days needs the secret.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if make_secret:
            make_secret_file(run_secret_file(str(path)))
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def _warn(plan: Plan) -> None:
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)


for _member_command in (members.secret, members.join, members.leave, members.instances):
    main.add_command(_member_command)


if __name__ == "__main__":
    main()

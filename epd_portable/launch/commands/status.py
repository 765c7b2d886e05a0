"""``epd-launch status`` and ``logs``: what runs on this machine, and what it logs."""

from __future__ import annotations

import datetime
import os

import click

from epd_portable.config.folders import temp_folder
from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.commands.command_line import json_option, show
from epd_portable.launch.plan.processes import columns, ports_text
from epd_portable.launch.run.running import RunRecord, find_runs


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show your topologies on this machine, and their processes.

    It reads what each launcher that runs writes into the folder of its run. It sees launchers of
    the same user and temporary folder (TMPDIR) only.

    Exit status: 0 when one runs, 1 when none does.
    """
    runs = find_runs(temp_folder())
    text = "\n\n".join(map(run_table, runs)) or "no topology of yours runs here"
    show(text, as_json=as_json, runs=[run.model_dump(mode="json") for run in runs])
    if not runs:
        raise SystemExit(1)


@click.command()
@click.argument("instance", required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the logs until the topology ends or Ctrl-C."
)
@click.option(
    "-n", "--lines", default=20, type=click.IntRange(0, 100_000),
    help="Lines to show from the end of each log.",
)  # fmt: skip
@click.option(
    "--run", "run_id", metavar="RUN", help="Which topology, where several run: its id in `status`."
)
def logs(instance: str | None, follow: bool, lines: int, run_id: str | None) -> None:
    """Show the end of the logs of a running topology, or of INSTANCE.

    They are shown by `tail`: with several files each part begins with the path of its file.

      epd-launch logs -f encode-0
      epd-launch logs -n 100 front
    """
    run = _choose_run(run_id)
    files = {each.name: each.log for each in run.processes}
    if instance is not None and instance not in files:
        raise ConfigError(
            f"run {run.run_id} has no process {instance}; there are {', '.join(files)}"
        )
    wanted = [*files.values()] if instance is None else [files[instance]]
    following = ["-F", f"--pid={run.pid}"] if follow else []
    os.execvp("tail", ["tail", f"--lines={lines}", *following, "--", *wanted])


def _choose_run(run_id: str | None) -> RunRecord:
    """Return the run that is meant."""
    runs = {run.run_id: run for run in find_runs(temp_folder())}
    if run_id is None and len(runs) > 1:
        raise ConfigError(f"several topologies run: choose one with --run, of {', '.join(runs)}")
    run = next(iter(runs.values()), None) if run_id is None else runs.get(run_id)
    if run is None:
        raise LaunchError(
            "no topology of yours runs here" if run_id is None else f"run {run_id} does not run"
        )
    return run


def run_table(run: RunRecord) -> str:
    """Return lines about a run, its launcher and each of its processes."""
    head = f"run {run.run_id}: {run.phase}, {run.url}, model {run.model}, {run.platform}"
    if run.config:
        head += f", {run.config}"
    launcher = f"launcher pid {run.pid}, up {_duration(run.uptime_s)}"
    rows = [("process", "role", "state", "pid", "up", "restarts", "url", "ports", "log")]
    rows += [
        (
            *(each.name, each.role, each.state, str(each.pid or "-")),
            _duration(each.uptime_s),
            *(str(each.restarts), each.url, ports_text(each.ports, without="http") or "-"),
            each.log,
        )
        for each in run.processes
    ]
    problems = [f"{each.name}: {each.problem}" for each in run.processes if each.problem]
    return "\n".join([head, launcher, *columns(rows), *problems])


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))

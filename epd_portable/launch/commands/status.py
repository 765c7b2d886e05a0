"""``epd-launch status`` and ``logs``: what runs on this machine, and what it says."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import click

from epd_portable.config.folders import temp_folder
from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.commands.command_line import (
    json_lines_option,
    json_option,
    one_line,
    show,
)
from epd_portable.launch.plan.text import columns, ports_text
from epd_portable.launch.run.logs import Tail
from epd_portable.launch.run.running import RunRecord, find_runs

_LOOK_EVERY_S = 0.3


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show your topologies that run on this machine, with all their processes.

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
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until Ctrl-C.")
@click.option(
    "-n", "--lines", default=20, show_default=True, type=click.IntRange(0, 100_000),
    help="Lines to show from the end of each log.",
)  # fmt: skip
@click.option(
    "--run", "run_id", metavar="RUN", help="Which topology, where several run: its id in `status`."
)
@json_lines_option
def logs(instance: str | None, follow: bool, lines: int, run_id: str | None, as_json: bool) -> None:
    """Show the end of the logs of a running topology, of all processes or of INSTANCE.

      epd-launch logs -f encode-0
      epd-launch logs -n 100 front

    With --json each line is an object with schema_version, instance and text.
    """
    run = _choose_run(run_id)
    tails = {each.name: Tail(Path(each.log)) for each in run.processes}
    if instance is not None:
        if instance not in tails:
            raise ConfigError(
                f"run {run.run_id} has no process {instance}; there are {', '.join(tails)}"
            )
        tails = {instance: tails[instance]}

    def show_lines(name: str, found: list[str]) -> None:
        for line in found:
            if as_json:
                click.echo(one_line(instance=name, text=line))
            else:
                click.echo(f"{name}: {line}" if len(tails) > 1 else line)

    for name, tail in tails.items():
        show_lines(name, tail.last(lines))
    goes_on = follow
    while goes_on:
        # Looked up before the last read, so that everything until its end is shown.
        goes_on = run.run_id in {each.run_id for each in find_runs(temp_folder())}
        for name, tail in tails.items():
            show_lines(name, tail.new())
        time.sleep(_LOOK_EVERY_S if goes_on else 0.0)
    if follow:
        click.echo(f"run {run.run_id} has ended", err=True)


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

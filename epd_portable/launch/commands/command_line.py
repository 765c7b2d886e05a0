"""Common parts of ``epd-launch`` and ``epd-bench``: options, errors and exit statuses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from epd_portable import envs
from epd_portable.config.instance import PLATFORMS
from epd_portable.config.quantities import url_problem
from epd_portable.errors import (
    ConfigError,
    EPDError,
    PlatformUnavailableError,
    PortInUseError,
    without_passwords,
)
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.machine import installed_engines

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA_VERSION = 1
"""Version of all JSON that commands print, errors included; grows when a field changes or goes."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses other than 0."""
_HELP = {"help_option_names": ["-h", "--help"], "show_default": True}
_BAD_INPUT = (ConfigError, PlatformUnavailableError, PortInUseError)

EXIT_STATUSES = """Exit status: 0 done; 1 failed, or the result is negative; 2 bad input: an option,
a file, a variable, or a machine without the abilities; 130 Ctrl-C; 143 SIGTERM. Commands that serve
end with 0 by either."""
"""The same for all commands; the end of both pages of ``--help``."""


class CommandLine(click.Group):
    """A command with subcommands, whose errors are one line for people or one of JSON.

    Args:
        default: The command that is meant where options come first; empty for none.
        json_errors: Whether ``--json`` prints errors as JSON too.
    """

    def __init__(
        self,
        *,
        default: str = "",
        json_errors: bool = True,
        **settings: Any,
    ) -> None:
        settings["context_settings"] = {"max_content_width": 100} | _HELP
        settings.setdefault("no_args_is_help", True)
        settings.setdefault("epilog", EXIT_STATUSES)
        settings["help"] = _with_examples(settings.get("help", ""))
        super().__init__(**settings)
        self._default = default
        self._json_errors = json_errors
        engines = [f"{name} {version}" for name, version in installed_engines().items()]
        found = ", ".join(engines) or "no vLLM is installed"
        click.version_option(
            package_name="epd-portable",
            message=f"%(prog)s, version %(version)s ({found})",
            help="Show the versions of the package and of the engine here, and exit.",
        )(self)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, whose first context, which may be without a parent, names its options."""
        cmd.context_settings.update(_HELP)
        cmd.help = _with_examples(cmd.help or "")
        super().add_command(cmd, name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command before options that come without one."""
        own = ("-h", "--help", "--version")
        if self._default and args and args[0].startswith("-") and args[0] not in own:
            args = [self._default, *args]
        return super().parse_args(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        *positional: Any,
        standalone_mode: bool = True,
        **settings: Any,
    ) -> Any:
        """Run the command and exit; without ``standalone_mode`` errors are raised."""
        given = list(sys.argv[1:] if args is None else args)
        run = functools.partial(super().main, given, *positional, standalone_mode=False, **settings)
        if not standalone_mode:
            return run()
        try:
            status: Any = run()
            sys.stdout.flush()
        except Exception as error:
            status = self._explained(error, as_json=self._json_errors and "--json" in given)
        sys.exit(status if isinstance(status, int) else 0)

    def _explained(self, error: Exception, *, as_json: bool) -> int:
        """Print an error in one line, and return the exit status; raise what is a fault of ours."""
        match error:
            case click.ClickException():
                said, code = error.format_message(), error.exit_code
                page = io.StringIO()
                error.show(page)
                text = page.getvalue()
            case EPDError():
                code = BAD_INPUT if isinstance(error, _BAD_INPUT) else FAILED
                said, text = str(error), f"{self.name}: {error}"
            case click.Abort():
                click.echo("stopped by Ctrl-C", err=True)
                return INTERRUPTED
            case OSError():
                what = f"{error.filename or 'output'}: {error.strerror or error}"
                with contextlib.suppress(OSError):
                    click.echo(f"{self.name}: cannot read or write {what}", err=True)
                _drop_output()
                return FAILED
            case _:
                raise error
        if as_json:
            content = {"type": type(error).__name__, "message": said, "exit_status": code}
            click.echo(without_passwords(one_line(event="error", error=content)))
        else:
            click.echo(without_passwords(text.rstrip("\n")), err=True)
        return code


def _drop_output() -> None:
    """Drop output that cannot be written: Python would report it once more, with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _with_examples(text: str) -> str:
    """Return a page of help on which paragraphs with indented lines keep their lines."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(f"\b\n{each}" if "\n  " in f"\n{each}" else each for each in paragraphs)


class ServerUrl(click.ParamType):  # type: ignore[type-arg]
    """The address of a server of HTTP or HTTPS."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the address; `click.BadParameter` with what to write."""
        if problem := url_problem(value):
            self.fail(problem, param, ctx)
        return value


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for programs; errors too."
)
"""``--json`` of a command that prints one object."""
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line; errors too."
)
"""``--json`` of a command that prints an object a line."""


def show(text: str, *, as_json: bool, **content: Any) -> None:
    """Print a text for people, or in its place fields for programs, with the form's version."""
    fields = {"schema_version": SCHEMA_VERSION, **content}
    click.echo(json.dumps(fields, indent=2) if as_json else text)


def one_line(**content: Any) -> str:
    """Return fields as one object in one line, with the version of its form."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **content}, ensure_ascii=False)


def printer(*, as_json: bool) -> Callable[[Notice], None]:
    """Return what prints notices: lines, of which warnings go to stderr, or objects."""

    def show(notice: Notice) -> None:
        is_warning = notice.event == "warning"
        if as_json:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            click.echo(one_line(time=time, event=notice.event, text=notice.text, **notice.fields))
        else:
            click.echo(f"warning: {notice.text}" if is_warning else notice.text, err=is_warning)

    return show


PORT = click.IntRange(1, 65535)
PORT.name = "port"


_TOPOLOGY_OPTIONS = (
    click.option(
        "--platform",
        type=click.Choice(PLATFORMS),
        envvar=envs.EPD_PLATFORM.name,
        help=f"What the instances run on; by default {envs.EPD_PLATFORM.name}, or that of "
        "--hardware.",
    ),
    click.option(
        "--hardware",
        metavar="PROFILE",
        help="Plan for a hardware profile: a name such as 910b-64g, or a file.",
    ),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        required=True,
        metavar="FILE",
        help="Topology file, for example configs/1e1pd.yaml: the package's if there is no such "
        "file here. All keys: the page 'Keys and variables' of the documentation.",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one key of the file, as in transfer.path=tcp; may be repeated.",
    ),
    click.option(
        "--model",
        metavar="M",
        help="Short for --set model=M: a Hugging Face id, a folder, or demo.",
    ),
)


def topology_options(command: F) -> F:
    """Add the options of commands that plan a topology; see `PlanRequest.from_options`."""
    return functools.reduce(lambda found, option: option(found), _TOPOLOGY_OPTIONS[::-1], command)

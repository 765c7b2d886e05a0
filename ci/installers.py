"""Installers of packages: uv, or pip where uv is not available.

Needs the standard library only: it runs with the machine's own Python, before anything is
installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from ci import pip_settings

UV = "uv==0.13.9"
TORCH = re.compile(r"torch\s*[=<>!~;(]")
UV_NOT_FOUND = 1  # Its exit status when versions exclude each other or do not exist; else 2.


class UvError(Exception):
    """uv cannot be used here, or no longer; the message, one line, has the reason."""


def error_line(output: str) -> str:
    """Return the line of ``output`` that describes the failure best."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match("(?i)error:", line)]
    return (errors or lines or ["no output"])[-1]


class Pip:
    """The pip of the environment ``python``.

    Attributes:
        name: What people call it.
        env: Variables for its commands, beyond those of this process.
        indexes: Those in addition to the indexes of pip's configuration.
    """

    name = "pip"
    env: Mapping[str, str] = MappingProxyType({})

    def __init__(self, python: Path, indexes: Sequence[str] = ()) -> None:
        self._pip = [str(python), "-m", "pip"]
        self.indexes = indexes

    def add_index(self, url: str) -> None:
        """Name it in every command from here on."""
        self.indexes = [*self.indexes, url]

    @property
    def _index_options(self) -> list[str]:
        return [part for url in self.indexes for part in ("--extra-index-url", url)]

    def install(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that installs requirements, with options that pip and uv both know."""
        return [*self._pip, "install", "--progress-bar", "off", *self._index_options, *arguments]

    def uninstall(self, package: str) -> list[str]:
        """Return the command that removes ``package`` if it is there."""
        return [*self._pip, "uninstall", "--yes", package]

    def has(self, requirement: str, *, source: bool) -> bool:
        """Return whether an exact version can be had here, as a wheel or also to be built."""
        if not source:
            return self._dry_run(["--only-binary", ":all:", requirement]) is not None
        # To request the metadata of a source distribution would build it.
        name, _, version = requirement.partition("==")
        argv = [*self._pip, "index", "versions", "--pre", *self._index_options, name]
        listed = subprocess.run(argv, capture_output=True, text=True, check=False)
        return version in re.split(r"[\s,]+", listed.stdout)

    def torch_of(self, engines: Sequence[str]) -> list[str]:
        """Return the version of torch that would come with ``engines``; empty if none is found.

        Only their own requirement is looked up: resolving everything takes a minute.
        """
        wanted = [
            requirement
            for engine in self._dry_run(engines) or ()
            for requirement in engine.get("requires_dist", [])
            if TORCH.match(requirement)
        ]
        return [item["version"] for item in (wanted and self._dry_run(wanted)) or ()]

    def _dry_run(self, arguments: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the metadata of what would be installed, less what that requires in turn."""
        argv = [*self._pip, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        argv += ["--report", "-", *self._index_options, *arguments]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return None
        report: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
        return [item["metadata"] for item in report["install"]]


class Uv:
    """The uv of the environment ``python``, with the configuration of pip there.

    Raises:
        UvError: It cannot be installed or started, or lacks a word for pip's configuration.
    """

    name = "uv"
    env: Mapping[str, str]

    def __init__(self, python: Path, root: Path) -> None:
        self._python = str(python)
        self._uv = [str(python.parent / "uv"), "pip"]
        pip = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
        _output_of([*pip, "--only-binary", ":all:", UV], "uv cannot be installed")
        _output_of([self._uv[0], "--version"], "uv does not start")
        listing = _output_of([str(python), "-m", "pip", "config", "list"], "pip is misconfigured")
        code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        self._default_index = _output_of([str(python), "-c", code], "pip names no index").strip()
        self._settings = pip_settings.parse(listing)
        self._root = root
        self.indexes: Sequence[str] = ()
        self._configure()

    def _configure(self) -> None:
        try:
            self.env, options = pip_settings.translate(
                self._settings, self.indexes, self._default_index, self._root
            )
        except pip_settings.UntranslatableError as error:
            raise UvError(str(error)) from None
        self._options = ["--python", self._python, *options]

    def add_index(self, url: str) -> None:
        """Name it behind the indexes of pip's configuration."""
        self.indexes = [*self.indexes, url]
        self._configure()

    def install(self, arguments: Sequence[str]) -> list[str]:
        """Return the command; see `Pip`."""
        return [*self._uv, "install", *self._options, *arguments]

    def uninstall(self, package: str) -> list[str]:
        """Return the command; see `Pip`."""
        return [*self._uv, "uninstall", "--python", self._python, package]

    def has(self, requirement: str, *, source: bool) -> bool:
        """Resolve without downloading; see `Pip`.

        Raises:
            UvError: It could not be queried; so in `torch_of`.
        """
        kinds = [] if source else ["--only-binary", ":all:"]
        return bool(self._resolve([requirement], "--no-deps", *kinds))

    def torch_of(self, engines: Sequence[str]) -> list[str]:
        """Resolve everything: a second or two, and installing finds the results in the cache."""
        return [
            version
            for name, _, version in (pin.partition("==") for pin in self._resolve(engines))
            if name == "torch"
        ]

    def _resolve(self, requirements: Sequence[str], *options: str) -> list[str]:
        argv = [*self._uv, "compile", *self._options, "--quiet", "--no-header", "--no-annotate"]
        result = subprocess.run(
            [*argv, *options, "-"],
            input="\n".join(requirements),
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode not in (0, UV_NOT_FOUND):
            raise UvError(f"uv failed: {error_line(result.stderr)}")
        return result.stdout.split("\n") if result.returncode == 0 else []


Installer: TypeAlias = "Pip | Uv"


def _output_of(argv: Sequence[str], otherwise: str) -> str:
    """Return what ``argv`` prints.

    Raises:
        UvError: It failed; the message begins with ``otherwise``.
    """
    try:
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UvError(f"{otherwise}: {error}") from None
    if result.returncode != 0:
        raise UvError(f"{otherwise}: {error_line(result.stdout + result.stderr)}")
    return result.stdout

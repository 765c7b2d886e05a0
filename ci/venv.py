"""A virtual environment of this checkout: made once, with a stamp of its inputs.

Needs the standard library only: it runs with the machine's own Python, before anything is
installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from ci.installers import Installer, Pip, Uv, UvError, error_line

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRESS_INTERVAL_S = 5.0
LOG_TAIL_LINES = 15


class EnvironmentSetupError(Exception):
    """The environment cannot be made; the message has the reason and what to do."""


class CommandFailedError(EnvironmentSetupError):
    """A command failed; ``reason`` is the line of its output with the reason."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def say(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"env: {text}", flush=True)


def digest(*inputs: str) -> str:
    """Return a hash of ``inputs``, and of which of them is which."""
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def check_python() -> None:
    """Refuse a Python that the pinned engines and tools do not support.

    Raises:
        EnvironmentSetupError: It is too old.
    """
    if sys.version_info < OLDEST_PYTHON:
        raise EnvironmentSetupError(
            f"Python {platform.python_version()} is older than 3.11, the oldest that the package "
            "supports: name a newer one, as in `make env PYTHON=python3.11`"
        )


def project_inputs() -> str:
    """Return what of ``pyproject.toml`` decides what is installed, as text.

    Settings of the tools do not.
    """
    import tomllib  # From Python 3.11 on; check_python() has refused an older one by name.

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    tables = [settings.get("build-system"), settings.get("project")]
    return json.dumps([*tables, settings.get("tool", {}).get("setuptools")], sort_keys=True)


@dataclass(kw_only=True)
class Venv:
    """A virtual environment with a stamp of what it was made from and a log of how.

    Attributes:
        env: Variables for every command that runs in it, beyond those of this process.
        installer: What installs into it; :meth:`begin` chooses.
    """

    folder: Path
    env: Mapping[str, str]
    installer: Installer = field(init=False)

    @property
    def python(self) -> Path:
        """Return the path of its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file with the fingerprint of a complete environment."""
        return self.folder / "epd-env.sha256"

    @property
    def log(self) -> Path:
        """The file with everything that installing printed."""
        return self.folder / "install.log"

    def is_current(self, wanted: str) -> bool:
        """Return whether it was completed for the fingerprint ``wanted``."""
        return (
            self.python.exists()
            and self.stamp.is_file()
            and self.stamp.read_text("utf-8") == wanted
        )

    def begin(self) -> None:
        """Make sure that the folder is an environment, of any content, without stamp and log.

        Raises:
            EnvironmentSetupError: Python cannot make one.
        """
        if not self.python.exists():
            say(f"creating {self.folder.name} with Python {platform.python_version()}")
            created = subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=False)
            if created.returncode != 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # It can hold a Python without pip.
                raise EnvironmentSetupError(
                    "python3 -m venv failed: install the python3-venv package"
                )
        self.stamp.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        self.installer = Pip(self.python)
        try:
            self.installer = Uv(self.python, ROOT)
        except UvError as error:
            self._fall_back(error)

    def complete(self, fingerprint: str) -> None:
        """Note that it is complete for ``fingerprint``."""
        self.stamp.write_text(fingerprint, "utf-8")

    def install(self, arguments: Sequence[str], what: str) -> None:
        """Install requirements into it, with options that pip and uv both know.

        Raises:
            CommandFailedError: The installer failed.
        """
        if self.installer.name != Pip.name:
            try:
                self._run_installer(self.installer.install(arguments), what)
                return
            except CommandFailedError as error:
                self._fall_back(f"{self.installer.name} failed: {error.reason}")
        self._run_installer(self.installer.install(arguments), what)

    def uninstall(self, package: str) -> None:
        """Remove ``package`` if it is there.

        Raises:
            CommandFailedError: The installer failed.
        """
        self._run_installer(self.installer.uninstall(package), f"removing {package}")

    def compile(self) -> None:
        """Compile to bytecode what engines and tests import of its packages.

        pip does it as it installs; uv does not, and an environment whose bytecode is missing costs
        every start where PYTHONDONTWRITEBYTECODE is set. What is compiled already stays.

        Raises:
            CommandFailedError: Python failed; a file that it cannot compile is passed over.
        """
        packages = self.site_packages
        argv = [str(self.python), "-m", "ci.bytecode", str(packages)]
        for other in sorted(self.folder.parent.glob(".venv*")):
            if other != self.folder:
                argv += ["--like", str(other / packages.relative_to(self.folder))]
        self.run_logged(argv, "compiling to bytecode")

    @property
    def site_packages(self) -> Path:
        """The folder of its packages."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([str(self.python), "-c", code], text=True).strip())

    def has(self, requirement: str, *, source: bool = False) -> bool:
        """Return whether ``requirement`` is available here, with ``source`` also as source.

        Requests no more than that: it is not downloaded, and what it requires is not looked at.
        """
        return self._answer(lambda installer: installer.has(requirement, source=source))

    def find_cpu_torch(self, engines: Sequence[str]) -> None:
        """Have the installer know an index with the CPU build of torch that ``engines`` request.

        It is left alone where it, as set up here, finds one itself.

        Raises:
            EnvironmentSetupError: It does not find the engines.
        """
        found = self._answer(lambda installer: installer.torch_of(engines))
        if found and all(version.endswith("+cpu") for version in found):
            return
        for engine in engines:
            if not self.has(engine):
                raise EnvironmentSetupError(self.not_found(engine))
        say(f"{self.installer.name} knows no CPU build of torch here: adding {TORCH_CPU_INDEX}")
        self.installer.add_index(TORCH_CPU_INDEX)

    def not_found(self, requirement: str) -> str:
        """Return the message for a ``requirement`` that :meth:`has` has denied."""
        return (
            f"{self.installer.name} finds no {requirement} for Python {platform.python_version()} "
            f"on {platform.machine()}: check the network and `pip config list`"
        )

    def _answer(self, question: Callable[[Installer], T]) -> T:
        """Return the installer's reply, or pip's if uv cannot be queried."""
        try:
            return question(self.installer)
        except UvError as error:
            self._fall_back(error)
            return question(self.installer)

    def _fall_back(self, reason: object) -> None:
        say(f"{reason}; using pip, which takes minutes")
        self.installer = Pip(self.python, self.installer.indexes)

    def _run_installer(self, argv: Sequence[str], what: str) -> None:
        self.run_logged(argv, what, self.installer.env)

    def run_logged(
        self, argv: Sequence[str], what: str, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Run ``argv`` with its output in the log, and print where it is every few seconds.

        Raises:
            EnvironmentSetupError: It failed; the message ends with the last lines of the log.
        """
        say(f"{what} (log: {self.folder.name}/{self.log.name})")
        started = time.monotonic()
        with self.log.open("a", encoding="utf-8") as log:
            begin = log.tell()
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **env, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                code = self._wait_showing_progress(process, started, begin)
            finally:
                # Interrupted: an installer left behind would race with the next run.
                process.terminate()
                process.wait()
        if code != 0:
            output = self._output(begin)
            tail = "\n".join(output.splitlines()[-LOG_TAIL_LINES:])
            message = f"{what}: exit status {code}; the log ends with\n{tail}"
            raise CommandFailedError(message, error_line(output))
        say(f"{time.monotonic() - started:4.0f} s  done")

    def _wait_showing_progress(
        self, process: subprocess.Popen[bytes], started: float, begin: int
    ) -> int:
        while True:
            try:
                return process.wait(PROGRESS_INTERVAL_S)
            except subprocess.TimeoutExpired:
                output = self._output(begin)
                step = (output.splitlines() or ["starting"])[-1].strip()
                if compiled := output.count("Compiling '"):
                    step = f"{compiled} files compiled"
                say(f"{time.monotonic() - started:4.0f} s  {step[-70:]}")

    def _output(self, begin: int) -> str:
        """Return the log from the byte ``begin`` on."""
        return self.log.read_bytes()[begin:].decode("utf-8", "replace")

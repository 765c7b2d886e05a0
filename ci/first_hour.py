"""The first hour on a machine with an NVIDIA device: stages, each with a limit, into one file.

The cheapest and most telling first, so that whoever has a device for minutes has what those are
worth. A stage that fails or takes too long ends itself and not the hour. The file says of each
stage how it ended, its figures and its last words; with it, a later call goes on where this one
ended.

Nothing is fetched: wheels come from a folder. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = "figures.json"
TAIL_LINES = 40
GRACE_S = 5.0
ONE_DEVICE = "configs/1e1pd-one-device.yaml"
OTHERWISE = "ipc-PIECEWISE or runner1 or synchronous"
"""Of the engines' tests, those that compute as users do only when they ask for it."""
STARTED_BY = "FIRST_HOUR_STAGE"
"""Variable by which everything that a stage has started is found again."""
MARK = '{"figure": '
"""How a line of a stage's output begins that is a figure; the rest of it is JSON too."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command.

    Attributes:
        name: For people, and in the file.
        argv: The command, from the repository's root; ``{python}``, ``{out}`` and ``{wheels}``
            stand for what is known when it is run.
        limit_s: It is ended after so many seconds.
        writes: Files with JSON that it leaves in the folder of results, by the name of a figure.
    """

    name: str
    argv: Sequence[str]
    limit_s: float
    writes: dict[str, str] = field(default_factory=dict)


PYTEST = ("{python}", "-m", "pytest", "-q", "--require-device=cuda", "-p", "no:cacheprovider")
STAGES = (
    Stage(
        name="install",
        argv=(
            *("{python}", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-compile", "--target", "{out}/site", "--find-links", "{wheels}"),
            *("--requirement", "{wheels}/requirements.txt"),
        ),
        limit_s=300,
    ),
    Stage(name="machine", argv=("nvidia-smi",), limit_s=30),
    Stage(name="probe", argv=("{python}", "-m", "tests.cuda.probe"), limit_s=150),
    Stage(
        name="check",
        argv=("{python}", "-m", "epd_portable.launch.cli", "check", "--platform", "cuda"),
        limit_s=60,
    ),
    Stage(
        name="devices",
        argv=(*PYTEST, "tests/devices", "tests/cuda/test_streams.py", "-m", "needs_cuda"),
        limit_s=180,
    ),
    Stage(
        name="contract",
        argv=(*PYTEST, "tests/contract/test_transport.py", "-m", "needs_cuda"),
        limit_s=240,
    ),
    Stage(
        name="transfer",
        argv=(
            *("{python}", "-m", "epd_portable.bench.cli", "transfer", "--platform", "cuda"),
            *("--path", "ipc", "--path", "shm", "--path", "tcp", "--repeat", "20"),
            *("--json", "{out}/transfer.json"),
        ),
        limit_s=150,
        writes={"transfer": "transfer.json"},
    ),
    # Up to here eight minutes, and no engine.
    Stage(
        name="paths",
        argv=(
            *PYTEST,
            "tests/cuda/test_engines.py",
            "-k",
            f"TestByEveryPath and not ({OTHERWISE})",
        ),
        limit_s=1200,
    ),
    # A round of each side takes about three minutes; three of them are worth a claim.
    Stage(
        name="load",
        argv=(
            *("{python}", "-m", "epd_portable.bench.cli", "load", "--platform", "cuda"),
            *("--side", f"shared={ONE_DEVICE}", "--side", "replicas:1"),
            *("--side", f"shm={ONE_DEVICE},transfer.path=shm"),
            *("--model", "shape", "--seconds", "30", "--rounds", "3"),
            *("--point", "rate=2/6/12,share=0.5,size=1008,text=200,output=128"),
            *("--json", "{out}/load.json"),
        ),
        limit_s=2400,
        writes={"load": "load.json"},
    ),
    Stage(
        name="modes",
        argv=(*PYTEST, "tests/cuda/test_engines.py", "-k", f"not TestByEveryPath or {OTHERWISE}"),
        limit_s=2400,
    ),
)
"""In their order."""


def run_stage(stage: Stage, *, out: Path, wheels: str, limit_s: float) -> dict[str, Any]:
    """Run a stage, whatever becomes of it.

    Returns:
        ``status``, ``None`` if it was ended at its limit or could not be started, ``seconds``, the
        ``figures`` that it measured by name, and its last lines as ``tail``.
    """
    places = {"{python}": sys.executable, "{out}": str(out), "{wheels}": wheels}
    argv = list(stage.argv)
    for name, value in places.items():
        argv = [word.replace(name, value) for word in argv]
    token = f"{stage.name}-{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "PYTHONUNBUFFERED": "1", STARTED_BY: token}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(out / "site"), *filter(None, [env.get("PYTHONPATH")])]
    )
    log = out / f"{stage.name}.log"
    begin_s = time.monotonic()
    status = None
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as error:
            file.write(f"{error}\n".encode())
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
            _end(process, token)
    lines = log.read_text("utf-8", "replace").splitlines()
    return {
        "status": status,
        "seconds": round(time.monotonic() - begin_s, 1),
        "figures": figures(stage, lines, out),
        "tail": lines[-TAIL_LINES:],
    }


def figures(stage: Stage, lines: Sequence[str], out: Path) -> dict[str, Any]:
    """Return what a stage measured: lines that begin with `MARK`, and the files that it wrote."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # It was ended in the middle of a line.
                told = json.loads(line)
                found[told["figure"]] = told["value"]
    for name, file in stage.writes.items():
        with contextlib.suppress(OSError, ValueError):
            found[name] = json.loads((out / file).read_text("utf-8"))
    return found


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """End a command and all that it has started: engines have sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    end_s = time.monotonic() + GRACE_S
    number = signal.SIGTERM
    while left := _started_by(token):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if time.monotonic() > end_s:
            number = signal.SIGKILL
        if time.monotonic() > end_s + GRACE_S:
            return  # What a driver holds does not end by a signal.
        time.sleep(0.1)


def _started_by(token: str) -> list[int]:
    """Return the processes of a stage that are there still; those that have ended are left out."""
    wanted = f"{STARTED_BY}={token}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found


def hour(
    stages: Sequence[Stage],
    *,
    out: Path,
    wheels: str,
    budget_s: float,
    say: Callable[[str], None],
) -> bool:
    """Run what has not ended well yet; return whether everything has.

    Without a folder of wheels the stage ``install`` is left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / FIGURES
    told: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    end_s = time.monotonic() + budget_s
    due = [stage for stage in stages if wheels or stage.name != "install"]
    for stage in due:
        if _is_well(told, stage):
            continue
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            say(f"{stage.name}: no time left; call again to go on")
            return False
        say(f"{stage.name}: at most {min(stage.limit_s, left_s):.0f} s")
        ended = run_stage(stage, out=out, wheels=wheels, limit_s=min(stage.limit_s, left_s))
        told[stage.name] = ended
        fresh = file.with_suffix(".part")
        fresh.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")
        fresh.replace(file)
        how = "was ended" if ended["status"] is None else f"status {ended['status']}"
        say(f"{stage.name}: {how} after {ended['seconds']:g} s, {len(ended['figures'])} figures")
    return all(_is_well(told, stage) for stage in due)


def _is_well(told: dict[str, Any], stage: Stage) -> bool:
    return stage.name in told and told[stage.name]["status"] == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every stage that was asked for has ended well."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="ci/jobs/cuda.sh",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=f"Stages, in their order: {', '.join(names)}. Exit status: 0, or 1 when one has "
        "not ended well; called again, those go on.",
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".first-hour", metavar="FOLDER")
    parser.add_argument(
        "--wheels",
        default="",
        metavar="FOLDER",
        help="install from here, what its requirements.txt lists; default: nothing is installed",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of it (default: 60)")
    parser.add_argument(
        "--stage",
        action="append",
        choices=names,
        metavar="NAME",
        help="only this one, again if it ended well; may be repeated",
    )
    options = parser.parse_args(argv)
    stages = [stage for stage in STAGES if stage.name in (options.stage or names)]
    if options.stage:
        _forget(options.out / FIGURES, options.stage)
    good = hour(
        stages,
        out=options.out.resolve(),
        wheels=options.wheels and str(Path(options.wheels).resolve()),
        budget_s=options.minutes * 60,
        say=lambda line: print(f"first hour: {line}", flush=True),
    )
    return 0 if good else 1


def _forget(file: Path, names: Sequence[str]) -> None:
    if file.is_file():
        told = json.loads(file.read_text("utf-8"))
        kept = {name: each for name, each in told.items() if name not in names}
        file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())

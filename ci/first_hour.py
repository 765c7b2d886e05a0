"""The first hour on a machine with a device that is had for minutes: stages, into one file.

The most telling first, so that minutes are worth something whenever they end. Stages run in the
background: a command waits for them as long as it may last, and the next one continues waiting. One
that fails or takes too long ends itself and not the hour; called again, what has not ended well is
run again, behind what has not run yet. ``figures.json`` has how each stage ended, its figures and
its last words. Nothing is fetched there: `ci.carry` makes pieces, which are taken as they arrive.

Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci import carry

ROOT = Path(__file__).resolve().parent.parent
FIGURES, PROGRESS, LOCK, PIECES = "figures.json", "progress.log", "lock", "pieces"
SITE, CACHE = "site", "vllm-cache"
TAIL_LINES = 40
GRACE_S = 5.0
PATIENCE = 6
"""So many times as long a rehearsal's stages may take, whose machine has other work."""
STARTED_BY = "FIRST_HOUR_STAGE"
"""Variable by which everything that a stage has started is found again."""
REFERENCE = "EPD_TEST_REFERENCE"
"""Variable with the log of the one plain vLLM that the stages of engines compare with."""
MARK = '{"figure": '
"""Prefix of a line of a stage's output that is a figure; the rest of the line is JSON as well."""
ENGINES = "tests/first_hour/test_engines.py"
CALL_AGAIN = 75
"""Exit status: stages go on in the background, or wait for pieces."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Platform and models of the hour.

    Attributes:
        platform: What engines run on.
        paths: Of items between two instances on one device.
        machine: The command that describes the machine.
        sizes: Of the models under load, as `ci.true_shapes` knows them, the most telling first.
        mixes: Parts of the requests that have images, and sizes of these.
        burst: Requests of a burst of each mix, by which saturation is measured.
        settings: Of all sides, with which each is at its best.
        whole: Of plain vLLM alone.
        seconds: Of each point that has a rate.
    """

    platform: str
    paths: tuple[str, ...]
    machine: tuple[str, ...]
    sizes: tuple[str, ...] = ("3b", "7b")
    mixes: tuple[str, ...] = (
        "share=0.1,size=3584,text=200,output=128",
        "share=0.3,size=2016,text=200,output=128",
        "share=0.5,size=1008,text=200,output=128",
    )
    burst: int = 200
    settings: tuple[str, ...] = (
        *("engine_args.max_model_len=20000", "engine_args.api_server_count=2"),
        "instances.prefill_decode.engine_args.kv_cache_memory_bytes=17179869184",
    )
    whole: str = ",engine_args.gpu_memory_utilization=0.9"
    seconds: int = 10


CUDA = Target(
    platform="cuda",
    paths=("ipc", "shm", "tcp"),
    machine=("nvidia-smi",),
    settings=(
        *Target.settings,
        "engine_args.compilation_config.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128,200]",
        "engine_args.compilation_config.cudagraph_mm_encoder=true",
        # Those of configs/1e1pd-one-device.yaml, and a graph for images of 2016 and of 3584 pixels.
        "engine_args.compilation_config.encoder_cudagraph_token_budgets="
        "[64,256,576,1024,1296,2048,4096,5184,16384]",
    ),
)
TARGETS = {
    "cuda": CUDA,
    "npu": Target(platform="npu", paths=CUDA.paths, machine=("npu-smi", "info")),
}
ON_CPU = Target(
    platform="cpu",
    paths=("shm", "tcp"),
    machine=("uname",),
    sizes=("small",),
    mixes=("share=0.5,size=112,text=20,output=8", "share=0.25,size=224,text=20,output=8"),
    burst=8,
    settings=("engine_args.enforce_eager=true", "engine_args.dtype=bfloat16"),
    whole="",
    seconds=3,
)
REHEARSALS = {
    "cuda": ON_CPU,
    "npu": replace(
        ON_CPU,
        platform="npu",
        paths=("ipc", "shm"),
        settings=(
            *ON_CPU.settings,
            *("engine_args.max_num_batched_tokens=512", "engine_args.skip_mm_profiling=true"),
            *("transfer.pool_bytes=16MiB", "transfer.lease_s=60", "transfer.wait_timeout_s=120"),
            "instances.prefill_decode.engine_args.kv_cache_memory_bytes=67108864",
            "instances.encode_prefill_decode.engine_args.kv_cache_memory_bytes=67108864",
        ),
    ),
}
"""With real engines at their smallest: on the CPU, and over the simulated Ascend runtime."""


_ONE_DEVICE = "configs/1e1pd-one-device.yaml"
SIDES = (
    f"split={_ONE_DEVICE}",
    f"overlapped={_ONE_DEVICE},instances.encode.count=0,instances.prefill_decode.count=0,"
    "instances.encode_prefill_decode.count=1",
)
"""Sides of the load next to one plain vLLM: a split of the device, one engine for all stages."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command with its limits.

    Attributes:
        argv: From the repository's root; ``{out}`` stands for the folder of results.
        limit_s: It is ended after so many seconds.
        writes: A file with JSON that it leaves in the folder of results, named as its figure.
        engine: Needs the engine's wheel, which arrives last.
        compares: The reference starts next to it, or is up.
    """

    name: str
    argv: Sequence[str]
    limit_s: float
    writes: str = ""
    engine: bool = False
    compares: bool = False


def stages(target: Target) -> list[Stage]:
    """Return all stages in the order of their worth; none takes longer than nine minutes."""
    name, python = target.platform, sys.executable
    tests = [python, "-m", "pytest", "-v", "--full", "-p", "no:cacheprovider"]
    if name == "cpu":
        tests += ["-m", "not needs_cuda and not needs_npu"]
    else:
        tests += [f"--require-device={name}", "-m", f"needs_{name}"]
    bench = [python, "-m", "epd_benchmarks.cli"]

    def told(stage: str, limit_s: float, *argv: str, **more: Any) -> Stage:
        return Stage(name=stage, argv=argv, limit_s=limit_s, **more)

    def tested(stage: str, limit_s: float, *which: str, **more: Any) -> Stage:
        """Run tests, and on a second try those only that have not passed."""
        passed = f"--resume={{out}}/{stage.replace(' ', '-')}.passed"
        return told(stage, limit_s, *tests, passed, *which, **more)

    def engines(stage: str, which: str) -> Stage:
        return tested(stage, 540, ENGINES, "-k", which, engine=True, compares=True)

    def loaded(stage: str, size: str, *more: str, before: Sequence[str] = ()) -> Stage:
        file = f"{stage}-{size}.json"
        argv = [*before, *bench, "load", "--platform", name, "--model", f"{{out}}/models/{size}"]
        sides = (*SIDES, f"whole=replicas:1{target.whole}")
        argv += [word for each in sides for word in ("--side", each)]
        argv += ["--set", "engine_args.load_format=dummy"]
        argv += [word for each in target.settings for word in ("--set", each)]
        argv += [*more, "--rounds", "1", "--json", f"{{out}}/{file}"]
        return told(f"{stage} {size}", 540, *argv, writes=file, engine=True)

    def loads(size: str) -> list[Stage]:
        """Return bursts, and rates at parts of the throughput that plain vLLM had in them."""
        points = [f"prompts={target.burst},{mix}" for mix in target.mixes]
        bursts = [word for each in points for word in ("--point", each)]
        found = "{out}/" + f"bursts-{size}.json"
        rates = [python, "-m", "ci.load_rates", found, "whole", "0.3/0.6/0.9"]
        seconds = ["--seconds", str(target.seconds)]
        return [loaded("bursts", size, *bursts), loaded("rates", size, *seconds, before=rates)]

    transfer = [*bench, "transfer", "--platform", name, "--repeat", "20"]
    transfer += [word for path in target.paths for word in ("--path", path)]
    found = [
        told("machine", 30, *target.machine),
        told("probe", 150, python, "-m", "tests.first_hour.probe", name),
        told("check", 60, python, "-m", "epd_portable.launch.cli", "check", "--platform", name),
        tested("devices", 300, "tests/devices"),
        tested("contract", 300, "tests/contract/test_paths.py"),
        told("transfer", 150, *transfer, "--json", "{out}/transfer.json", writes="transfer.json"),
        told("shapes", 60, python, "-m", "ci.true_shapes", "{out}/models", *target.sizes),
        *(engines(f"equal {path}", f"{name}-{path}-usual") for path in target.paths),
        *(each for size in target.sizes for each in loads(size)),
        engines("modes", "not usual"),
    ]
    # No device is there to query, and no test of one to run.
    absent = ("probe", "devices", "modes") if name == "cpu" else ()
    return [each for each in found if each.name not in absent]


class Hour:
    """The stages of one folder of results.

    Args:
        out: The folder.
        stages: What to run, in this order.
        platform: Of the reference.
    """

    def __init__(self, out: Path, stages: Sequence[Stage], platform: str) -> None:
        self._out, self.stages, self._platform = out, stages, platform
        self._reference = contextlib.ExitStack()
        self._compared = False

    @property
    def told(self) -> dict[str, Any]:
        """Return the record of each stage that has run."""
        file = self._out / FIGURES
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    @property
    def due(self) -> list[Stage]:
        """Return the stages that have not ended well."""
        told = self.told
        return [each for each in self.stages if told.get(each.name, {}).get("status") != 0]

    def run(self, *, total_s: float) -> None:
        """Run what is due, and of it what the wheels that are here suffice for.

        What has run before comes last, and when no wheel is missing: once, not with each piece.
        """
        end_s, before = time.monotonic() + total_s, self.told
        try:
            for stage in sorted(self.due, key=lambda each: each.name in before):
                last = stage.engine or stage.name in before
                missing = last and carry.missing(self._out / PIECES)
                limit_s = min(stage.limit_s, end_s - time.monotonic())
                if missing or limit_s <= 0:
                    why = f"waits for {missing}" if missing else "no time left"
                    print(f"{stage.name}: {why}", flush=True)
                    break
                self._compare_with(stage.compares)
                print(f"{stage.name}: at most {limit_s:.0f} s", flush=True)
                ended = self._run(stage, limit_s)
                self._keep({**self.told, stage.name: ended})
                how = "was ended" if ended["status"] is None else f"status {ended['status']}"
                print(f"{stage.name}: {how} after {ended['seconds']:g} s", flush=True)
        finally:
            self._compare_with(False)

    def _keep(self, told: dict[str, Any]) -> None:
        fresh = self._out / f"{FIGURES}.part"
        fresh.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")
        fresh.replace(self._out / FIGURES)

    def _run(self, stage: Stage, limit_s: float) -> dict[str, Any]:
        """Run a stage, regardless of its result.

        Returns:
            ``status``, ``None`` if it was ended at its limit or could not be started, ``seconds``,
            the ``figures`` that it measured by name, and its last lines as ``tail``.
        """
        log = self._log(stage.name)
        begin_s, status = time.monotonic(), None
        with log.open("wb") as file, self._started(stage.name, stage.argv, file) as process:
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit_s)
        lines = log.read_text("utf-8", "replace").splitlines()
        return {
            "status": status,
            "seconds": round(time.monotonic() - begin_s, 1),
            "figures": figures(stage, lines, self._out),
            "tail": lines[-TAIL_LINES:],
        }

    def _log(self, name: str) -> Path:
        return self._out / f"{name.replace(' ', '-')}.log"

    @contextlib.contextmanager
    def _started(
        self, name: str, argv: Sequence[str], file: Any
    ) -> Iterator[subprocess.Popen[bytes] | None]:
        token = f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        paths = [
            str(ROOT),
            str(ROOT / "benchmarks"),
            str(self._out / SITE),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        env = {**os.environ, STARTED_BY: token, REFERENCE: str(self._log("reference"))}
        env |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        env["VLLM_CACHE_ROOT"] = str(self._out / CACHE)
        argv = [word.replace("{out}", str(self._out)) for word in argv]
        try:
            process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=file)
        except OSError as error:
            file.write(f"{error}\n".encode())
            yield None
            return
        try:
            yield process
        finally:
            end(token)
            process.wait()

    def _compare_with(self, wanted: bool) -> None:
        """Have the reference started, or not: a load is not measured next to it."""
        if wanted and not self._compared:
            argv = [sys.executable, "-m", "tests.first_hour.reference", self._platform]
            file = self._reference.enter_context(self._log("reference").open("wb"))
            self._reference.enter_context(self._started("reference", argv, file))
        elif not wanted:
            self._reference.close()
        self._compared = wanted


def figures(stage: Stage, lines: Sequence[str], out: Path) -> dict[str, Any]:
    """Return what a stage measured: lines that begin with `MARK`, and the file that it wrote."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # It was ended in the middle of a line.
                told = json.loads(line)
                found[told["figure"]] = told["value"]
    if stage.writes:
        with contextlib.suppress(OSError, ValueError):
            found[stage.writes] = json.loads((out / stage.writes).read_text("utf-8"))
    return found


def end(token: str) -> None:
    """End all that a stage has started: engines have sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + GRACE_S
        while left := _started_by(token):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if time.monotonic() > end_s:
                break  # What a driver holds does not end by a signal.
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


def _locked(file: Any) -> bool:
    """Take the lock of a folder, which the background holds; return whether it was free."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def table(hour: Hour) -> str:
    """Return a line for each stage: how long it took, of how long it may, and how it ended."""
    told = hour.told
    rows = ["| stage | minutes | at most | ended |", "|---|---|---|---|"]
    for each in hour.stages:
        known = told.get(each.name)
        minutes = f"{known['seconds'] / 60:.1f}" if known else "–"
        status: Any = known["status"] if known else "–"
        well = {0: "well", None: "at its limit"}.get(status, str(status))
        rows.append(f"| {each.name} | {minutes} | {each.limit_s / 60:.1f} | {well} |")
    return "\n".join(rows)


def begin(options: argparse.Namespace, hour: Hour) -> int:
    """Start the background if it does not run, and pass on its output while a call may last."""
    pieces, end_s = options.out / PIECES, time.monotonic() + options.call_s
    if options.take:
        carry.take(options.take, pieces)
        carry.install(pieces, options.out / SITE, options.out / CACHE)
    with (options.out / PROGRESS).open("ab") as log, (options.out / LOCK).open("wb") as lock:
        place = log.tell()
        if _locked(lock):
            # The child keeps the lock: it belongs to the open file.
            argv = [sys.executable, "-m", "ci.first_hour", *sys.argv[1:], "--background"]
            subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
    with (options.out / PROGRESS).open("rb") as log, (options.out / LOCK).open("wb") as lock:
        log.seek(place)
        while not (ended := _locked(lock)) and time.monotonic() < end_s:
            time.sleep(0.5)
            sys.stdout.write(log.read().decode("utf-8", "replace"))
            sys.stdout.flush()
        sys.stdout.write(log.read().decode("utf-8", "replace"))
    if ended and not carry.missing(pieces):
        print(table(hour), flush=True)
        return 1 if hour.due else 0
    print("call again: stages go on in the background, or wait for pieces", flush=True)
    return CALL_AGAIN


def rehearse(options: argparse.Namespace, hour: Hour) -> int:
    """Do all that a person would: carry the project's wheel, and call again and again."""
    with tempfile.TemporaryDirectory() as scratch:
        carry.build(Path(scratch))
        size = int(options.piece_mib * (1 << 20))
        pieces = carry.split(Path(scratch), Path(scratch, "pieces"), piece_bytes=size)
        for options.take in itertools.chain(pieces, itertools.repeat(None)):
            status = begin(options, hour)
            if status != CALL_AGAIN:
                return status
    raise AssertionError


def main() -> int:
    """Run from the command line; 0 when every stage that was requested has ended well."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Exit status: 0; 1 when a stage has not ended well, which the next call runs again; "
        f"{CALL_AGAIN} when stages go on in the background, or wait for pieces.",
    )
    parser.add_argument("platform", choices=TARGETS)
    parser.add_argument("--out", type=Path, default=ROOT / ".first-hour", metavar="FOLDER")
    parser.add_argument(
        "--take", type=Path, metavar="FOLDER", help="pieces that python -m ci.carry has made"
    )
    parser.add_argument("--call-s", type=float, default=540, help="that a call lasts (default 540)")
    parser.add_argument(
        "--total-min", type=float, help="for all of it (default 45; of a rehearsal: no limit)"
    )
    parser.add_argument(
        "--stage", action="append", default=[], metavar="NAME", help="only this one; or these"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="all of it with real engines and no device, in calls of its own",
    )
    parser.add_argument("--piece-mib", type=float, default=0.25, help="of a rehearsal (0.25)")
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    target = (REHEARSALS if options.rehearse else TARGETS)[options.platform]
    known = stages(target)
    if unknown := set(options.stage) - {each.name for each in known}:
        parser.error(f"--stage {unknown.pop()}: there are {', '.join(each.name for each in known)}")
    chosen = [each for each in known if each.name in options.stage or not options.stage]
    if options.rehearse:
        chosen = [replace(each, limit_s=PATIENCE * each.limit_s) for each in chosen]
    hour = Hour(options.out, chosen, target.platform)
    if options.background:
        hour.run(total_s=60 * (options.total_min or (math.inf if options.rehearse else 45)))
        return 0
    return rehearse(options, hour) if options.rehearse else begin(options, hour)


if __name__ == "__main__":
    sys.exit(main())

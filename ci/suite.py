"""``make test``: everything that shows that a change is right, in pieces that run side by side.

Each waits for much of its time, so that more of them than cores run at once: what takes long
begins first, and what is short fills the end. Tests of engines take most memory. What a piece
prints comes in one part, when it ends; its log is in ``.suite/``. With ``--full`` every piece runs
what ``make test`` leaves out too, which takes hours; ``--resume`` then continues where an earlier
run of the same commit ended.

Needs the standard library only: the environments are made by its first pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ci.make_env import EXIT_UNAVAILABLE
from ci.venv import ROOT

FOLDER = ROOT / ".suite"
STATE = FOLDER / "passed.json"
WORKERS = ("-n", "2", "--dist=loadfile", "--no-loadscope-reorder")
"""A file stays with one worker; those that take long and mostly wait are named first."""
OVER_VLLM = (
    "tests/integration/front",
    "tests/integration/items",
    "tests/integration/vllm_plugin",
    "tests/unit/vllm_plugin",
)
"""Import vLLM when they are collected, by which each of several workers would be held up."""
OWN_ENGINES = ("tests/e2e/modalities", "tests/e2e/front/test_kept_keys.py")
"""Share no engine with other tests of engines."""
MODELS = "tests/property"
MORE_EXAMPLES = ("--hypothesis-profile=thorough", "--timeout=7200")
"""Twenty times the examples of the short run, other ones each time."""
PYTEST = (".venv/bin/python", "-m", "pytest")
NPU_ENVIRONMENT = "npu environment"
AT_ONCE, ENGINES_AT_ONCE = 5, 2
"""Pieces that run at once, and of these pieces that start engines."""
SMALL_AT_ONCE, SMALL_ENGINES_AT_ONCE = 3, 1
LARGE_BYTES = 14 << 30
"""Memory from which on the larger numbers apply: two pieces with engines took 8 GB at most."""
EXIT_CANNOT_START = 127
SAYS_NOTHING_S = 60.0
FAILURES = ("FAILED tests/", "ERROR tests/")
TOGETHER_S = 1.0
"""Signals within this time are one: make passes on what the whole group got."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A command of the suite.

    Attributes:
        name: For people, and of its log.
        argv: The command, from the repository's root.
        engines: Whether it starts engines of vLLM.
        needs: An earlier piece without whose success this one is left out.
    """

    name: str
    argv: Sequence[str]
    engines: bool = False
    needs: str = ""


def at_once() -> tuple[int, int]:
    """Return how many pieces run at once on this machine, and how many of those with engines."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory_bytes < LARGE_BYTES:
        return SMALL_AT_ONCE, SMALL_ENGINES_AT_ONCE
    return AT_ONCE, ENGINES_AT_ONCE


def pieces(*, full: bool) -> list[Piece]:
    """Return the whole suite, in the order in which it begins."""
    more = ["--full"] if full else []
    mutants = [*PYTEST[:2], "tests.mutants", "transfer", "encode", "--least", "50"]
    npu = ["ci/jobs/npu-sim.sh", *([] if full else ["--short"])]
    faults = {"faults": "tests/faults"}
    if full:
        files = sorted(path.name for path in (ROOT / "tests" / "faults").glob("test_*.py"))
        faults = {f"faults {name[5:-3]}": f"tests/faults/{name}" for name in files}

    def npu_piece(part: str, *, engines: bool = False) -> Piece:
        argv = [*npu, part]
        return Piece(name=f"npu {part}", argv=argv, engines=engines, needs=NPU_ENVIRONMENT)

    def tests(name: str, *arguments: str, engines: bool = False) -> Piece:
        return Piece(name=name, argv=[*PYTEST, *arguments, *more], engines=engines)

    def without_vllm(folder: str) -> list[str]:
        return [f"--ignore={path}" for path in OVER_VLLM if path.startswith(folder)]

    return [
        tests("engines", "tests/e2e", *map("--ignore={}".format, OWN_ENGINES), engines=True),
        # Other pieces need it.
        Piece(
            name=NPU_ENVIRONMENT,
            argv=[sys.executable, "-m", "ci.make_env", "--platform", "npu-sim"],
        ),
        tests("engines of their own", *OWN_ENGINES, engines=True),
        tests("tests over vLLM", *([] if full else [MODELS]), *OVER_VLLM),
        tests(
            "tests without engines",
            *("tests/integration", "tests/contract"),
            *without_vllm("tests/integration"),
            *WORKERS,
        ),
        *(tests(name, path) for name, path in faults.items()),
        npu_piece("engines", engines=True),
        npu_piece("devices"),
        npu_piece("contract"),
        # By one process: each of several would collect all of them, for four seconds.
        tests("unit tests", "tests/unit", *without_vllm("tests/unit")),
        npu_piece("faults"),
        Piece(name="checks", argv=["ci/check.sh"]),
        npu_piece("transfer"),
        # Tests of the simulated runtime itself run none of the package: CI and --full run them.
        *([npu_piece("simulator")] if full else []),
        *([tests("models", MODELS, *MORE_EXAMPLES)] if full else []),
        *([Piece(name="mutants", argv=mutants)] if full else []),
    ]


@dataclass(kw_only=True)
class Outcome:
    """Result of a piece.

    Attributes:
        status: Its exit status; ``None`` if it was left out.
        seconds: How long it took.
        cpu_s: CPU seconds of its processes, without those that outlived their parents.
        why: Why it was left out.
        failed: Tests that failed, as pytest names them in its last lines.
    """

    status: int | None
    seconds: float = 0.0
    cpu_s: float = 0.0
    why: str = ""
    failed: list[str] = field(default_factory=list)


@dataclass
class Suite:
    """Runs pieces, several at once: each begins when it may, in their order."""

    pieces: Sequence[Piece]
    done: set[str] = field(default_factory=set)
    at_once: tuple[int, int] = field(default_factory=at_once)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False
    _stopped_at: float = -math.inf

    def run(self) -> None:
        """Run everything to its end."""
        threads = [threading.Thread(target=self._run_some) for _ in range(self.at_once[0])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """End what runs, and begin nothing."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            now = time.monotonic()
            if now - self._stopped_at < TOGETHER_S:
                return
            self._stopped_at = now
            running = list(self._running.values())
        for process in running:
            interrupt(process)

    def _run_some(self) -> None:
        while (piece := self._next()) is not None:
            try:
                outcome = self._outcome(piece)
            except OSError as error:
                say(f"{piece.name}: {error}")
                outcome = Outcome(status=EXIT_CANNOT_START, why=str(error))
            with self._changed:
                self.outcomes[piece.name] = outcome
                self._changed.notify_all()

    def _next(self) -> Piece | None:
        """Wait for a piece that may begin, and return it; ``None`` if everything has begun."""
        with self._changed:
            while True:
                left = [piece for piece in self.pieces if piece.name not in self._begun]
                if not left:
                    return None
                for piece in left:
                    if self._stopped or self._may_begin(piece):
                        self._begun.add(piece.name)
                        return piece
                self._changed.wait()

    def _may_begin(self, piece: Piece) -> bool:
        running = self._begun - self.outcomes.keys()
        engines = sum(each.engines for each in self.pieces if each.name in running)
        fits = not piece.engines or engines < self.at_once[1]
        return fits and piece.needs in ("", *self.outcomes)

    def _outcome(self, piece: Piece) -> Outcome:
        if piece.name in self.done:
            return Outcome(status=None, why="passed before")
        with self._changed:
            if self._stopped:
                return Outcome(status=None, why="stopped")
            needed = self.outcomes.get(piece.needs)
            if needed and needed.status:
                return Outcome(status=None, why=f"{piece.needs}: exit status {needed.status}")
        return self._execute(piece)

    def _execute(self, piece: Piece) -> Outcome:
        log = FOLDER / f"{short_name(piece.name)}.log"
        say(f"{piece.name}: started (log: {FOLDER.name}/{log.name})")
        started = time.monotonic()
        # What one process has compiled, pytest's own form of the tests included, all others read.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                piece.argv,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self._changed:
                self._running[piece.name] = process
                late = self._stopped
            if late:
                interrupt(process)
            status, cpu_s = self._wait(piece, process, started)
            with self._changed:
                del self._running[piece.name]
        seconds = time.monotonic() - started
        text = log.read_text("utf-8", "replace")
        say(f"{piece.name}: exit status {status} after {seconds:.0f} s\n{text}")
        lines = [line[:200] for line in text.splitlines() if line.startswith(FAILURES)]
        failed = list(dict.fromkeys(lines))  # A script may print them once more.
        failed = failed if status else []
        return Outcome(status=status, seconds=seconds, cpu_s=cpu_s, failed=failed)

    def _wait(
        self, piece: Piece, process: subprocess.Popen[bytes], started: float
    ) -> tuple[int, float]:
        """Return the exit status and the CPU seconds of a piece."""
        ended = os.pidfd_open(process.pid)
        try:
            while not select.select([ended], [], [], SAYS_NOTHING_S)[0]:
                say(f"{piece.name}: runs for {time.monotonic() - started:.0f} s")
        finally:
            os.close(ended)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, used.ru_utime + used.ru_stime


def interrupt(piece: subprocess.Popen[bytes]) -> None:
    """Interrupt a piece as Ctrl-C does: pytest then ends what its fixtures started.

    A second interrupt would end that.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(piece.pid, signal.SIGINT)


def short_name(piece: str) -> str:
    """Return the name of a piece for files and commands."""
    return piece.lower().replace(" ", "-")


_printing = threading.Lock()


def say(text: str) -> None:
    """Print lines in one piece, at once."""
    with _printing:
        print(f"suite: {text}", flush=True)


def table(suite: Suite) -> list[str]:
    """Return what every piece took, and the names of the tests that failed."""
    lines = ["seconds     CPU  piece"]
    for piece in suite.pieces:
        outcome = suite.outcomes[piece.name]
        if outcome.status is None:
            lines.append(f"      –       –  {piece.name}: left out ({outcome.why})")
            continue
        failed = f": FAILED, exit status {outcome.status}" if outcome.status else ""
        lines.append(f"{outcome.seconds:7.0f} {outcome.cpu_s:7.0f}  {piece.name}{failed}")
        lines += [f"                   {line}" for line in outcome.failed]
    return lines


def verdict(suite: Suite) -> int:
    """Return 0 if everything passed that could run here."""
    bad = [
        name
        for name, outcome in suite.outcomes.items()
        if outcome.status and not (name == NPU_ENVIRONMENT and outcome.status == EXIT_UNAVAILABLE)
    ]
    return 1 if bad or suite._stopped else 0


def commit() -> str:
    """Return what is tested: the commit, or nothing that could be resumed in a changed tree."""
    changed = subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    return "" if changed else head


@contextlib.contextmanager
def stopping(suite: Suite) -> Iterator[None]:
    """End the suite on a signal."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: suite.stop()) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Piece]:
    """Return the pieces to run; ends with an error that lists the names if one is unknown."""
    found = {short_name(each.name): each for each in pieces(full=options.full)}
    if unknown := [name for name in options.only if name not in found]:
        parser.error(f"no piece is named {', '.join(unknown)}: {', '.join(found)}")
    names = {found[name].name for name in options.only or found}
    needed = {each.needs for each in found.values() if each.name in names}
    return [each for each in found.values() if each.name in names | needed]


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return 0 if everything passed."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.suite", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "only", nargs="*", metavar="PIECE", help="run only these pieces, and what they need"
    )
    parser.add_argument("--full", action="store_true", help="run also what `make test` leaves out")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what passed for this very commit before"
    )
    options = parser.parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    key = f"{commit()} {'full' if options.full else 'short'}"
    kept = json.loads(STATE.read_text("utf-8")) if STATE.is_file() else {}
    suite = Suite(chosen(parser, options), set(kept.get(key, ())) if options.resume else set())
    started = time.monotonic()
    with stopping(suite):
        suite.run()
    passed = {name for name, outcome in suite.outcomes.items() if outcome.status == 0}
    if commit() and not options.only:
        STATE.write_text(json.dumps({key: sorted(passed | suite.done)}), "utf-8")
    say("\n".join([f"{time.monotonic() - started:.0f} s in all", *table(suite)]))
    if any(outcome.status == EXIT_UNAVAILABLE for outcome in suite.outcomes.values()):
        say(
            "#" * 80 + "\n# SKIPPED: the tests of the NPU side did NOT run: see above.\n" + "#" * 80
        )
    return verdict(suite)


if __name__ == "__main__":
    sys.exit(main())

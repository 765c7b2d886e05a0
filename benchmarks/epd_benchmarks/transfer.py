"""``epd-bench transfer``: from the encoder's output to the placed tensor, without an engine.

A real sender in one process and a real receiver and placer in another (`ends`) move items of
several sizes by several paths; all combinations take turns, so that what disturbs the machine
disturbs all of them. Each item is copied once within one process too: the peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from numpy import quantile

from epd_benchmarks import report
from epd_benchmarks.stand_in import TOKEN_BYTES, VALUES, Command, CommandDone, new_secret
from epd_portable.config.instance import AUTO, InstanceConfig
from epd_portable.config.quantities import UNITS
from epd_portable.demo.servers import free_port
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import registry

WARM_UP_ROUNDS = 2
ENCODE_S = (0.01, 0.0)
"""Times from the order to the output. With the first the grant is there before the output, as
mostly in an engine; with 0 it is waited for."""

_START_TIMEOUT_S = 120.0
_WAIT_TIMEOUT_S = 30.0
_STOP_GRACE_S = 10.0


@dataclass(kw_only=True, slots=True, eq=False)
class TransferCase:
    """A combination, and its times in the order of the rounds, in seconds.

    Attributes:
        encode_s: One of `ENCODE_S`.
        total_s: From the output to the tensor that can be read.
        placing_s: The part of it since the consumer's step began to place the item.
        memcpy_s: A plain copy of the same bytes right before, within one process; on devices from
            the producer's device to the consumer's.
    """

    path: str
    nbytes: int
    encode_s: float
    total_s: list[float] = field(default_factory=list)
    placing_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)

    def add(self, sent: CommandDone, placed: CommandDone) -> None:
        """Add a transfer by the reports of its two ends."""
        self.total_s.append(placed.at_s - sent.at_s)
        self.placing_s.append(placed.at_s - placed.step_s)
        self.memcpy_s.append(sent.memcpy_s)

    def __str__(self) -> str:
        """Return it as tables name it."""
        when = "granted before" if self.encode_s else "granted after"
        # Items are multiples of 4 KiB.
        unit = next(each for each in ("GiB", "MiB", "KiB") if self.nbytes % UNITS[each] == 0)
        return f"{self.path}, {self.nbytes // UNITS[unit]} {unit}, {when}"


def choose_paths(
    asked: Sequence[str], platform: str, devices: int
) -> tuple[list[str], dict[str, str]]:
    """Return the paths that were requested, or all that these devices have, and why not others.

    Raises:
        ConfigError: A requested path cannot be measured.
    """
    described = registry.describe(platform, platform)
    reasons = {name: reason for name, usable, reason in described if not usable}
    for entry in registry.offered(AUTO, platform):
        if not entry.one_sided and TRAITS[platform].needs_device_copy and devices < 2:
            reasons[entry.name] = "each of the two ends of a group needs a device of its own"
    usable = [entry.name for entry in registry.PATHS if entry.name not in reasons]
    for path in asked:
        if path in reasons:
            raise ConfigError(
                f"--path {path}: {reasons[path]}; on {platform} there are {', '.join(usable)} here"
            )
    return (list(dict.fromkeys(asked)), {}) if asked else (usable, reasons)


def measure(
    paths: Sequence[str], sizes: Sequence[int], platform: str, *, devices: int, repeat: int
) -> list[TransferCase]:
    """Measure every path and size ``repeat`` times, in turns, after unmeasured rounds.

    Sizes are multiples of `TOKEN_BYTES`. The producer takes the first device, the consumer the
    second if there is one. `MeasurementError` if an end failed.
    """
    combinations = itertools.product(ENCODE_S, sizes, paths)
    cases = [TransferCase(path=p, nbytes=n, encode_s=s) for s, n, p in combinations]
    with new_secret() as secret_file, ExitStack() as stack:
        report.progress("starting a producer and a consumer for each path")
        common: dict[str, Any] = {"platform": platform, "secret_file": secret_file}
        common["wait_timeout_s"] = _WAIT_TIMEOUT_S
        pairs = {}
        for path in paths:
            producer = InstanceConfig(instance=f"producer-{path}", path=path, **common)
            consumer = InstanceConfig(
                instance=f"consumer-{path}",
                path=path,
                device_index=min(1, devices - 1),
                control_address=f"tcp://127.0.0.1:{free_port()}",
                data_address="tcp://127.0.0.1:*",
                pool=f"epd-bench-{os.getpid()}-{path}",
                pool_bytes=2 * max(sizes),
                can_encode=False,
                **common,
            )
            both = (("consume", consumer), ("produce", producer))
            ends = [stack.enter_context(start_end(*each, os.environ)) for each in both]
            pairs[path] = ends, consumer
        for ends, _ in pairs.values():
            for end in ends:
                end.receive(_START_TIMEOUT_S)
        numbers = itertools.count()
        for turn in range(-WARM_UP_ROUNDS, repeat):
            begin_s = time.monotonic()
            for case in cases:
                sent, placed = _move(case, next(numbers), *pairs[case.path])
                if turn >= 0:
                    case.add(sent, placed)
            what = f"round {turn + 1} of {repeat}" if turn >= 0 else "warm-up"
            report.progress(f"{what}: {len(cases)} transfers in {time.monotonic() - begin_s:.1f} s")
    return sorted(cases, key=lambda case: (paths.index(case.path), case.nbytes))


@dataclass(frozen=True, slots=True)
class EndProcess:
    """A running process of `epd_benchmarks.ends`; its name is for messages."""

    name: str
    pipe: Connection[Command, CommandDone]

    def send(self, command: Command) -> None:
        """Send a command; `receive` reports a process that has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(command)

    def receive(self, timeout_s: float) -> CommandDone:
        """Return its reply, when it is ready and to each command; `MeasurementError` if none."""
        if not self.pipe.poll(timeout_s):
            raise MeasurementError(f"{self.name} did not reply in {timeout_s:g} s")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise MeasurementError(f"{self.name} ended; its message is above") from error


@contextlib.contextmanager
def start_end(
    role: str, config: InstanceConfig, env: Mapping[str, str], *, enter: Sequence[str] = ()
) -> Iterator[EndProcess]:
    """Start an end to ``produce`` or ``consume``, and stop it with the block.

    The command ``enter`` starts it, for example in another namespace.
    """
    argv = [*enter, sys.executable, "-m", "epd_benchmarks.ends", role, config.model_dump_json()]
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                env={**env, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=2,  # Its standard error.
                pass_fds=(theirs.fileno(),),
                # A signal to the whole group would end it before it removes its pool.
                start_new_session=True,
            )
        try:
            yield EndProcess(config.instance, ours)
        finally:
            ours.close()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _move(
    case: TransferCase, number: int, ends: Sequence[EndProcess], consumer: InstanceConfig
) -> tuple[CommandDone, CommandDone]:
    """Move one item; return the reports of the producer and of the consumer."""
    command = Command(
        name=f"item-{number}",
        num_tokens=case.nbytes // TOKEN_BYTES,
        value=number % VALUES + 1,
        encode_s=case.encode_s,
        consumer=consumer.control_address,
        device=consumer.device_index,
    )
    for end in ends:
        end.send(command)
    placed, sent = (end.receive(_WAIT_TIMEOUT_S * 2) for end in ends)
    return sent, placed


def make_report(
    cases: Sequence[TransferCase], place: str, left_out: Mapping[str, str]
) -> report.Document:
    """Return the page; `left_out` are paths that were not measured, with the reason."""
    reasons = "; ".join(f"{path} ({reason})" for path, reason in left_out.items())
    return report.make_report(
        "From the encoder's output to the placed tensor, by path and size",
        notes=(
            f"{place} Not measured: {reasons}." if reasons else place,
            "One producer and one consumer process for each path, no engine; the combinations take "
            "turns. Placed: the tensor can be read, on devices the copy is complete.",
            f"The order comes {ENCODE_S[0] * 1000:g} ms before the output (granted before), or "
            "with it (granted after): then the grant is waited for.",
            "Ratio: total time by that of a memcpy of the same bytes right before, median of the "
            "pairs with their quartiles. Other times are medians over all rounds; placing is the "
            "part since the step that places the item began.",
        ),
        tables={"Against memcpy of the same bytes": [*map(_against_memcpy, cases)]},
        samples=[dataclasses.asdict(case) for case in cases],
    )


def _against_memcpy(case: TransferCase) -> report.Row:
    # Pair by pair: disturbances of both at once cancel out.
    ratios = [total / copy for total, copy in zip(case.total_s, case.memcpy_s, strict=True)]
    median_s = quantile(case.total_s, 0.5)
    return {
        "path, size, grant": str(case),
        "ratio": report.ratio(ratios),
        "median, ms": f"{median_s * 1000:.2f}",
        "p90, ms": f"{quantile(case.total_s, 0.9) * 1000:.2f}",
        "placing, ms": f"{quantile(case.placing_s, 0.5) * 1000:.3f}",
        "memcpy, ms": f"{quantile(case.memcpy_s, 0.5) * 1000:.3f}",
        "GB/s": f"{case.nbytes / median_s / 1e9:.3g}",
        "rounds": str(len(case.total_s)),
    }

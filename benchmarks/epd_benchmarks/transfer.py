"""``epd-bench transfer``: from the encoder's output to the placed tensor, without an engine.

A real sender in one process and a real receiver and placer in another (`ends`) move items of
several sizes by several paths; all combinations take turns, so that what disturbs the machine
disturbs all of them. Each item is copied once within one process too: the peer.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from epd_benchmarks.console import new_secret, progress
from epd_benchmarks.end_process import EndProcess, start_end
from epd_benchmarks.report import Report, Row
from epd_benchmarks.stand_in import TOKEN_BYTES, VALUES, Command, CommandDone
from epd_benchmarks.stats import paired_ratio, quantile
from epd_portable.config.instance import InstanceConfig, PlatformName
from epd_portable.config.quantities import UNITS
from epd_portable.config.transfer import AUTO
from epd_portable.demo.servers import free_port
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer import registry

WARM_UP_ROUNDS = 2
ENCODE_S = (0.01, 0.0)
"""Times from the order to the output. With the first the grant is there before the output, as
mostly in an engine; with 0 it is waited for."""

_NAME = "path, size, grant"
_START_TIMEOUT_S = 120.0
_WAIT_TIMEOUT_S = 30.0


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
        in_group = not entry.one_sided
        if in_group and TRAITS[platform].needs_device_copy and devices < 2:
            reasons[entry.name] = "each of the two ends of a group needs a device of its own"
    usable = [entry.name for entry in registry.PATHS if entry.name not in reasons]
    for path in asked:
        if path in reasons:
            raise ConfigError(
                f"--path {path}: {reasons[path]}; on {platform} there are {', '.join(usable)} here"
            )
    return (list(dict.fromkeys(asked)), {}) if asked else (usable, reasons)


def measure(
    paths: Sequence[str], sizes: Sequence[int], platform: PlatformName, *, devices: int, repeat: int
) -> list[TransferCase]:
    """Measure every path and size ``repeat`` times, in turns, after unmeasured rounds.

    Sizes are multiples of `TOKEN_BYTES`. The producer takes the first device, the consumer the
    second if there is one. `MeasurementError` if an end failed.
    """
    combinations = itertools.product(ENCODE_S, sizes, paths)
    cases = [TransferCase(path=p, nbytes=n, encode_s=s) for s, n, p in combinations]
    with new_secret() as secret_file, ExitStack() as stack:
        progress("starting a producer and a consumer for each path")
        common: dict[str, Any] = {"platform": platform, "secret_file": secret_file}
        common["wait_timeout_s"] = _WAIT_TIMEOUT_S
        pairs: dict[str, _Pair] = {}
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
            pairs[path] = _Pair(
                stack.enter_context(start_end("produce", producer, os.environ)),
                stack.enter_context(start_end("consume", consumer, os.environ)),
                consumer,
            )
        for pair in pairs.values():
            for end in (pair.producer, pair.consumer):
                end.receive(_START_TIMEOUT_S)
        numbers = itertools.count()
        for turn in range(-WARM_UP_ROUNDS, repeat):
            begin_s = time.monotonic()
            for case in cases:
                sent, placed = pairs[case.path].move(case, next(numbers))
                if turn >= 0:
                    case.add(sent, placed)
            what = f"round {turn + 1} of {repeat}" if turn >= 0 else "warm-up"
            progress(f"{what}: {len(cases)} transfers in {time.monotonic() - begin_s:.1f} s")
    return sorted(cases, key=lambda case: (paths.index(case.path), case.nbytes))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two ends of a path, in processes of `epd_benchmarks.ends`."""

    producer: EndProcess
    consumer: EndProcess
    consumer_config: InstanceConfig

    def move(self, case: TransferCase, number: int) -> tuple[CommandDone, CommandDone]:
        """Move one item; return the reports of the producer and of the consumer."""
        command = Command(
            name=f"item-{number}",
            num_tokens=case.nbytes // TOKEN_BYTES,
            value=number % VALUES + 1,
            encode_s=case.encode_s,
            consumer=self.consumer_config.control_address,
            device=self.consumer_config.device_index,
        )
        for end in (self.consumer, self.producer):
            end.send(command)
        placed = self.consumer.receive(_WAIT_TIMEOUT_S * 2)
        return self.producer.receive(_WAIT_TIMEOUT_S * 2), placed


def describe_place(platform: PlatformName, runtime: str, devices: int) -> str:
    """Return in a sentence where the two ends are, for `make_report`."""
    of_devices = (
        "both ends on device 0, the only one",
        "producer on device 0, consumer on device 1",
    )
    has_devices = TRAITS[platform].needs_device_copy
    ends = of_devices[devices > 1] if has_devices else "both ends on its cores"
    return f"Platform {platform} ({runtime}): {ends}."


def make_report(cases: Sequence[TransferCase], place: str, left_out: Mapping[str, str]) -> Report:
    """Return the page; `left_out` are paths that were not measured, with the reason."""
    paths = list(dict.fromkeys(case.path for case in cases))
    tables = {"Against memcpy of the same bytes": [*map(_against_memcpy, cases)]}
    if len(paths) > 1:
        tables["By another path, each item by that of the same round"] = [
            _between(case, cases, paths) for case in cases
        ]
    reasons = "; ".join(f"{path} ({reason})" for path, reason in left_out.items())
    return Report(
        title="From the encoder's output to the placed tensor, by path and size",
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
        tables=tables,
        summary={"place": place, "left_out": dict(left_out)},
        samples=[dataclasses.asdict(case) for case in cases],
    )


def _against_memcpy(case: TransferCase) -> Row:
    median_s = quantile(case.total_s, 0.5)
    return {
        _NAME: str(case),
        "ratio": str(paired_ratio(case.total_s, case.memcpy_s)),
        "median, ms": f"{median_s * 1000:.2f}",
        "p90, ms": f"{quantile(case.total_s, 0.9) * 1000:.2f}",
        "placing, ms": f"{quantile(case.placing_s, 0.5) * 1000:.3f}",
        "memcpy, ms": f"{quantile(case.memcpy_s, 0.5) * 1000:.3f}",
        "GB/s": f"{case.nbytes / median_s / 1e9:.3g}",
        "rounds": str(len(case.total_s)),
    }


def _between(case: TransferCase, cases: Sequence[TransferCase], paths: Sequence[str]) -> Row:
    """Return the row of a case by each path."""
    row = {_NAME: str(case)} | {f"by {path}": "–" for path in paths}
    for peer in cases:
        if peer is not case and (peer.nbytes, peer.encode_s) == (case.nbytes, case.encode_s):
            row[f"by {peer.path}"] = str(paired_ratio(case.total_s, peer.total_s))
    return row

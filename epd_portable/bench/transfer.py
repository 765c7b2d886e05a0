"""``epd-bench transfer``: from the encoder's output to the placed tensor, without an engine.

A real sender in one process and a real receiver and placer in another (`ends`) move items of
several sizes by several paths; all combinations take turns, so that what disturbs the machine
disturbs all of them. Each item is copied once within one process too: the peer.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from epd_portable.bench.commands import TOKEN_BYTES, VALUES, Command, CommandDone
from epd_portable.bench.scratch import scratch_folder
from epd_portable.bench.servers import free_port
from epd_portable.bench.traces import Handover, handovers, read_events
from epd_portable.config.instance import InstanceConfig, PlatformName
from epd_portable.errors import MeasurementError
from epd_portable.platforms import registry
from epd_portable.platforms.traits import TRAITS

WARM_UP_ROUNDS = 2

_START_TIMEOUT_S = 120.0
_WAIT_TIMEOUT_S = 30.0
_STOP_GRACE_S = 10.0
_STDERR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlace:
    """Where the two ends are.

    Attributes:
        platform: Of both.
        runtime: What was found there, with its version.
        devices: How many there are; a CPU is one.
    """

    platform: PlatformName
    runtime: str
    devices: int

    @property
    def producer(self) -> int:
        """Device of the producer."""
        return 0

    @property
    def consumer(self) -> int:
        """Device of the consumer: another one where there is one."""
        return min(1, self.devices - 1)

    @property
    def is_device(self) -> bool:
        """Whether items are in device memory at both ends."""
        return TRAITS[self.platform].needs_device_copy


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCase:
    """One combination.

    Attributes:
        path: Transfer path asked for.
        nbytes: Size of the item.
        encode_s: Time from the order to the output. With a few milliseconds the grant is there
            before the output, as mostly in an engine; with 0 it is waited for.
    """

    path: str
    nbytes: int
    encode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSample:
    """One measured transfer; times in seconds.

    Attributes:
        path: As in `TransferCase`, like the next two.
        nbytes: As above.
        encode_s: As above.
        granted_before: See `Handover`, like `turns`.
        turns: As above.
        total_s: From the output to the placed tensor.
        grant_wait_s: See `Handover`, as are the next three, which add up to the total.
        write_s: As above.
        notice_s: As above.
        place_s: As above.
        memcpy_s: A plain copy of the same bytes within one process right before; on devices from
            the producer's device to the consumer's.
    """

    path: str
    nbytes: int
    encode_s: float
    granted_before: bool
    turns: int
    total_s: float
    grant_wait_s: float
    write_s: float
    notice_s: float
    place_s: float
    memcpy_s: float

    @property
    def control_s(self) -> float:
        """See `Handover`."""
        return self.grant_wait_s + self.notice_s


def find(platform: PlatformName) -> TransferPlace:
    """Look where a platform's ends can be.

    Raises:
        PlatformUnavailableError: The platform cannot be used here; says why.
    """
    found = registry.get(platform)
    return TransferPlace(
        platform=platform, runtime=found.availability().reason, devices=found.device_count()
    )


def measure(
    cases: Sequence[TransferCase],
    place: TransferPlace,
    *,
    repeat: int,
    report: Callable[[str], None],
) -> list[TransferSample]:
    """Measure every case ``repeat`` times, in turns, after unmeasured rounds.

    Args:
        cases: Combinations; sizes are multiples of `TOKEN_BYTES`.
        place: Where the ends are started.
        repeat: Measured rounds.
        report: Gets a progress line a round.

    Raises:
        MeasurementError: An end failed, or a transfer took another path than asked for.
    """
    with scratch_folder() as (folder, secret_file), ExitStack() as stack:
        report("starting a producer and a consumer for each path")
        paths = dict.fromkeys(case.path for case in cases)
        room = 2 * max(case.nbytes for case in cases)
        pairs = {
            path: stack.enter_context(_pair(path, place, room, folder, secret_file))
            for path in paths
        }
        moved: dict[str, tuple[TransferCase, float]] = {}
        number = 0
        for turn in range(-WARM_UP_ROUNDS, repeat):
            begin_s = time.monotonic()
            for case in cases:
                number += 1
                name = f"{'item' if turn >= 0 else 'warm-up'}-{number}"
                moved[name] = case, pairs[case.path].move(name, case, number)
            what = f"round {turn + 1} of {repeat}" if turn >= 0 else "warm-up"
            report(f"{what}: {len(cases)} transfers in {time.monotonic() - begin_s:.1f} s")
        end = "item.complete" if place.is_device else "item.placed"
        ways = handovers(read_events(folder), end=end)
    measured = [way for way in ways if way.transfer.startswith("item-")]
    if len(measured) != len(cases) * repeat:
        raise MeasurementError(
            f"traces hold {len(measured)} whole transfers of {len(cases) * repeat}: an event is "
            "missing; the versions of this command and of the package may differ"
        )
    return [_sample(way, *moved[way.transfer]) for way in measured]


def _sample(way: Handover, case: TransferCase, memcpy_s: float) -> TransferSample:
    return TransferSample(
        path=way.path,
        nbytes=way.nbytes,
        encode_s=case.encode_s,
        granted_before=way.granted_before,
        turns=way.turns,
        total_s=way.total_s,
        grant_wait_s=way.grant_wait_s,
        write_s=way.write_s,
        notice_s=way.notice_s,
        place_s=way.place_s,
        memcpy_s=memcpy_s,
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A producer and a consumer, by one path."""

    producer: _End
    consumer: _End
    control: str
    device: int

    def move(self, name: str, case: TransferCase, number: int) -> float:
        """Move one item; return what a plain copy of it took, in seconds."""
        command = Command(
            name=name,
            num_tokens=case.nbytes // TOKEN_BYTES,
            value=number % VALUES + 1,
            encode_s=case.encode_s,
            consumer=self.control,
            device=self.device,
        )
        for end in (self.consumer, self.producer):
            end.tell(command)
        self.consumer.hear(_WAIT_TIMEOUT_S * 2)
        return self.producer.hear(_WAIT_TIMEOUT_S * 2).memcpy_s


@contextmanager
def _pair(
    path: str, place: TransferPlace, pool_bytes: int, trace_dir: Path, secret_file: str
) -> Iterator[_Pair]:
    control = f"tcp://127.0.0.1:{free_port()}"
    producer = InstanceConfig(
        instance=f"producer-{path}",
        platform=place.platform,
        device_index=place.producer,
        path=path,
        wait_timeout_s=_WAIT_TIMEOUT_S,
        secret_file=secret_file,
    )
    consumer = InstanceConfig(
        instance=f"consumer-{path}",
        platform=place.platform,
        device_index=place.consumer,
        path=path,
        wait_timeout_s=_WAIT_TIMEOUT_S,
        secret_file=secret_file,
        control_address=control,
        data_address="tcp://127.0.0.1:*",
        pool=f"epd-bench-{os.getpid()}-{path}",
        pool_bytes=pool_bytes,
        can_encode=False,
    )
    with ExitStack() as stack:
        ends = [
            stack.enter_context(_end(role, config, trace_dir))
            for role, config in (("produce", producer), ("consume", consumer))
        ]
        for end in ends:
            end.hear(_START_TIMEOUT_S)
        yield _Pair(ends[0], ends[1], control, place.consumer)


@dataclass(frozen=True, slots=True)
class _End:
    name: str
    commands: IO[bytes]
    answers: IO[bytes]

    def tell(self, command: Command) -> None:
        """Give a command.

        Raises:
            MeasurementError: The end is gone.
        """
        try:
            self.commands.write(msgspec.json.encode(command) + b"\n")
        except BrokenPipeError as error:
            raise MeasurementError(f"{self.name} ended; its message is above") from error

    def hear(self, timeout_s: float) -> CommandDone:
        """Wait for the answer to one command.

        Raises:
            MeasurementError: The end is gone, or does not answer in time.
        """
        if not select.select([self.answers], [], [], timeout_s)[0]:
            raise MeasurementError(f"{self.name} did not answer in {timeout_s:g} s")
        line = self.answers.readline()
        if not line:
            raise MeasurementError(f"{self.name} ended; its message is above")
        return msgspec.json.decode(line, type=CommandDone)


@contextmanager
def _end(role: str, config: InstanceConfig, trace_dir: Path) -> Iterator[_End]:
    env = {
        "EPD_TRACE_DIR": str(trace_dir),
        "EPD_INSTANCE": config.instance,
        "OMP_NUM_THREADS": "1",
    }
    # Not by standard output, on which runtimes of devices speak too.
    answers, out = os.pipe()
    argv = [sys.executable, "-m", "epd_portable.bench.ends", role, config.model_dump_json()]
    with os.fdopen(answers, "rb", buffering=0) as said:
        process = subprocess.Popen(
            [*argv, str(out)],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            bufsize=0,
            pass_fds=(out,),
        )
        os.close(out)
        assert process.stdin is not None
        try:
            yield _End(config.instance, process.stdin, said)
        finally:
            process.stdin.close()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

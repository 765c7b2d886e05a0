"""The two processes of `transfer`: a real sender and a real receiver, without an engine.

``python -m epd_benchmarks.ends produce|consume CONFIG DESCRIPTOR`` takes commands from the
`multiprocessing` connection of that file descriptor, and replies to each. On devices nothing is
measured by when it was queued: outputs are complete before they are handed over, and copies are
waited for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from multiprocessing.connection import Connection

import torch

from epd_benchmarks.stand_in import DTYPE, TOKEN_BYTES, Command, CommandDone, StandInRequest
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.sender import Sender
from epd_portable.errors import MeasurementError
from epd_portable.items.placer import Placer
from epd_portable.items.requests import PrefillRequests
from epd_portable.items.shell import ItemShell
from epd_portable.platforms import registry
from epd_portable.platforms.base import DeviceEvent, Platform
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.worker_endpoint import WorkerEndpoint
from epd_portable.wire.params import ExpectedTransfer, PrefillParams

REST_S = 1e-3
"""Longest rest of the consumer between two steps, and of the producer between two polls."""
_FINGERPRINT = "measurement"


class Consumer:
    """A receiver and a placer, stepped as by an engine that has nothing else to do."""

    def __init__(self, config: InstanceConfig, platform: Platform) -> None:
        self._timeout_s = config.wait_timeout_s
        self._platform = platform
        copies = DeviceCopies(platform, config.device_index)
        self._endpoint = WorkerEndpoint(config, copies)
        cache_size = config.pool_bytes // TOKEN_BYTES
        try:
            self._shell = ItemShell(config, fingerprint=_FINGERPRINT, cache_size=cache_size)
        except BaseException:
            self._endpoint.close()
            raise
        self._prefill = PrefillRequests(config, self._shell)
        self._cache = self._shell.cache
        self._shell.listen()
        self._placer = Placer(copies, self._endpoint)
        self._outputs: dict[str, torch.Tensor] = {}
        self._step_s = 0.0

    def run(self, command: Command) -> CommandDone:
        """Receive one item, check its content and release its slot, or raise."""
        name = command.name
        request = StandInRequest(name, [name], command.tensor)
        params = PrefillParams(transfers=(ExpectedTransfer(transfer_id=name, item_uuid=name),))
        with self._shell.lock:
            self._prefill.arrived(name, request.prompt(), params)
        self._step()
        while name not in self._outputs:
            with self._shell.lock:
                self._prefill.may_schedule(name, 0)
                failed = self._prefill.take_unavailable()
            if failed:
                raise MeasurementError(f"item {name} did not arrive in {self._timeout_s:g} s")
            self._shell.rest(REST_S)
            self._step()
        at_s = time.monotonic()
        if not bool((self._outputs[name].cpu() == command.value).all()):
            raise MeasurementError(f"item {name} of {command.tensor} arrived with other content")
        with self._shell.lock:
            self._prefill.finished(name)
            self._cache.reset()
        self._step()
        return CommandDone(at_s=at_s, step_s=self._step_s)

    def close(self) -> None:
        """Stop receiving."""
        self._placer.clock.close()
        self._shell.close()
        self._endpoint.close()

    def _step(self) -> None:
        with self._shell.lock:
            self._shell.before_step()
            freed = self._cache.get_freed_mm_hashes()
            orders = self._shell.orders.take_orders(freed, computes=True)
        for mm_hash in freed:
            self._outputs.pop(mm_hash, None)
        if orders.placements:
            self._step_s = time.monotonic()
        self._placer.carry_out(orders, self._outputs)
        if orders.placements and self._platform.traits.needs_device_copy:
            # The current stream waits for the placer's copies, so an event on it is behind them.
            _wait(self._platform.record_event(), self._timeout_s)
        with self._shell.lock:
            self._shell.step_done()


class Producer:
    """A sender that is given outputs without an encoder; and a plain copy, for comparison."""

    def __init__(self, config: InstanceConfig, platform: Platform) -> None:
        self._timeout_s = config.wait_timeout_s
        self._platform = platform
        self._device = platform.device(config.device_index)
        self._sender = Sender(config, _FINGERPRINT, DeviceCopies(platform, config.device_index))
        self._secret = Secret.read(config.secret_file)
        self._dtype = getattr(torch, DTYPE)
        self._copy = torch.empty(0, dtype=self._dtype)

    def run(self, command: Command) -> CommandDone:
        """Deliver one item; `MeasurementError` if it is not acknowledged in time."""
        output = torch.full(
            command.tensor.shape, command.value, dtype=self._dtype, device=self._device
        )
        _wait(self._platform.record_event(), self._timeout_s)
        memcpy_s = self._memcpy(output, self._platform.device(command.device))
        order = TransferOrder(
            transfer_id=command.name,
            mm_hash=command.name,
            consumer=command.consumer,
            tensor=command.tensor,
            item_uuid=command.name,
            # As a front gives it: the announcement may come before the consumer's request.
            proof=self._secret.sign_transfer(command.name, command.name, command.consumer),
        )
        self._sender.submit(order, None)
        time.sleep(command.encode_s)
        at_s = time.monotonic()
        self._sender.output_ready(command.name, output)
        deadline_s = time.monotonic() + self._timeout_s
        while command.name not in self._sender.progress.take_ended():
            if time.monotonic() > deadline_s:
                raise MeasurementError(
                    f"item {command.name} was not acknowledged in {self._timeout_s:g} s"
                )
            time.sleep(REST_S)
        return CommandDone(at_s=at_s, memcpy_s=memcpy_s)

    def close(self) -> None:
        """Stop sending."""
        self._sender.close()

    def _memcpy(self, output: torch.Tensor, device: torch.device) -> float:
        """Copy within this process to the consumer's device; return seconds until completion."""
        # The target is kept, so that its allocation is not measured.
        if self._copy.numel() < output.numel():
            self._copy = torch.empty(output.numel(), dtype=self._dtype, device=device)
        target = self._copy[: output.numel()].view(output.shape)
        begin_s = time.monotonic()
        target.copy_(output, non_blocking=True)
        _wait(self._platform.record_event(), self._timeout_s)
        return time.monotonic() - begin_s


def main(role: str, config_json: str, descriptor: str) -> None:
    """Carry out commands until the connection ends."""
    torch.set_num_threads(1)
    _take_cores(role)
    config = InstanceConfig.model_validate_json(config_json)
    platform = registry.get(config.platform)
    platform.set_device(config.device_index)
    end = Consumer(config, platform) if role == "consume" else Producer(config, platform)
    pipe: Connection[CommandDone, Command] = Connection(int(descriptor))
    with pipe, contextlib.closing(end):
        pipe.send(CommandDone())
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                return
            pipe.send(end.run(command))


def _take_cores(role: str) -> None:
    """Bind the two ends to different cores, a half each, as the instances of a topology are."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half:
        os.sched_setaffinity(0, cores[half:] if role == "consume" else cores[:half])


def _wait(event: DeviceEvent, timeout_s: float) -> None:
    """Block until device work is complete, without pauses, which would be measured too."""
    deadline_s = time.monotonic() + timeout_s
    while not event.done():
        if time.monotonic() > deadline_s:
            raise MeasurementError(f"the device did not complete a copy in {timeout_s:g} s")


if __name__ == "__main__":
    main(*sys.argv[1:])

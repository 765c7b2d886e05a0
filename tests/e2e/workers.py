"""Workers that do as the real ones, but slow down or spoil what they do while a file asks for it.

Named on an engine's command line by ``--set instances.<role>.engine_args.worker_cls=...``.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.platforms import current_platform

from epd_portable.encode.chunks import ChunkEncoder
from epd_portable.items.placer import EncodeOrder
from epd_portable.platforms.traits import TRAITS
from epd_portable.vllm_plugin import compat, worker
from tests.e2e import flags

FLAGS = Path(os.environ["EPD_TEST_FLAGS"])
Worker: Any = getattr(worker, TRAITS[current_platform.device_type].worker_cls.rpartition(".")[2])


def _hold() -> None:
    """Wait as long as encoders are held, or this instance's is."""
    with contextlib.suppress(FileNotFoundError):
        while (FLAGS / flags.HOLD).read_text() in ("", os.environ["EPD_INSTANCE"]):
            time.sleep(0.01)


def _delay(flag: str) -> None:
    """Take as much longer as a file says; it may go at any moment."""
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float((FLAGS / flag).read_text() or 0))


class _SlowEncoder:
    def _execute_mm_encoder(self, scheduler_output: Any) -> Any:
        if scheduler_output.scheduled_encoder_inputs:
            _delay(flags.SLOW)
            with contextlib.suppress(FileNotFoundError):
                if not (FLAGS / flags.NO_MEMORY).read_text():
                    (FLAGS / flags.NO_MEMORY).unlink()
                raise torch.OutOfMemoryError("as a file says")
            _hold()
        return super()._execute_mm_encoder(scheduler_output)


class _SpoiledItems:
    """Shifts the columns of items that arrive by one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def begin_step(self, metadata: Any, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._real.begin_step(metadata, encoder_cache)
        if (FLAGS / flags.SPOIL).exists():
            for placement in metadata.receipts.placements:
                encoder_cache[placement.mm_hash] = encoder_cache[placement.mm_hash].roll(1, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class SlowEncodeWorker(Worker):
    """An encode worker whose encoder takes as long as a file says, and has weights as it says."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if (FLAGS / flags.OTHER_WEIGHTS).exists():
            for module in compat.encoder_modules(self.model_runner.get_model()):
                for parameter in module.parameters():
                    parameter.data.mul_(1.2)

    def init_device(self) -> None:
        super().init_device()
        mixin, runner = type(self.model_runner).__bases__
        # Below our mixin, whose trace then encloses the delay.
        self.model_runner.__class__ = type("SlowRunner", (mixin, _SlowEncoder, runner), {})


class SteeredPDWorker(Worker):
    """A PD worker that spoils what arrives, or whose steps or encoder take longer.

    While a file says so.
    """

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.epd = _SpoiledItems(self.model_runner.epd)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for module in compat.encoder_modules(self.model_runner.get_model()):
            module.register_forward_hook(lambda *_: _delay(flags.SLOW_MODULES))

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            _delay(flags.SLOW_STEPS)
        return super().execute_model(scheduler_output)


class ChunkedPDWorker(Worker):
    """A PD worker that encodes a block of the encoder in each step, as devices do at least."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner, connector = self.model_runner, get_ec_transfer()
        connector.encoder.close()
        model, copies = runner.get_model(), connector._copies

        def encode(item: EncodeOrder) -> torch.Tensor:
            return compat.encode(model, item.modality, item.media, runner.device)

        # Of one rank a step without tokens would encode a whole item.
        connector.encoder = ChunkEncoder(encode, compat.encoder_blocks(model), copies, ranks=2)
        connector.encoder._blocks_embeds = 0


class HeldWorker(Worker):
    """A worker of who encodes and computes text, whose encoder is held while a file says so."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for module in compat.encoder_modules(self.model_runner.get_model()):
            module.register_forward_hook(lambda *_: _hold())

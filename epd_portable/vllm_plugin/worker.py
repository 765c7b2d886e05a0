"""Workers: the platform's own, whose model runner gets our mixin.

``--worker-cls epd_portable.vllm_plugin.worker.EPDCPUWorker``, ``EPDGPUWorker`` or ``EPDNPUWorker``:
`PlatformTraits.worker_cls` and ``worker_base``. The classes are made on first access, so that only
the platform's own base is imported.
EPDGPUWorker has run on one H200, EPDNPUWorker over a simulated runtime only.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.distributed import nixl_utils
from vllm.distributed.ec_transfer import get_ec_transfer

from epd_portable.encode.two_levels import FILLED
from epd_portable.log import trace
from epd_portable.platforms import registry
from epd_portable.platforms.base import MemoryInfo
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.runners.first import EncoderRunnerMixin, PDRunnerMixin
from epd_portable.runners.second import (
    EncodeSecondRunnerMixin,
    OrderingSecondRunnerMixin,
    SecondRunnerMixin,
)
from epd_portable.transfer.cores import cores_kept, timers_late
from epd_portable.vllm_plugin import compat, overlap
from epd_portable.vllm_plugin.video_parts import place_by_whole_videos

logger = logging.getLogger(__name__)

_NIXL_WAIT_US = 1000


_Worker: Any = object


class _WorkerMixin(_Worker):
    """Swaps the runner's class once the platform has made it.

    The runner is chosen deep inside ``init_device`` on all platforms (vLLM 0.26 to 0.33,
    vllm-ascend 0.26 to 0.30); a subclass of the chosen one keeps that choice.
    """

    _traits: PlatformTraits
    _measured: Callable[[], None] = staticmethod(lambda: None)
    """Undoes `compat.small_dummies`, which `load_model` applies in an encode instance."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        with timers_late() if self._on_cores() else nullcontext():
            super().init_device(*args, **kwargs)
        if self._on_cores():
            _permit_amx()
        connector = get_ec_transfer()
        runner: Any = self.model_runner
        second = self.vllm_config.use_v2_model_runner
        compat.check_runner(runner, second=second)
        encodes, chosen = connector.is_producer, type(runner)
        first = (EncoderRunnerMixin if encodes else PDRunnerMixin,)
        mixins = _second_mixins(runner, encodes=encodes) if second else first
        bases = (*mixins, chosen)
        runner.__class__ = type(f"EPD{chosen.__name__}", bases, {})
        runner.epd = connector
        self._slab_bytes = connector.open_worker(runner.device, self.rank)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._slab_bytes:
            # vLLM would take it for free memory, and fill it with KV blocks.
            self.model_runner.model_memory_usage += self._slab_bytes
        model = self.model_runner.get_model()
        # Parts that belong to another stage stay on the meta device.
        loaded = {
            name: sum(part.numel() for part in child.parameters() if not part.is_meta)
            for name, child in model.named_children()
        }
        second = self.vllm_config.use_v2_model_runner
        ahead = self.vllm_config.scheduler_config.async_scheduling
        trace("model.loaded", parameters=loaded, runner=2 if second else 1, ahead=bool(ahead))
        connector = get_ec_transfer()
        if not connector.is_producer:
            place_by_whole_videos(model)
            connector.use_encoder(self.model_runner)
        else:
            self._measured = compat.small_dummies(self.vllm_config)

    def get_kv_cache_spec(self, *args: Any, **kwargs: Any) -> Any:
        # The first that vLLM calls once it has measured the encoder (0.32 and 0.33).
        self._measured()
        return super().get_kv_cache_spec(*args, **kwargs)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        chunked = get_ec_transfer().overlap in ("chunks", "stream") and not self._on_cores()
        if not chunked or self.vllm_config.cache_config.kv_cache_memory_bytes:
            return super().determine_available_memory(*args, **kwargs)
        with overlap.encoder_measured(self.model_runner.get_model()) as peak:
            available = super().determine_available_memory(*args, **kwargs)
        logger.info("%d MiB are left to the encoder, next to a step", peak() >> 20)
        return available - peak()

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        apart = get_ec_transfer().overlap == "stream" and not self._on_cores()
        platform, index = registry.get(self._traits.name), self.model_runner.device.index or 0
        with overlap.captured_apart(platform, index) if apart else nullcontext():
            return super().compile_or_warm_up_model(*args, **kwargs)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        connector = get_ec_transfer()
        if connector.is_producer and compat.version() >= compat.PROFILES_ENCODER:
            # vLLM measures memory only for KV, of which there is none.
            connector.space_bytes = self._cache_bytes(connector.memory, connector.memory_before)
        with cores_kept(), self._nixl_waits():
            super().initialize_from_config(*args, **kwargs)
        trace("kv_cache.ready", layers=len(self.model_runner.kv_caches))

    def _cache_bytes(self, memory: Callable[[], MemoryInfo], before: MemoryInfo) -> int:
        """Return how many bytes the encoder cache may fill; before the scheduler is made.

        It is what a language model's KV would take: what is set for that, on devices at most what
        ``gpu_memory_utilization`` leaves. Of a device that others use, too, what they take
        meanwhile is missing; nothing depends on their holding still.
        """
        found = compat.kv_cache_bytes(self.vllm_config)
        if self._traits.needs_device_copy:
            if found is None:
                self.model_runner.profile_run()  # The process keeps its memory.
            part = self.vllm_config.cache_config.gpu_memory_utilization
            left = memory().left_of(part, before)
            logger.info(
                "gpu_memory_utilization %g leaves %d MiB next to the weights and the largest step",
                *(part, left >> 20),
            )
            found = left if found is None else min(left, found)
        space = int(FILLED * (found or 0))
        logger.info(
            "the encoder cache may fill %d MiB, %d %% of what KV would have",
            *(space >> 20, 100 * FILLED),
        )
        return space

    def reset_encoder_cache(self, *args: Any, **kwargs: Any) -> None:
        # As vLLM's workers do; not every platform's has the method.
        self.model_runner.reset_encoder_cache(*args, **kwargs)
        get_ec_transfer().reset()

    @contextmanager
    def _nixl_waits(self) -> Iterator[None]:
        """Let vLLM's NIXL connector wait for events where engines compute on cores.

        NIXL's Python lets the progress thread poll without a pause (1.5.1), which takes a core from
        an idle instance. It wakes for events; what comes without one is seen after `_NIXL_WAIT_US`.
        """
        config = self.vllm_config.kv_transfer_config
        if not self._on_cores() or config is None or config.kv_connector != "NixlConnector":
            yield
            return
        if nixl_utils.NixlWrapper is None:  # vLLM sets variables for NIXL before it imports it.
            yield  # Its message names what is missing.
            return
        from nixl._api import nixlBind

        make = nixlBind.nixlAgent

        def make_waiting(name: str, settings: Any) -> Any:
            settings.pthrDelay = _NIXL_WAIT_US
            return make(name, settings)

        nixlBind.nixlAgent = make_waiting
        try:
            yield
        finally:
            nixlBind.nixlAgent = make

    def _on_cores(self) -> bool:
        return self._traits.visible_devices_env is None

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        get_ec_transfer().shutdown()
        super().shutdown(*args, **kwargs)


def _permit_amx() -> None:
    """Have the kernel permit Intel AMX to this process, if the processor has it.

    vLLM's attention in bfloat16 (``cpu_attn``, 0.26 to 0.33) uses it without that, and relies on a
    matrix product of oneDNN before, which requests it. A step of a few tokens next to an encoder
    may come first: it ended the engine by SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _second_mixins(runner: Any, *, encodes: bool) -> tuple[type, ...]:
    if not encodes:
        return (SecondRunnerMixin,)
    calls = compat.version() >= compat.STARTS_SAVES
    watched = SecondRunnerMixin if calls else OrderingSecondRunnerMixin
    if compat.encodes_only(runner):
        guards = hasattr(runner, "input_tensor_semaphore")
        return (EncodeSecondRunnerMixin,) if guards else (watched,)
    from epd_portable.vllm_plugin.encode_only import EncodeOnlyMixin

    return (watched, EncodeOnlyMixin)


def __getattr__(name: str) -> type:
    path = f"{__name__}.{name}"
    traits = next((each for each in TRAITS.values() if each.worker_cls == path), None)
    if traits is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, base = traits.worker_base.partition(":")
    bases = (_WorkerMixin, getattr(importlib.import_module(module), base))
    worker = type(name, bases, {"__module__": __name__, "_traits": traits})
    globals()[name] = worker
    return worker

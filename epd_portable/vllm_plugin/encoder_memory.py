"""Memory that the encoder cache of an encode instance may fill."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from epd_portable.encode.two_levels import FILLED
from epd_portable.platforms.traits import TRAITS
from epd_portable.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from epd_portable.platforms.base import MemoryInfo

logger = logging.getLogger(__name__)


def cache_bytes(
    config: VllmConfig,
    platform: str,
    profile_run: Callable[[], None],
    memory: Callable[[], MemoryInfo],
    before: MemoryInfo,
) -> int:
    """Return how many bytes the encoder cache may fill; before the scheduler is made.

    It is what a language model's KV would take: what is set for that, on devices at most what
    ``gpu_memory_utilization`` leaves. Of a device that others use, too, what they take meanwhile is
    missing; nothing depends on their holding still.

    Args:
        profile_run: Computes the largest step, whose memory the process keeps.
        memory: Returns the device's memory.
        before: That when the process had taken nothing.
    """
    found = compat.kv_cache_bytes(config)
    if TRAITS[platform].needs_device_copy:
        if found is None:
            profile_run()
        part = config.cache_config.gpu_memory_utilization
        left = memory().left_of(part, before)
        logger.info(
            "gpu_memory_utilization %g leaves %d MiB next to the weights and the largest step",
            *(part, left >> 20),
        )
        found = left if found is None else min(left, found)
    room = int(FILLED * (found or 0))
    logger.info(
        "the encoder cache may fill %d MiB, %d %% of what KV would have",
        *(room >> 20, 100 * FILLED),
    )
    return room

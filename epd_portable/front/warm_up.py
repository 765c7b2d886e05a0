"""First items of each pair of engines, before requests of clients.

vLLM warms up preprocessing, templates and the steps of each engine. One small request for each pair
does the rest: it opens the control channel and the transfer path, and compiles kernels that only
requests use.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from typing import Any

import numpy as np
from PIL import Image
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from epd_portable.config.roles import ENCODES, TAKES_ITEMS
from epd_portable.front.client import SplitClient
from epd_portable.front.engines import FrontEngine
from epd_portable.front.exchange import FrontExchange, Hints, exchange
from epd_portable.placement.instances import Instance

logger = logging.getLogger(__name__)

WITHIN_S = 30.0
"""Longest time of one warm-up, and so of the start of the front."""
_SIDE = 112
_SAMPLES = 16_000


class WarmUp:
    """Sends a request with a small item to each pair of engines, also when one starts again.

    A warm-up that fails is logged; clients' requests are served all the same.

    Args:
        front: vLLM's engine over the client.
        client: Knows the engines.
    """

    def __init__(self, front: AsyncLLM, client: SplitClient) -> None:
        self._front = front
        self._engines = client.engines
        self._warm: dict[tuple[str, str], tuple[object, object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Warm up all pairs that are up, and from now on those that come."""
        self._engines.pool.watch(self._take)
        for each in self._engines.pool.all:
            self._take(each)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, changed: Instance) -> None:
        comes = self._engines.by_name.get(changed.name)
        for encoder, taker in self._pairs(changed):
            names = encoder.name, taker.name
            first, second = (self._engines.by_name[each].client for each in names)
            if comes is not None and self._warm.get(names) != (first, second):
                self._warm[names] = first, second
                comes.warming += 1
                task = asyncio.create_task(self._warm_up(comes, encoder, taker))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _pairs(self, one: Instance) -> list[tuple[Instance, Instance]]:
        """Return the pairs of an engine: who encodes, and who gets the item."""
        usable = [each for each in self._engines.pool.all if each.health.usable and each is not one]
        pairs = [*((one, each) for each in usable), *((each, one) for each in usable)]
        return [
            (first, second)
            for first, second in pairs
            if one.health.usable and first.role in ENCODES and second.role in TAKES_ITEMS
        ]

    async def _warm_up(self, comes: FrontEngine, encoder: Instance, taker: Instance) -> None:
        prefills = "decode" not in taker.duties
        hints = Hints(
            encoders=(encoder,),
            prefiller=taker if prefills else None,
            generator=None if prefills else taker,
        )
        exchange.set(here := FrontExchange(hints=hints))
        try:
            if (prompt := await asyncio.to_thread(self._prompt)) is None:
                return
            params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)
            async with asyncio.timeout(WITHIN_S):
                async for _ in self._front.generate(prompt, params, f"warm-up-{uuid.uuid4().hex}"):
                    pass
        except Exception as error:
            logger.warning("warm-up of %s and %s: %r", encoder.name, taker.name, error)
            return
        finally:
            comes.warming -= 1
        how = [f"{each['source']} {each.get('path', '')}" for each in here.items.values()]
        logger.info("warm-up of %s and %s: %s", encoder.name, taker.name, ", ".join(how))

    def _prompt(self) -> Any:
        """Return a prompt with an item that no cache has; ``None`` if the model takes none."""
        processor = self._front.renderer.get_mm_processor()
        text = processor.dummy_inputs.get_dummy_text
        limits = processor.info.allowed_mm_limits
        if limits.get("image"):
            image = Image.new("RGB", (_SIDE, _SIDE), tuple(secrets.token_bytes(3)))
            return {"prompt": text({"image": 1}), "multi_modal_data": {"image": image}}
        if limits.get("audio"):
            noise = np.frombuffer(secrets.token_bytes(_SAMPLES), np.int8) / np.float32(256)
            return {"prompt": text({"audio": 1}), "multi_modal_data": {"audio": (noise, _SAMPLES)}}
        return None

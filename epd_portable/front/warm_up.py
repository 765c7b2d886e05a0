"""First items of each pair of engines, before requests of clients.

vLLM warms up preprocessing, templates and the steps of each engine. One small request for each pair
does the rest: it opens the control channel and the transfer path, and compiles kernels that only
requests use. Its item is the same for all, under a name of its own: so the encoder outputs of the
engines are compared (`epd_portable.placement.output_check`), as they arrive where they are needed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from vllm.sampling_params import SamplingParams

from epd_portable.config.roles import ENCODES, TAKES_ITEMS
from epd_portable.front.client import SplitClient
from epd_portable.front.engines import FrontEngine
from epd_portable.front.exchange import FrontExchange, exchange
from epd_portable.front.headers import Hints
from epd_portable.placement.instances import Instance
from epd_portable.wire.params import OutputSample

if TYPE_CHECKING:
    from epd_portable.front.server import Front

logger = logging.getLogger(__name__)

WITHIN_S = 30.0
"""Longest time of one warm-up, and so of the start of the front."""
_SIDE = 112
_SOUND_SAMPLES = 16_000


class WarmUp:
    """Sends a request with a small item to each pair of engines, also when one starts again.

    A warm-up that fails is logged; clients' requests are served all the same.
    """

    def __init__(self, front: Front, client: SplitClient) -> None:
        self._front = front
        self._engines = client.engines
        self._can_encode = client.settings.can_encode
        self._warm: dict[tuple[str, str], tuple[object, object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Warm up all pairs that are up, and from now on those that come."""
        self._engines.pool.watch(self._take)
        self._engines.compare = self._compare_again
        for each in self._engines.pool.all:
            self._take(each)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _compare_again(self) -> None:
        """Send all pairs another item: what was compared was computed with other weights."""
        self._warm.clear()
        for engine in self._engines.by_name.values():
            engine.samples.clear()
        for each in self._engines.pool.all:
            self._take(each, serves=True)

    def _take(self, changed: Instance, *, serves: bool = False) -> None:
        """Warm up new pairs of an engine, which is ready afterwards, unless it serves already."""
        comes = self._engines.by_name.get(changed.name)
        for encoder, taker in self._pairs(changed):
            names = encoder.name, taker.name
            first, second = (self._engines.by_name[each].client for each in names)
            if comes is not None and self._warm.get(names) != (first, second):
                self._warm[names] = first, second
                comes.warming += not serves
                self._engines.by_name[taker.name].unchecked.add(encoder.name)
                task = asyncio.create_task(self._warm_up(comes, encoder, taker, serves))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _pairs(self, one: Instance) -> list[tuple[Instance, Instance]]:
        """Return the pairs of an engine: who encodes, and who gets the item.

        An engine that encodes what it needs is a pair, where it gets items of others.
        """
        usable = [each for each in self._engines.pool.all if each.health.usable and each is not one]
        pairs = [*((one, each) for each in usable), *((each, one) for each in usable)]
        found = [
            (first, second)
            for first, second in pairs
            if one.health.usable and first.role in ENCODES and second.role in TAKES_ITEMS
        ]
        alone = dict.fromkeys(second for _, second in found) if self._can_encode else ()
        return [*((each, each) for each in alone), *found]

    async def _warm_up(
        self, comes: FrontEngine, encoder: Instance, taker: Instance, serves: bool
    ) -> None:
        prefills = "decode" not in taker.duties
        hints = Hints(
            encoders=(encoder,),
            prefiller=taker if prefills else None,
            generator=None if prefills else taker,
            local=encoder is taker,
        )
        exchange.set(here := FrontExchange(hints=hints, samples={}))
        sample = None
        try:
            if (prompt := await asyncio.to_thread(self._prompt)) is None:
                return
            params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)
            async with asyncio.timeout(WITHIN_S):
                async for _ in self._front.generate(prompt, params, f"warm-up-{uuid.uuid4().hex}"):
                    pass
            if (sample := _sample(encoder, taker, here)) is None:
                logger.warning("encoder outputs of %s and %s: unchecked", encoder.name, taker.name)
        except Exception as error:
            logger.warning("warm-up of %s and %s: %r", encoder.name, taker.name, error)
            return
        finally:
            comes.warming -= not serves
            self._engines.end_check(taker.name, encoder.name, sample)
        how = [f"{each['source']} {each.get('path', '')}" for each in here.items.values()]
        logger.info("warm-up of %s and %s: %s", encoder.name, taker.name, ", ".join(how))

    def _prompt(self) -> Any:
        """Return a prompt with an item that no cache has; ``None`` if the model takes none.

        Its content is always the same, and its name is new.
        """
        processor = self._front.renderer.get_mm_processor()
        text = processor.dummy_inputs.get_dummy_text
        limits = processor.info.allowed_mm_limits
        noise = np.random.default_rng(0)
        items: dict[str, Any] = {
            "image": Image.fromarray(noise.integers(256, size=(_SIDE, _SIDE, 3), dtype=np.uint8)),
            "audio": (noise.uniform(-0.5, 0.5, _SOUND_SAMPLES).astype(np.float32), _SOUND_SAMPLES),
        }
        for modality, item in items.items():
            if limits.get(modality):
                return {
                    "prompt": text({modality: 1}),
                    "multi_modal_data": {modality: item},
                    "multi_modal_uuids": {
                        modality: [f"{self._front.own_items}-{uuid.uuid4().hex}"]
                    },
                }
        return None


def _sample(encoder: Instance, taker: Instance, here: FrontExchange) -> OutputSample | None:
    """Return the encoder output of a warm-up; ``None`` if another engine has encoded it."""
    for name, (receiver, sample) in (here.samples or {}).items():
        origin = here.items.get(name, {})
        by = origin.get("encoder") or (receiver if origin.get("source") == "local" else "")
        if (by, receiver) == (encoder.name, taker.name):
            return sample
    return None

"""Room over vLLM's real scheduler: pictures that repeat, prefix hits, tokens taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integration.vllm_plugin.test_pd_scheduler import (
    BLOCK,
    Engine,
    vllm_config,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.needs_vllm

CACHE = 64
"""Embeddings in the encoder cache."""
ENOUGH = 50
"""Steps in which whoever is not held up has ended."""


class Prompts(Engine):
    """An engine that takes prompts of any items."""

    def add(
        self,
        request_id: str,
        *items: tuple[str, int],
        lead: int = BLOCK,
        tail: int = 2,
        answer: int = 1,
        resumable: bool = False,
    ) -> None:
        """Add a request: text, then each item with two tokens of text behind it.

        Args:
            request_id: Its name.
            items: Name and embeddings of each.
            lead: Tokens before the first item.
            tail: More tokens at the end.
            answer: Tokens to generate.
            resumable: It is a part of a session.
        """
        from vllm import SamplingParams
        from vllm.multimodal.inputs import (
            MultiModalFeatureSpec,
            MultiModalFieldConfig,
            MultiModalKwargsItem,
            PlaceholderRange,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        values = {
            "image_grid_thw": torch.tensor([[1, 8, 8]]),
            "pixel_values": torch.zeros(1, 64, 8),
        }
        elements = {
            key: MultiModalFieldConfig.batched(
                "image", keep_on_cpu=key == "image_grid_thw"
            ).build_elems(key, value)[0]
            for key, value in values.items()
        }
        features, offset = [], lead
        for name, size in items:
            features.append(
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem(elements),
                    modality="image",
                    identifier=name,
                    mm_position=PlaceholderRange(offset=offset, length=size),
                )
            )
            offset += size + 2
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[1] * (offset + tail),
                sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
                pooling_params=None,
                mm_features=features,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
                resumable=resumable,
            )
        )

    def steps(self, count: int = ENOUGH) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]


@pytest.fixture
def engine(vllm_config: Any) -> Iterator[Prompts]:  # noqa: F811
    vllm_config.cache_config.enable_prefix_caching = True
    made = Prompts(vllm_config)
    cache = made.scheduler.encoder_cache_manager
    cache.cache_size = cache.num_free_slots = cache.num_freeable_slots = CACHE
    yield made
    made.scheduler.shutdown()


def test_a_picture_before_and_after_another_gives_its_room_to_that_between_them(
    engine: Prompts,
) -> None:
    engine.add("r", ("small", 24), ("large", 48), ("small", 24))
    engine.add("behind", ("other", 4))
    engine.steps()
    assert engine.ended == {"r": "length", "behind": "length"}
    assert [index for name, index in engine.encoded if name == "r"] == [0, 1, 2]


def test_a_picture_under_a_prefix_hit_gives_its_room_to_the_one_at_which_the_hit_ends(
    engine: Prompts,
) -> None:
    """The first turn leaves its blocks; the second picture begins where they end."""
    engine.add("first turn", ("a", 30), tail=BLOCK)
    engine.steps()
    engine.encoded.clear()
    engine.add("r", ("a", 30), ("b", 48))
    engine.add("behind", ("other", 4))
    computed = engine.steps()
    assert {"first turn", "r", "behind"} == set(engine.ended)
    assert engine.encoded == [("r", 1), ("behind", 0)]
    tokens = sum(step.get("r", 0) for step in computed)
    assert tokens == 16 + 30 + 2 + 48 + 2 + 2 - 3 * BLOCK, "its hit ends where b begins"


def test_a_request_whose_computed_tokens_are_taken_back_encodes_its_pictures_again(
    engine: Prompts,
) -> None:
    """As vLLM does where KV that was to be loaded cannot be (``kv_load_failure_policy``)."""
    engine.add("before", ("x", 16), ("y", 14), tail=BLOCK)
    engine.steps()
    engine.encoded.clear()
    engine.scheduler.reset_encoder_cache()
    engine.add("r", ("x", 16), ("y", 14), tail=BLOCK, answer=50)
    engine.steps(3)
    assert engine.encoded == [], "the prefix cache covers both"
    request = engine.scheduler.requests["r"]
    request.num_computed_tokens = 3
    engine.steps(2 * ENOUGH)
    assert engine.encoded == [("r", 0), ("r", 1)]
    assert engine.ended["r"] == "length"


def test_media_that_come_in_parts_are_refused_and_end_nobody_else(engine: Prompts) -> None:
    engine.add("session", ("x", 16), resumable=True)
    engine.add("other", ("y", 16))
    engine.steps(3)
    assert engine.ended == {"session": "error", "other": "length"}
    engine.add("session", ("z", 16), resumable=True)
    engine.add("another", ("z", 16))
    engine.steps(3)
    assert engine.ended["another"] == "length"
    assert not engine.scheduler.has_unfinished_requests()
    assert not engine.scheduler.encoder_cache_manager.items.keys() - {"x", "y", "z"}


def test_a_later_part_with_media_ends_a_session_that_began_with_text(engine: Prompts) -> None:
    engine.add("session", resumable=True)
    engine.steps(2)
    assert "session" in engine.scheduler.requests, "it waits for its next part"
    engine.add("session", ("x", 16), resumable=True)
    engine.add("other", ("x", 16))
    engine.steps(3)
    assert engine.ended == {"session": "error", "other": "length"}

"""Pictures that have left the encoder cache of an encode instance come back without its encoder."""

from __future__ import annotations

import pytest

from tests.e2e.asking import ask, picture, text
from tests.e2e.conftest import Pair, Start
from tests.e2e.engines import counts, metric

pytestmark = pytest.mark.full

MANY = range(7000, 7300)
"""Pictures of 16 embeddings: more than the encoder caches of both engines hold."""


@pytest.fixture(scope="module")
def pair(start: Start, reference_url: str) -> Pair:
    settings = [
        "engine_args.dtype=float32",
        # Encoder caches hold what a step computes, and no more: fewer than there are pictures.
        "engine_args.max_num_batched_tokens=512",
        "instances.encode.engine_args.gpu_memory_utilization=0.1",
        "instances.encode.env.VLLM_CPU_KVCACHE_SPACE='0'",
    ]
    return Pair(split=start(settings), reference_url=reference_url)


def test_every_repeat_is_served_from_host_memory_or_the_cache(pair: Pair) -> None:
    contents = [[picture(seed), text("What is it?")] for seed in MANY]
    first = [ask(pair.split.url, content) for content in contents]
    assert len(set(pair.split.encoded_by("encode"))) >= len(MANY)
    encoded = len(pair.split.encoded_by("encode"))
    for content, before in zip(contents, first, strict=True):
        again = ask(pair.split.url, content)
        assert again.text == before.text
        assert again.sources == ["transfer"]
    assert len(pair.split.encoded_by("encode")) == encoded, "no encoder ran"
    sources = counts(pair.split.pid, "ec_producer")
    restored = sources['epd_encode_transfers_total{source="host"}']
    assert restored >= len(MANY) - 512 // 16
    assert metric(pair.split.pid, "ec_producer", "epd_encode_transfers_total") >= 2 * len(MANY)

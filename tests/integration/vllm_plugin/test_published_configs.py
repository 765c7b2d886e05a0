"""Fingerprints of published configurations, equal in every release of vLLM and transformers.

``ci/jobs/engines.sh`` runs it with other releases.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig

from epd_portable.vllm_plugin import agreement
from tests import published

FINGERPRINTS = {
    "qwen2_5_vl": "code=none config=5b42875e0249 dtype=bfloat16 model=18fb9fa0b971 "
    "overrides=0813bdcb57aa processor=71655401958b processor_kwargs=dee36ace772e revision=none",
    "qwen3_vl": "code=none config=b5f06d76f80d dtype=bfloat16 model=18fb9fa0b971 "
    "overrides=0813bdcb57aa processor=44136fa355b3 processor_kwargs=dee36ace772e revision=none",
}


@pytest.mark.parametrize("name", published.NAMES)
def test_fingerprint_is_that_of_other_releases(name: str) -> None:
    folder = str(published.FOLDER / name)
    model: Any = ModelConfig(
        model=folder,
        tokenizer=folder,
        served_model_name="model",
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    config: Any = SimpleNamespace(model_config=model)
    assert agreement.fingerprint(config) == FINGERPRINTS[name]

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.vllm_plugin import compat


def fingerprint(kwargs: dict[str, Any] | None) -> str:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
        served_model_name="m",
        revision=None,
        dtype="torch.float16",
        multimodal_config=SimpleNamespace(mm_processor_kwargs=kwargs),
    )
    config: Any = SimpleNamespace(model_config=model)
    return compat.fingerprint(config)


@pytest.mark.parametrize("kwargs", [None, {}, {"min_pixels": 4}])
def test_where_a_producer_makes_pictures_ready_is_not_agreed_on(
    kwargs: dict[str, Any] | None,
) -> None:
    assert fingerprint({**(kwargs or {}), "device": "cuda"}) == fingerprint(kwargs)


def test_how_pictures_are_made_ready_is_agreed_on() -> None:
    assert fingerprint({"min_pixels": 4}) != fingerprint(None)

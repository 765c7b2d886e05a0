from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from epd_portable.demo.run import Completion, difference


def test_importing_the_model_folder_and_pictures_needs_no_torch() -> None:
    code = (
        "import sys, epd_portable.demo, epd_portable.demo.pictures; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- what the demo calls equal ---------------------------------------------------------------------

SPLIT = Completion(
    text="a b", tokens=("a", "b"), logprobs=(-0.1, -0.2), item={"source": "transfer"}, latency_s=1.0
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"logprobs": (-0.1, -0.25)}, ""),
        ({"tokens": ("a", "c"), "text": "a c"}, "tokens differ: 'a c' split, 'a b' in one process"),
        ({"logprobs": (-0.1, -0.4)}, "log-probabilities differ by 0.2000"),
        ({"item": {"source": "local"}}, "the item came from local, not from the encoder"),
        ({"item": {}}, "the item came from nowhere"),
    ],
)
def test_responses_are_equal_only_with_tokens_and_encoder(
    changes: dict[str, object], said: str
) -> None:
    found = difference(replace(SPLIT, **changes), SPLIT)
    assert found.startswith(said) and bool(found) == bool(said)

from __future__ import annotations

import pytest
import torch

from tests.npu_sim.operators import reference

DEVICE = torch.device("npu", 0)


@pytest.mark.parametrize("top_p", [None, [0.3, 0.9, 1.0]], ids=["all", "top p"])
@pytest.mark.parametrize("top_k", [None, [1, 5, 40]], ids=["all", "top k"])
def test_only_the_likeliest_tokens_are_left(top_k, top_p, random) -> None:
    logits = random(3, 40)
    got = torch.ops.npu.npu_top_k_top_p(
        logits,
        p=None if top_p is None else torch.tensor(top_p).to(DEVICE),
        k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32).to(DEVICE),
    ).cpu()
    for row in range(3):
        before = logits[row].cpu()
        left = reference.likeliest(
            before.tolist(),
            40 if top_k is None else top_k[row],
            2.0 if top_p is None else top_p[row],
        )
        assert set(torch.nonzero(got[row] > -torch.inf).flatten().tolist()) == left
        assert all(got[row, token] == before[token] for token in left)

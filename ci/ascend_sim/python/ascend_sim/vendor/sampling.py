"""Restrictions of the choice of the next token."""

from __future__ import annotations

import torch


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits with ``-inf`` for tokens that may not be drawn.

    Args:
        logits: ``(requests, vocabulary)``.
        p: ``(requests,)``: of those that ``k`` left the likeliest stay, up to and with the first
            whose probabilities reach ``p`` together.
        k: ``(requests,)`` of integers: the ``k`` likeliest stay.
    """
    ordered, order = logits.float().sort(dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1])
    if k is not None:
        ordered = ordered.masked_fill(ranks >= k.long()[:, None], -torch.inf)
    if p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill((before >= p.float()[:, None]) & (ranks > 0), -torch.inf)
    kept = torch.full_like(ordered, -torch.inf).scatter(-1, order, ordered)
    return kept.to(logits.dtype)

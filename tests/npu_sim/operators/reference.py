"""The vendor's operators once more, written apart from the double: loops over plain numbers.

Everything is computed in float64 on the CPU. Slow, and meant to be read against the operators'
documentation.
"""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * gamma``, row by row."""
    rows = x.double().reshape(-1, x.shape[-1])
    done = []
    for row in rows:
        mean_square = sum(float(element) ** 2 for element in row) / len(row)
        done.append(row / math.sqrt(mean_square + epsilon) * gamma.double())
    return torch.stack(done).reshape(x.shape)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``a * sigmoid(a) * b`` for the halves a, b of the last dimension."""
    half = x.shape[-1] // 2
    a, b = x.double()[..., :half], x.double()[..., half:]
    return a / (1 + torch.exp(-a)) * b


def turn(head: torch.Tensor, angles: list[complex], interleaved: bool) -> torch.Tensor:
    """Multiply pairs of one head, taken as complex numbers, by ``angles``; leave the rest."""
    turned = head.double().clone()
    for index, angle in enumerate(angles):
        first = 2 * index if interleaved else index
        second = first + 1 if interleaved else index + len(angles)
        product = complex(float(head[first]), float(head[second])) * angle
        turned[first], turned[second] = product.real, product.imag
    return turned


def angles_at(cos_sin_row: torch.Tensor) -> list[complex]:
    """Read a row of cosines followed by sines."""
    half = len(cos_sin_row) // 2
    return [
        complex(float(c), float(s))
        for c, s in zip(cos_sin_row[:half], cos_sin_row[half:], strict=True)
    ]


def axis_by_blocks(section: list[int]) -> list[int]:
    """Which of time, height, width every angle goes by: ``[2, 1, 1]`` is t t h w."""
    return [axis for axis, size in enumerate(section) for _ in range(size)]


def axis_in_turns(section: list[int]) -> list[int]:
    """The same where they take turns: t h w t h w ..., then t alone."""
    axes = []
    for angle in range(sum(section)):
        axis = angle % 3
        axes.append(axis if axis and angle // 3 < section[axis] else 0)
    return axes


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    before: float = math.inf,
    after: float = math.inf,
) -> torch.Tensor:
    """Softmax attention of one sequence, ``(tokens, heads, head_size)``, head by head.

    The last query is at the place of the last key. A query at place p sees the keys at p - before
    to p + after.
    """
    shift = len(key) - len(query)
    group = query.shape[1] // key.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for head in range(query.shape[1]):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        for index, row in enumerate(query[:, head].double()):
            own = index + shift
            seen = [place for place in range(len(key)) if own - before <= place <= own + after]
            weights = torch.exp(scale * (keys[seen] @ row))
            output[index, head] = (weights / weights.sum()) @ values[seen]
    return output


def slots(
    starts: list[int],
    positions: list[int],
    table: list[list[int]],
    block_size: int,
    length: int,
    padding: int,
) -> list[int]:
    """The cache slot of every token, then the padding."""
    found = [padding] * length
    for row, start in enumerate(starts[:-1]):
        for token in range(start, starts[row + 1]):
            block, offset = divmod(positions[token], block_size)
            found[token] = table[row][block] * block_size + offset
    return found


def likeliest(logits: list[float], k: int, p: float) -> set[int]:
    """Return the ``k`` likeliest tokens, of these as many as reach the probability ``p``."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:k]
    weights = [math.exp(logits[token]) for token in order]
    left, reached = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if left and reached >= p:
            break
        left.add(token)
        reached += weight / sum(weights)
    return left

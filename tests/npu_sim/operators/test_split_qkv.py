from __future__ import annotations

import pytest
import torch

from tests.npu_sim.operators import reference

EPSILON = 1e-6


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_size", "turned", "section"), [(16, 16, [4, 2, 2]), (64, 32, [6, 5, 5])]
)
def test_heads_are_normed_then_turned_and_values_left(
    head_size,
    turned,
    section,
    interleaved,
    with_bias,
    dtype,
    random,
    agrees,
    vllm_ascend_operators,
) -> None:
    tokens, q_heads, kv_heads = 3, 4, 2
    qkv = random(tokens, (q_heads + 2 * kv_heads) * head_size, dtype=dtype)
    weights = [random(head_size, dtype=dtype) for _ in range(2)]
    biases = [random(head_size, dtype=dtype) if with_bias else None for _ in range(2)]
    cos_sin = random(3, tokens, turned, dtype=dtype)
    query, key, value, gate = vllm_ascend_operators.split_qkv(
        qkv,
        *weights,
        cos_sin,
        q_heads,
        kv_heads,
        head_size,
        EPSILON,
        section,
        interleaved,
        turned,
        *biases,
    )
    axes = (reference.axis_in_turns if interleaved else reference.axis_by_blocks)(section)
    widths = [q_heads * head_size, kv_heads * head_size, kv_heads * head_size]
    parts = qkv.cpu().split(widths, -1)
    for got, part, weight, bias in zip((query, key), parts, weights, biases, strict=False):
        wanted = torch.zeros(part.shape, dtype=torch.float64)
        for token in range(tokens):
            by_axis = [reference.angles_at(cos_sin[axis, token].cpu()) for axis in range(3)]
            angles = [by_axis[axis][angle] for angle, axis in enumerate(axes)]
            for start in range(0, part.shape[1], head_size):
                head = part[token, start : start + head_size]
                normed = reference.rms_norm(head, weight.cpu(), EPSILON)
                if bias is not None:
                    normed = normed + bias.cpu().double()
                wanted[token, start : start + head_size] = reference.turn(normed, angles, False)
        assert got.dtype == dtype
        agrees(got, wanted)
    assert torch.equal(value.cpu(), parts[2])
    assert gate.shape == (tokens, 0)


def test_a_gate_and_plain_positions_are_refused(random, vllm_ascend_operators) -> None:
    split = vllm_ascend_operators.split_qkv
    qkv, weight, cos_sin = random(2, 48), random(16), random(3, 2, 16)
    sizes = (1, 1, 16, EPSILON, [4, 2, 2], False)
    with pytest.raises(NotImplementedError, match="has_gate=True"):
        split(qkv, weight, weight, cos_sin, *sizes, has_gate=True)
    with pytest.raises(NotImplementedError, match="cos_sin of 2 dimensions"):
        split(qkv, weight, weight, cos_sin[0], *sizes)
    with pytest.raises(RuntimeError, match=r"cos_sin \(3, 1, 16\) for 2 tokens"):
        split(qkv, weight, weight, cos_sin[:, :1], *sizes)
    with pytest.raises(RuntimeError, match=r"mrope_section \[4, 2, 1\] for 8 angles"):
        split(qkv, weight, weight, cos_sin, 1, 1, 16, EPSILON, [4, 2, 1], False)

from __future__ import annotations

import math

import pytest
import torch

from tests.npu_sim.operators import reference

DEVICE = torch.device("npu", 0)


def cos_sin(positions: int, angles: int, dtype: torch.dtype) -> torch.Tensor:
    """``(positions, 2 * angles)``: cosines, then sines, of angles that are all different."""
    phase = torch.arange(positions)[:, None] * 0.37 + torch.arange(angles)[None] * 0.11 + 0.2
    return torch.cat((phase.cos(), phase.sin()), -1).to(dtype).to(DEVICE)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("heads", "size"), [(1, 8), (4, 32), (2, 80)])
def test_rotary_mul_turns_pairs_as_complex_numbers(heads, size, mode, dtype, random, agrees):
    tokens = 5
    x = random(1, tokens, heads, size, dtype=dtype)
    rows = cos_sin(tokens, size // 2, dtype)
    cos, sin = rows.chunk(2, -1)
    if mode == "half":
        wide = [torch.cat((part, part), -1) for part in (cos, sin)]
    else:
        wide = [part.repeat_interleave(2, -1) for part in (cos, sin)]
    r1, r2 = (part.reshape(1, tokens, 1, size) for part in wide)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(tokens):
        angles = reference.angles_at(rows[token].cpu())
        for head in range(heads):
            own = x[0, token, head].cpu()
            wanted[0, token, head] = reference.turn(own, angles, mode == "interleave")
    agrees(torch.ops.npu.npu_rotary_mul(x, r1, r2, mode), wanted)


def test_rotary_mul_refuses_other_modes_and_a_rotation_matrix(random) -> None:
    x, r = random(1, 2, 1, 8), random(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="rotary_mode='quarter'"):
        torch.ops.npu.npu_rotary_mul(x, r, r, "quarter")
    with pytest.raises(NotImplementedError, match=r"rotate \(a matrix\)"):
        torch.ops.npu.npu_rotary_mul(x, r, r, "half", random(8, 8))
    with pytest.raises(RuntimeError, match=r"r1 \(1, 2, 1, 4\)"):
        torch.ops.npu.npu_rotary_mul(x, r[..., :4], r[..., :4])


def mrope_reference(x, rows_of_token, head_size, interleaved):
    wanted = x.cpu().double().clone()
    for token, rows in enumerate(rows_of_token):
        for start in range(0, x.shape[1], head_size):
            head = x[token, start : start + head_size].cpu()
            wanted[token, start : start + head_size] = reference.turn(head, rows, interleaved)
    return wanted


@pytest.mark.parametrize("mode", ["half", "interleaved"])
@pytest.mark.parametrize(("head_size", "turned"), [(32, 32), (64, 32)])
def test_mrope_turns_by_one_position_and_leaves_the_rest_of_a_head(
    mode, head_size, turned, dtype, random, agrees
) -> None:
    query, key = random(6, 4 * head_size, dtype=dtype), random(6, 2 * head_size, dtype=dtype)
    cache = cos_sin(50, turned // 2, dtype)
    positions = torch.tensor([3, 0, 49, 7, 7, 20], device=DEVICE)
    got = torch.ops.npu.npu_mrope(
        positions, query, key, cache, head_size, mrope_section=[0, 0, 0], rotary_mode=mode
    )
    rows = [reference.angles_at(cache[place].cpu()) for place in positions.tolist()]
    for result, x in zip(got, (query, key), strict=True):
        agrees(result, mrope_reference(x, rows, head_size, mode == "interleaved"))


@pytest.mark.parametrize(("head_size", "section"), [(128, [16, 24, 24]), (32, [4, 6, 6])])
def test_mrope_takes_each_section_of_angles_from_its_own_position(
    head_size, section, dtype, random, agrees
) -> None:
    query, key = random(4, 2 * head_size, dtype=dtype), random(4, head_size, dtype=dtype)
    cache = cos_sin(40, head_size // 2, dtype)
    positions = torch.tensor([[0, 1, 2, 3], [5, 9, 13, 17], [39, 20, 11, 2]], device=DEVICE)
    got = torch.ops.npu.npu_mrope(
        positions, query, key, cache, head_size, mrope_section=section, rotary_mode="half"
    )
    axes = reference.axis_by_blocks(section)
    rows = []
    for token in range(4):
        by_axis = [
            reference.angles_at(cache[place].cpu()) for place in positions[:, token].tolist()
        ]
        rows.append([by_axis[axis][angle] for angle, axis in enumerate(axes)])
    for result, x in zip(got, (query, key), strict=True):
        agrees(result, mrope_reference(x, rows, head_size, interleaved=False))


def test_a_turn_keeps_the_length_of_every_head(random) -> None:
    query, key = random(3, 64), random(3, 64)
    positions = torch.tensor([1, 2, 3], device=DEVICE)
    turned, _ = torch.ops.npu.npu_mrope(positions, query, key, cos_sin(9, 16, torch.float32), 32)
    lengths = [part.cpu().reshape(3, 2, 32).norm(dim=-1) for part in (query, turned)]
    torch.testing.assert_close(lengths[0], lengths[1])
    assert not math.isclose(float(turned[0, 0]), float(query[0, 0]))


def test_mrope_refuses_other_caches_and_checks_its_sections(random) -> None:
    query, cache = random(2, 32), cos_sin(9, 16, torch.float32)
    one = torch.tensor([1, 2], device=DEVICE)
    with pytest.raises(NotImplementedError, match="cache_mode='interleave'"):
        torch.ops.npu.npu_mrope(one, query, query, cache, 32, cache_mode="interleave")
    with pytest.raises(RuntimeError, match=r"mrope_section \[4, 4, 4\] for 3 positions and 16"):
        torch.ops.npu.npu_mrope(one.repeat(3, 1), query, query, cache, 32, mrope_section=[4, 4, 4])

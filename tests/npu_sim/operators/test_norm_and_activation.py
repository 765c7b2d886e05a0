from __future__ import annotations

import importlib

import pytest
import torch

from tests.npu_sim.operators import reference

SHAPES = [(1, 8), (5, 160), (2, 3, 64)]
EPSILON = 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_x_over_its_root_mean_square_times_gamma(shape, dtype, random, agrees) -> None:
    x, gamma = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    normed, rstd = torch.ops.npu.npu_rms_norm(x, gamma, EPSILON)
    assert normed.dtype == dtype
    agrees(normed, reference.rms_norm(x.cpu(), gamma.cpu(), EPSILON))
    assert rstd.dtype == torch.float32
    agrees(rstd, (x.cpu().double().square().mean(-1, keepdim=True) + EPSILON).rsqrt())


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_norms_the_sum_and_returns_it(shape, dtype, random, agrees) -> None:
    x1, x2 = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    gamma = random(shape[-1], dtype=dtype)
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, EPSILON)
    agrees(total, x1.cpu().double() + x2.cpu().double())
    agrees(normed, reference.rms_norm(total.cpu(), gamma.cpu(), EPSILON))


@pytest.mark.parametrize("with_beta", [False, True])
def test_add_rms_norm_bias_adds_beta_to_the_norm(with_beta, dtype, random, agrees) -> None:
    importlib.import_module("vllm_ascend.vllm_ascend_C")
    x1, x2 = random(4, 96, dtype=dtype), random(4, 96, dtype=dtype)
    gamma = random(96, dtype=dtype)
    beta = 10 * random(96, dtype=dtype) if with_beta else None
    normed, _, total = torch.ops._C_ascend.npu_add_rms_norm_bias(x1, x2, gamma, beta, EPSILON)
    wanted = reference.rms_norm(total.cpu(), gamma.cpu(), EPSILON)
    if beta is None:
        agrees(normed, wanted)
    else:
        # The norm is rounded before beta is added, and the sum once more.
        rounding = torch.finfo(dtype).eps / 2 * float(wanted.abs().max())
        agrees(normed, wanted + beta.cpu().double(), slack=rounding)
    agrees(total, x1.cpu().double() + x2.cpu().double())


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_gates_the_second_half_by_the_first(shape, dtype, random, agrees) -> None:
    x = 3 * random(*shape, dtype=dtype)
    agrees(torch.ops.npu.npu_swiglu(x), reference.swiglu(x.cpu()))


def test_fast_gelu_is_x_times_a_steep_sigmoid(dtype, random, agrees) -> None:
    x = 3 * random(7, 33, dtype=dtype)
    wide = x.cpu().double()
    agrees(torch.ops.npu.npu_fast_gelu(x), wide / (1 + torch.exp(-1.702 * wide)))


def test_norms_refuse_what_is_not_modelled(random) -> None:
    x = random(2, 8)
    with pytest.raises(NotImplementedError, match="npu_rms_norm with gamma of 2 dimensions"):
        torch.ops.npu.npu_rms_norm(x, random(2, 8))


def test_wrong_shapes_of_norms_and_activations_are_errors_of_the_caller(random) -> None:
    x = random(2, 8)
    with pytest.raises(RuntimeError, match="gamma of 4 elements for rows of 8"):
        torch.ops.npu.npu_rms_norm(x, random(4))
    with pytest.raises(RuntimeError, match=r"x2 torch.float32 \(3, 8\)"):
        torch.ops.npu.npu_add_rms_norm(x, random(3, 8), random(8))
    with pytest.raises(RuntimeError, match="dimension -1 of 7 is odd"):
        torch.ops.npu.npu_swiglu(random(2, 7))

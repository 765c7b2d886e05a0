"""Tensors of the simulated device, and comparisons with the reference formulas."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device("npu", 0)
FLOAT32_LOSS = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def random() -> Callable[..., torch.Tensor]:
    """Make a tensor of the device from a shape and a dtype, the same in every run."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    return make


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Compare a result on the device with a float64 reference.

    It may be off by one rounding to its dtype, by what float32 arithmetic loses, and by ``slack``.
    """

    def check(got: torch.Tensor, wanted: torch.Tensor, slack: float = 0) -> None:
        assert got.device == DEVICE
        assert got.shape == wanted.shape
        rounding = torch.finfo(got.dtype).eps / 2
        torch.testing.assert_close(
            got.cpu().double(), wanted, rtol=rounding + FLOAT32_LOSS, atol=slack + FLOAT32_LOSS
        )

    return check


@pytest.fixture(scope="session")
def vllm_ascend_operators() -> types.SimpleNamespace:
    """The operators that only vllm-ascend asks for, got the way it gets them."""
    import vllm_ascend.ops.register_custom_ops  # noqa: F401 - registers operators
    from vllm_ascend.ops.triton import compute_slot_mapping

    return types.SimpleNamespace(
        slot_mapping=compute_slot_mapping._compute_slot_mapping_kernel,
        fused_slot_mapping=compute_slot_mapping,
        split_qkv=torch.ops.vllm.triton_split_qkv_rmsnorm_mrope,
    )

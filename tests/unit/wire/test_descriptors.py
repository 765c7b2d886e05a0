from __future__ import annotations

import pytest
import torch

from epd_portable.wire.descriptors import DTYPE_BYTES, TensorSpec


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_spec_has_the_bytes_of_the_tensor(dtype: str) -> None:
    tensor = torch.empty((3, 5), dtype=getattr(torch, dtype))
    assert TensorSpec(shape=(3, 5), dtype=dtype).nbytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("shape", [(), (0, 4), (4, -1)])
def test_a_shape_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TensorSpec(shape=shape, dtype="float32")


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'torch\.float32'.*float32"):
        TensorSpec(shape=(1, 1), dtype="torch.float32")

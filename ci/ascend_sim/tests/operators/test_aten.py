from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device("npu", 0)
X = torch.linspace(-2, 3, 24).reshape(4, 6)
Y = torch.linspace(1, 2, 24).reshape(4, 6).flip(0)
W = torch.linspace(-1, 1, 18).reshape(6, 3)
ROWS = torch.tensor([2, 0, 3])


IN_PLACE: dict[str, Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "add_": lambda x, on: x.add_(on(Y)),
    "a row": lambda x, on: x[1].mul_(5),
    "a strided slice": lambda x, on: x[:, ::2].copy_(on(Y)[:, ::2]),
    "index_put_": lambda x, on: x.index_put_((on(ROWS), on(ROWS)), on(W[0])),
    "masked_fill_": lambda x, on: x.masked_fill_(on(Y) > 1.5, -1),
    "scatter_": lambda x, on: x.scatter_(1, on(ROWS)[None].repeat(4, 1), on(Y)),
    "index_copy_": lambda x, on: x.index_copy_(0, on(ROWS), on(Y)[:3]),
    "out=": lambda x, on: torch.add(on(X), on(Y), out=x),
    "foreach": lambda x, on: torch._foreach_add_([x], [on(Y)]),
    "fill_ and zero_": lambda x, on: (x[0].fill_(4), x[1].zero_()),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_in_place_changes_the_tensor_and_its_views(name: str) -> None:
    on_device, on_host = X.to(DEVICE), X.clone()
    view, address = on_device[1:], on_device.data_ptr()
    IN_PLACE[name](on_device, lambda tensor: tensor.to(DEVICE))
    IN_PLACE[name](on_host, lambda tensor: tensor)
    assert on_device.data_ptr() == address
    assert torch.equal(on_device.cpu(), on_host)
    assert torch.equal(view.cpu(), on_host[1:])


def test_views_share_the_bytes_of_the_tensor() -> None:
    x = X.to(DEVICE)
    views = (x.unsqueeze(0), x.squeeze(), x.t(), x.view(6, 4), x[1:, 2], x.expand(2, 4, 6))
    addresses = {view.untyped_storage().data_ptr() for view in views}
    assert addresses == {x.untyped_storage().data_ptr()}
    assert torch.equal(x[1:, 2:].unsqueeze(0).cpu(), X[1:, 2:].unsqueeze(0))
    x.fill_(3)
    assert all(bool((view == 3).all()) for view in views)


def test_cpu_computes_on_bytes_of_device_without_copy() -> None:
    from ascend_sim.memory import host_view

    x = X.to(DEVICE)[1:, ::2]
    view = host_view(x)
    assert torch.equal(view, X[1:, ::2])
    assert view.stride() == x.stride()
    view.fill_(9)
    assert bool((x == 9).all())


def test_an_out_argument_of_another_size_is_resized() -> None:
    out = torch.empty(0, device=DEVICE)
    torch.add(X.to(DEVICE), Y.to(DEVICE), out=out)
    assert torch.equal(out.cpu(), X + Y)


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"aten::add.Tensor on tensors of npu:0 and npu:1"):
        X.to("npu:0") + X.to("npu:1")
    with pytest.raises(RuntimeError, match=r"aten::cat on tensors of npu:0 and npu:1"):
        torch.cat((X.to("npu:0"), X.to("npu:1")))


def test_a_tensor_left_on_the_host_is_refused_but_not_a_number() -> None:
    with pytest.raises(RuntimeError, match=r"aten::add.Tensor on tensors of cpu and npu:0"):
        X + X.to(DEVICE)
    with pytest.raises(RuntimeError, match="npu::npu_rms_norm on tensors of cpu and npu:0"):
        torch.ops.npu.npu_rms_norm(X.to(DEVICE), torch.ones(6))
    with pytest.raises(RuntimeError, match=r"aten::.*index_put.* on tensors of cpu and npu:0"):
        X.to(DEVICE)[ROWS.to(DEVICE)] = Y[:3]
    assert torch.equal((X.to(DEVICE) * torch.tensor(2.0)).cpu(), X * 2)


def test_the_second_device_computes_on_its_own_memory() -> None:
    total = X.to("npu:1") + 1
    assert total.device == torch.device("npu", 1)
    assert torch.equal(total.cpu(), X + 1)


def test_a_seeded_generator_draws_what_the_cpu_draws_and_goes_on() -> None:
    on_device, on_host = torch.Generator(DEVICE), torch.Generator()
    for seed in (3, 3, 4):
        on_device.manual_seed(seed)
        on_host.manual_seed(seed)
        for _ in range(2):
            got = torch.empty(5, device=DEVICE).exponential_(generator=on_device)
            assert torch.equal(got.cpu(), torch.empty(5).exponential_(generator=on_host))


def test_operator_of_torch_npu_not_modelled_refuses_at_once() -> None:
    with pytest.raises(NotImplementedError, match="npu::npu_gelu"):
        torch.ops.npu.npu_gelu(X.to(DEVICE))
    with pytest.raises(NotImplementedError, match="npu::npu_fused_infer_attention_score_v2"):
        torch.ops.npu.npu_fused_infer_attention_score_v2(*[X[None].to(DEVICE)] * 3)
    assert torch.equal(X.to(DEVICE).cpu(), X), "work after a refusal is not lost"


def test_operators_that_move_memory_stay_those_of_torch_npu() -> None:
    x = X.to(DEVICE)
    assert torch.equal(torch.ops.npu.npu_dtype_cast(x, torch.bfloat16).cpu(), X.bfloat16())
    assert torch.equal(x.clone().cpu(), X)
    assert torch.ops.npu.get_npu_format(x) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_of_several_dimensions_moves_to_another_device(dtype: torch.dtype) -> None:
    host = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    moved = host.to("npu:0").to("npu:1")
    assert moved.device.index == 1
    assert torch.equal(moved.cpu(), host)

from __future__ import annotations

import pytest
import torch

from tests.npu_sim.operators import reference

DEVICE = torch.device("npu", 0)


def write(key, value, key_cache, value_cache, slots, **others) -> None:
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slots, **{"cache_mode": "Norm", **others}
    )


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("block_size", "heads", "size"), [(4, 1, 8), (16, 2, 32)])
def test_tokens_land_in_their_slots_and_nowhere_else(
    block_size, heads, size, slot_dtype, dtype, random
) -> None:
    key, value = (random(5, heads, size, dtype=dtype) for _ in range(2))
    key_cache, value_cache = (random(3, block_size, heads, size, dtype=dtype) for _ in range(2))
    # The last slot stays free: -1 must not be taken for it.
    slots = [2 * block_size, 1, -1, block_size - 1, 3 * block_size - 2]
    wanted = [cache.cpu().clone() for cache in (key_cache, value_cache)]
    for tokens, cache in zip((key, value), wanted, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                cache[slot // block_size, slot % block_size] = tokens[token].cpu()
    write(key, value, key_cache, value_cache, torch.tensor(slots, dtype=slot_dtype).to(DEVICE))
    assert torch.equal(key_cache.cpu(), wanted[0])
    assert torch.equal(value_cache.cpu(), wanted[1])


@pytest.mark.parametrize("name", ["compress_lens", "compress_seq_offsets", "seq_lens"])
def test_scatter_refuses_compression(name, random) -> None:
    tokens, cache = random(2, 1, 8), random(2, 4, 1, 8)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(NotImplementedError, match=f"npu_scatter_pa_kv_cache with {name}"):
        write(tokens, tokens, cache, cache, slots, **{name: slots})


def test_scatter_refuses_the_cache_layout_of_its_default(random) -> None:
    tokens, cache = random(2, 1, 8), random(2, 4, 1, 8)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(NotImplementedError, match="cache_mode='PA_NZ'"):
        torch.ops.npu.npu_scatter_pa_kv_cache(tokens, tokens, cache, cache, slots)


def test_scatter_checks_slots_shapes_and_dtypes(random) -> None:
    tokens, cache = random(2, 1, 8), random(2, 4, 1, 8)
    slots = torch.tensor([0, 8], device=DEVICE)
    with pytest.raises(RuntimeError, match=r"slot 8 of \(2, 4, 1, 8\)"):
        write(tokens, tokens, cache, cache, slots)
    with pytest.raises(RuntimeError, match=r"slot_mapping torch.int64 \(1,\) for 2 tokens"):
        write(tokens, tokens, cache, cache, slots[:1])
    with pytest.raises(RuntimeError, match=r"slot_mapping torch.float32"):
        write(tokens, tokens, cache, cache, slots.float())
    with pytest.raises(RuntimeError, match=r"tokens \(2, 1, 8\) for a cache"):
        write(tokens, tokens, cache[..., :4], cache, slots)
    with pytest.raises(RuntimeError, match=r"torch.float32 into torch.bfloat16"):
        write(tokens, tokens, cache.bfloat16(), cache.bfloat16(), slots)


def launch(kernel, starts, positions, table, block_size, slots, requests, **others) -> None:
    options = {
        "KV_CACHE_BLOCK_SIZE": block_size,
        "BLOCKS_PER_KV_BLOCK": 1,
        "TOTAL_CP_WORLD_SIZE": 1,
        "TOTAL_CP_RANK": 0,
        "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
        "PAD_ID": -1,
        "TILE_BLOCK_SIZE": 1024,
        "BLOCK_TABLE_WINDOW_SIZE": 16,
        **others,
    }
    kernel[(requests + 1,)](
        len(positions),
        len(slots),
        starts,
        positions,
        table,
        table.stride(0),
        block_size,
        slots,
        **options,
    )


@pytest.mark.parametrize("block_size", [4, 128])
def test_slots_follow_the_block_table_of_each_request(block_size, vllm_ascend_operators) -> None:
    starts, positions = [0, 3, 3, 7], [0, 1, 2, block_size - 1, block_size, block_size + 1, 9]
    table = [[5, 2, 0, 0], [1, 1, 1, 1], [7, 3, 4, 6]]
    slots = torch.full((12,), 77, dtype=torch.int32, device=DEVICE)
    # Rows and starts beyond the requests hold what an earlier batch left.
    launch(
        vllm_ascend_operators.slot_mapping,
        torch.tensor([*starts, 0, 99], dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        torch.tensor([*table, [9, 9, 9, 9]], dtype=torch.int32, device=DEVICE),
        block_size,
        slots,
        requests=3,
    )
    assert slots.tolist() == reference.slots(starts, positions, table, block_size, 12, -1)


def test_slot_mapping_refuses_what_it_does_not_model(vllm_ascend_operators) -> None:
    kernel = vllm_ascend_operators.slot_mapping
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([8], device=DEVICE)
    table = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    arguments = (kernel, starts, positions, table, 4, slots, 1)
    with pytest.raises(NotImplementedError, match="TOTAL_CP_WORLD_SIZE=2"):
        launch(*arguments, TOTAL_CP_WORLD_SIZE=2)
    with pytest.raises(NotImplementedError, match="IS_CIRCULAR=True"):
        launch(*arguments, IS_CIRCULAR=True)
    with pytest.raises(RuntimeError, match="request 0 has a position beyond its 2 blocks"):
        launch(*arguments)


def test_kernels_for_several_cache_groups_are_refused(vllm_ascend_operators) -> None:
    module = vllm_ascend_operators.fused_slot_mapping
    name = "_compute_slot_mapping_fused_groups_kernel"
    if not hasattr(module, name):
        pytest.skip("this vllm-ascend has no fused kernel")
    with pytest.raises(NotImplementedError, match=name):
        getattr(module, name)[(2, 3)]

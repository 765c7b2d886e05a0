from __future__ import annotations

import math

import pytest
import torch

from tests.npu_sim.operators import reference

DEVICE = torch.device("npu", 0)
NO_MASK, CAUSAL, BAND = 0, 3, 4
EVERYTHING = 2147483647
# Not what torch takes by itself for any head size below.
SCALE = 0.31
# Queries and keys of every sequence.
BATCHES = {
    "one sequence": [(6, 6)],
    "several": [(3, 3), (1, 1), (7, 7)],
    "continued": [(1, 9), (4, 12), (2, 2)],
}
WINDOWS = {NO_MASK: (math.inf, math.inf), CAUSAL: (math.inf, 0), BAND: (3, 1)}


def upper_triangle() -> torch.Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1).to(DEVICE)


def attend(query, key, value, sizes, mode, **others):
    query_lengths, kv_lengths = zip(*sizes, strict=True)
    paged = others.get("block_table") is not None
    before, after = WINDOWS[mode]
    return torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        **{
            "atten_mask": None if mode == NO_MASK else upper_triangle(),
            "actual_seq_lengths": ends(query_lengths),
            "actual_seq_lengths_kv": list(kv_lengths) if paged else ends(kv_lengths),
            "num_heads": query.shape[1],
            "num_key_value_heads": 2,
            "scale": SCALE,
            "input_layout": "TND",
            "sparse_mode": mode,
            "pre_tokens": before if mode == BAND else EVERYTHING,
            "next_tokens": after if mode == BAND else EVERYTHING,
            **others,
        },
    )[0]


def ends(lengths) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def wanted_for(query, keys, values, sizes, mode) -> torch.Tensor:
    """The reference, sequence by sequence; ``keys`` holds one tensor for each."""
    done, start = [], 0
    for (length, _), key, value in zip(sizes, keys, values, strict=True):
        own = query[start : start + length].cpu()
        done.append(reference.attention(own, key.cpu(), value.cpu(), SCALE, *WINDOWS[mode]))
        start += length
    return torch.cat(done)


@pytest.mark.parametrize("mode", WINDOWS)
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (4, 32)])
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_packed_sequences_attend_to_themselves_only(
    sizes, heads, size, mode, dtype, random, agrees
) -> None:
    tokens, kv_tokens = (sum(lengths) for lengths in zip(*sizes, strict=True))
    query = random(tokens, heads, size, dtype=dtype)
    key, value = (random(kv_tokens, 2, size, dtype=dtype) for _ in range(2))
    lengths = [length for _, length in sizes]
    wanted = wanted_for(query, key.split(lengths), value.split(lengths), sizes, mode)
    agrees(attend(query, key, value, sizes, mode), wanted)


@pytest.mark.parametrize("mode", WINDOWS)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_paged_sequences_read_their_own_blocks(
    sizes, block_size, mode, dtype, random, agrees
) -> None:
    heads, size, columns = 4, 16, 4
    query = random(sum(length for length, _ in sizes), heads, size, dtype=dtype)
    caches = [random(20, block_size, 2 * size, dtype=dtype) for _ in range(2)]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    # A row more than there are sequences, as vllm-ascend passes it.
    table = order[: (len(sizes) + 1) * columns].reshape(-1, columns).int()
    gathered: list[list[torch.Tensor]] = [[], []]
    for row, (_, length) in enumerate(sizes):
        for cache, into in zip(caches, gathered, strict=True):
            places = [divmod(token, block_size) for token in range(length)]
            rows = [cache[table[row, block], offset].cpu() for block, offset in places]
            into.append(torch.stack(rows).reshape(length, 2, size))
    got = attend(query, *caches, sizes, mode, block_table=table.to(DEVICE), block_size=block_size)
    agrees(got, wanted_for(query, *gathered, sizes, mode))


def test_a_long_sequence_is_the_same_as_its_parts(random) -> None:
    query, key, value = (random(1500, 2, 8) for _ in range(3))
    whole = attend(query, key, value, [(1500, 1500)], CAUSAL)
    last = attend(query[1400:], key, value, [(100, 1500)], CAUSAL)
    torch.testing.assert_close(whole[1400:].cpu(), last.cpu())


REFUSED = {
    "input_layout='BSND'": {"input_layout": "BSND"},
    "sparse_mode=2": {"sparse_mode": 2},
    "atten_mask in sparse_mode=0": {"sparse_mode": 0},
    "softmax_lse_flag=True": {"softmax_lse_flag": True},
    "inner_precise=1": {"inner_precise": 1},
    "pse_shift=a tensor": {"pse_shift": torch.zeros(1)},
    "key_antiquant_scale=a tensor": {"key_antiquant_scale": torch.zeros(1)},
    "query_rope=a tensor": {"query_rope": torch.zeros(1)},
    "actual_shared_prefix_len=\\[3\\]": {"actual_shared_prefix_len": [3]},
    "actual_seq_lengths or actual_seq_lengths_kv of None": {"actual_seq_lengths_kv": None},
    "pre_tokens=-1": {"sparse_mode": 4, "pre_tokens": -1},
    "a paged cache of 4 dimensions": {"block_table": torch.zeros(1, 1, dtype=torch.int32)},
}


@pytest.mark.parametrize(("message", "arguments"), REFUSED.items(), ids=REFUSED)
def test_attention_refuses_what_it_does_not_model(message, arguments, random) -> None:
    query = random(4, 2, 8)
    cache = random(1, 2, 4, 8) if "block_table" in arguments else query
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(NotImplementedError, match=f"npu_fused_infer_attention_score.*{message}"):
        attend(query, cache, cache, [(4, 4)], CAUSAL, **on_device)


WRONG = {
    "for 4 tokens": {"actual_seq_lengths": [3]},
    "keys end at 9 of 4": {"actual_seq_lengths_kv": [9]},
    "4 queries for 2 keys": {"actual_seq_lengths_kv": [2]},
    "for 3 heads": {"num_heads": 3},
    "needs a 2048 × 2048 mask": {"atten_mask": torch.zeros(4, 4, dtype=torch.int8)},
    "needs the upper triangle": {"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)},
}


@pytest.mark.parametrize(("message", "arguments"), WRONG.items(), ids=WRONG)
def test_attention_finds_wrong_lengths_heads_and_masks(message, arguments, random) -> None:
    query = random(4, 2, 8)
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(RuntimeError, match=message):
        attend(query, query, query, [(4, 4)], CAUSAL, **on_device)


def test_attention_finds_wrong_caches_and_dtypes(random) -> None:
    query, cache = random(4, 2, 8), random(3, 4, 16)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"cache \(3, 4, 16\) for blocks of 8 × 16"):
        attend(query, cache, cache, [(4, 4)], CAUSAL, block_table=table, block_size=8)
    with pytest.raises(RuntimeError, match=r"block table \(0, 1\) for 1 sequences"):
        attend(query, cache, cache, [(4, 4)], CAUSAL, block_table=table[:0], block_size=4)
    with pytest.raises(RuntimeError, match=r"query torch.float32, key torch.bfloat16"):
        attend(query, query.bfloat16(), query.bfloat16(), [(4, 4)], CAUSAL)

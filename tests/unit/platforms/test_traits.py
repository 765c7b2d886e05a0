from __future__ import annotations

import dataclasses

import pytest

from epd_portable.platforms.traits import TRAITS


def test_every_platform_is_listed_best_first() -> None:
    assert tuple(TRAITS) == ("cuda", "npu", "cpu")


def test_the_key_of_each_platform_is_its_name() -> None:
    assert [traits.name for traits in TRAITS.values()] == list(TRAITS)


def test_each_platform_names_the_words_that_torch_and_the_driver_use() -> None:
    words = {
        name: (traits.device_type, traits.dist_backend, traits.visible_devices_env)
        for name, traits in TRAITS.items()
    }
    assert words == {
        "cuda": ("cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        "npu": ("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
        "cpu": ("cpu", "gloo", None),
    }


def test_only_the_cpu_uses_an_item_where_it_arrived() -> None:
    assert [name for name, traits in TRAITS.items() if not traits.needs_device_copy] == ["cpu"]


@pytest.mark.parametrize("name", list(TRAITS))
def test_alignments_are_powers_of_two_that_a_cache_line_divides(name: str) -> None:
    for nbytes in (TRAITS[name].slot_alignment_bytes, TRAITS[name].slab_alignment_bytes):
        assert nbytes % 64 == 0
        assert nbytes & (nbytes - 1) == 0


def test_device_memory_for_hccs_is_aligned_to_its_pages() -> None:
    assert TRAITS["npu"].slab_alignment_bytes == 2 * 1024 * 1024


def test_traits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRAITS["cpu"].name = "gpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        TRAITS["tpu"] = TRAITS["cpu"]  # type: ignore[index]


def test_only_cuda_opens_memory_on_devices_that_the_opener_sees() -> None:
    assert [name for name, traits in TRAITS.items() if traits.peers_must_be_visible] == ["cuda"]

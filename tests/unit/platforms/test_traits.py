from __future__ import annotations

import dataclasses

import pytest

from epd_portable.platforms.traits import TRAITS


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


@pytest.mark.parametrize("name", list(TRAITS))
def test_alignments_are_powers_of_two_that_a_cache_line_divides(name: str) -> None:
    for nbytes in (TRAITS[name].slot_alignment_bytes, TRAITS[name].slab_alignment_bytes):
        assert nbytes % 64 == 0
        assert nbytes & (nbytes - 1) == 0


def test_traits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRAITS["cpu"].name = "gpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        TRAITS["tpu"] = TRAITS["cpu"]  # type: ignore[index]

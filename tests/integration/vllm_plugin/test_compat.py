"""Differences between versions of vLLM and between processors; refused configurations."""

from __future__ import annotations

import inspect
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.multimodal import MULTIMODAL_REGISTRY

from epd_portable.demo import MODEL_DIR
from epd_portable.errors import EngineError
from epd_portable.launch.plan.engine import SCHEDULER_CLS
from epd_portable.platforms import registry
from epd_portable.vllm_plugin import compat, ec_connector
from tests import warm


def config(**changes: Any) -> Any:
    """The parts of a ``VllmConfig`` that are looked at, with ``section__name`` replaced."""
    sections: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
        },
        "ec_transfer_config": {"is_ec_producer": True, "is_ec_consumer": False},
        "scheduler_config": {"scheduler_cls": SCHEDULER_CLS, "async_scheduling": False},
        "ec_manager_config": {"encoder_cache_manager_cls": None},
        "model_config": {
            "is_encoder_decoder": False,
            "dtype": torch.float32,
            "multimodal_config": SimpleNamespace(video_pruning_rate=None),
        },
    }
    top: dict[str, Any] = {"use_v2_model_runner": False}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        (sections[section] if name else top)[name or section] = value
    built = {section: SimpleNamespace(**values) for section, values in sections.items()}
    return SimpleNamespace(**built, **top)


def test_error_of_older_releases_has_the_fields_of_later_ones() -> None:
    from vllm import exceptions

    from epd_portable.vllm_plugin import compat

    given = "every engine is full", HTTPStatus.TOO_MANY_REQUESTS
    older = compat.status_error(exceptions.GenerationError)(*given)
    assert vars(older).items() >= vars(exceptions.GracefulHTTPError(*given)).items()
    assert older.status_code == HTTPStatus.TOO_MANY_REQUESTS


def test_connector_hooks_take_arguments_added_by_newer_vllm() -> None:
    theirs = {name for name, found in vars(ECConnectorBase).items() if inspect.isfunction(found)}
    hooks = {
        f"{half.__name__}.{name}": getattr(half, name)
        for half in ec_connector._HALVES.values()
        for name in theirs
        if name[0] != "_" and getattr(half, name).__module__ == ec_connector.__name__
    }
    assert len(hooks) > 20
    assert {
        title
        for title, hook in hooks.items()
        if inspect.Parameter.VAR_KEYWORD
        not in {each.kind for each in inspect.signature(hook).parameters.values()}
    } == set()


def test_supported_configuration_is_accepted() -> None:
    compat.check_supported(config())
    compat.check_supported(
        config(
            ec_transfer_config__is_ec_producer=False,
            ec_transfer_config__is_ec_consumer=True,
            parallel_config__tensor_parallel_size=2,
            scheduler_config__async_scheduling=True,
        )
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scheduler_config__async_scheduling": True}, "pass --no-async-scheduling"),
        ({"model_config__is_encoder_decoder": True}, "serve them in one process"),
        ({"scheduler_config__scheduler_cls": None}, "schedules with None: leave scheduler_cls"),
        (
            {"scheduler_config__scheduler_cls": "vllm_ascend.core.recompute_scheduler.Recompute"},
            "leave out platform options that replace it",
        ),
        (
            {"model_config__multimodal_config": SimpleNamespace(video_pruning_rate=0.3)},
            r"video_pruning_rate=0\.3: .* leave it out",
        ),
        ({"ec_manager_config__encoder_cache_manager_cls": "a.b.Scores"}, "a.b.Scores cannot be"),
    ],
)
def test_unsupported_configuration_is_refused_with_the_remedy(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=why):
        compat.check_supported(config(**changes))


def test_second_model_runner_is_refused_where_it_has_no_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat.check_supported(config(use_v2_model_runner=True))
    monkeypatch.setattr(compat, "version", lambda: (0, 27))
    compat.check_supported(config())
    with pytest.raises(EngineError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        compat.check_supported(config(use_v2_model_runner=True))


def test_instance_without_encoder_is_refused_for_items_by_media(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat.check_supported(config(), can_encode=False)
    monkeypatch.setattr(compat, "version", lambda: (0, 30))
    compat.check_supported(config())
    with pytest.raises(EngineError, match=r"encoder needs 0\.31 or later; set instances"):
        compat.check_supported(config(), can_encode=False)


def test_a_dtype_that_the_device_does_not_compute_in_is_refused() -> None:
    cpu = registry.get("cpu")
    compat.check_dtype(config(), cpu)
    with pytest.raises(EngineError, match=r"cpu device does not compute in torch\.float64: set"):
        compat.check_dtype(config(model_config__dtype=torch.float64), cpu)


def widths(hf_config: Any, measured: dict[str, int] | None = None) -> dict[str, int]:
    """Return the width by modality of a model whose hidden size is 64."""
    transfer = SimpleNamespace(mm_encoder_output_widths=measured or {})
    model = SimpleNamespace(hf_config=hf_config, get_inputs_embeds_size=lambda: 64)
    engine: Any = SimpleNamespace(ec_transfer_config=transfer, model_config=model)
    return {
        modality: compat.encoder_output_width(engine, modality)
        for modality in ("image", "video", "audio")
    }


def test_outputs_are_as_wide_as_language_model_or_as_measured() -> None:
    without_levels = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=None))
    for hf_config in (SimpleNamespace(), without_levels):
        assert widths(hf_config) == {"image": 64, "video": 64, "audio": 64}
    measured = {"image": 100}
    assert widths(SimpleNamespace(), measured) == {"image": 100, "video": 64, "audio": 64}


def test_deepstack_levels_are_of_images_and_not_of_audio() -> None:
    vision = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[0, 1]))
    for hf_config in (vision, SimpleNamespace(thinker_config=vision)):
        assert widths(hf_config) == {"image": 192, "video": 192, "audio": 64}


def test_width_is_measured_with_small_items_for_any_model() -> None:
    """Each patch is 14 pixels wide, and four of them are one embedding."""
    model = ModelConfig(
        model=str(MODEL_DIR),
        mm_processor_kwargs={"max_pixels": 1_000_000},
        limit_mm_per_prompt={"image": 3, "video": {"count": 1, "num_frames": 2}},
    )
    processor = MULTIMODAL_REGISTRY.create_processor(model)

    def patches(modality: str) -> int:
        [item] = processor.get_dummy_mm_inputs({modality: 1})["mm_kwargs"][modality]
        return int(item[f"{modality}_grid_thw"].data.prod())

    largest = {modality: patches(modality) for modality in ("image", "video")}
    end = compat.small_dummies(SimpleNamespace(model_config=model))
    assert patches("image") == (compat.DUMMY_SIDE // 14) ** 2 < largest["image"] / 10
    # Two frames are one step of time.
    assert patches("video") == compat.DUMMY_FRAMES // 2 * (compat.DUMMY_SIDE // 14) ** 2
    assert {name: model.multimodal_config.get_limit_per_prompt(name) for name in largest} == {
        "image": 3,
        "video": 1,
    }
    end()
    assert {modality: patches(modality) for modality in ("image", "video")} == largest


# arch_prctl(ARCH_GET_XCOMP_PERM) of Linux 5.16; the bit is XFEATURE_XTILEDATA.
AMX = """
import ctypes
from epd_portable.vllm_plugin.worker import _permit_amx
permitted, call = ctypes.c_uint64(), ctypes.CDLL(None).syscall
def has_tiles():
    return call(158, 0x1022, ctypes.byref(permitted)) == 0 and bool(permitted.value >> 18 & 1)
before = has_tiles()
_permit_amx()
print(before, has_tiles())
"""


def test_worker_is_permitted_amx_before_its_first_step() -> None:
    done = warm.over_vllm().run("-c", AMX, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", str(torch.cpu._is_amx_tile_supported())]

"""Accelerator platforms on a machine that has none of them."""

from __future__ import annotations

import importlib.util
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from epd_portable.errors import PlatformUnavailableError
from epd_portable.platforms.accelerator import errors_spare_the_process
from epd_portable.platforms.base import Platform
from epd_portable.platforms.cuda import CudaPlatform
from epd_portable.platforms.npu import NpuPlatform
from epd_portable.platforms.traits import TRAITS


@pytest.fixture(params=[CudaPlatform, NpuPlatform], ids=["cuda", "npu"])
def platform(request: pytest.FixtureRequest) -> Platform:
    made: Platform = request.param()
    return made


def test_making_one_touches_no_runtime(platform: Platform) -> None:
    assert platform.traits is TRAITS[platform.name]
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch was built with CUDA")
def test_cuda_says_that_torch_was_built_without_it() -> None:
    state = CudaPlatform().availability()
    assert not state.ok
    assert state.reason == (
        f"torch was built without CUDA ({torch.__version__}); install a CUDA build of torch"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)
def test_npu_says_that_torch_npu_is_not_installed() -> None:
    state = NpuPlatform().availability()
    assert not state.ok
    assert state.reason == "torch_npu is not installed"


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)
def test_a_missing_torch_npu_stays_inside_the_error_tree() -> None:
    with pytest.raises(PlatformUnavailableError, match=r"source its set_env\.sh"):
        NpuPlatform().device_count()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_a_missing_device_is_refused_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        PlatformUnavailableError,
        match=r"cuda device 0 of 0; this process sees CUDA_VISIBLE_DEVICES=",
    ):
        CudaPlatform().device(0)


def test_threads_leave_the_error_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPD_TEST_MODE", raising=False)
    inside = threading.Event()
    first_has_left = threading.Event()

    def second() -> None:
        with errors_spare_the_process("EPD_TEST_MODE"):
            inside.set()
            assert first_has_left.wait(120)
            assert os.environ["EPD_TEST_MODE"] == "2"

    with ThreadPoolExecutor(1) as pool:
        with errors_spare_the_process("EPD_TEST_MODE"):
            made = pool.submit(second)
            assert not inside.wait(0.1)
        first_has_left.set()
        made.result()
    assert "EPD_TEST_MODE" not in os.environ


def test_the_error_mode_that_was_set_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_TEST_MODE", "1")
    with errors_spare_the_process("EPD_TEST_MODE"):
        assert os.environ["EPD_TEST_MODE"] == "2"
    assert os.environ["EPD_TEST_MODE"] == "1"

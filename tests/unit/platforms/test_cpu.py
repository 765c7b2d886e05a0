from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from epd_portable.errors import PlatformUnavailableError, TransportTimeoutError, UnsupportedError
from epd_portable.platforms.base import DeviceEvent, MemoryInfo, Platform
from epd_portable.platforms.cpu import CpuPlatform


@pytest.fixture
def platform() -> Platform:
    return CpuPlatform()


def test_cpu_is_one_device(platform: Platform) -> None:
    assert platform.device_count() == 1
    assert platform.device(0) == torch.device("cpu")
    platform.set_device(0)


@pytest.mark.parametrize("index", [-1, 1])
def test_a_second_device_is_refused(platform: Platform, index: int) -> None:
    for call in (platform.device, platform.set_device, platform.memory_info, platform.stream):
        with pytest.raises(PlatformUnavailableError, match=f"cpu device {index}"):
            call(index)


def test_cpu_reports_the_hosts_memory(platform: Platform) -> None:
    info = platform.memory_info(0)
    assert 0 < info.free_bytes <= info.total_bytes


@pytest.mark.parametrize(
    ("dtype", "supported"),
    [
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float64, False),
        (torch.int8, False),
    ],
)
def test_cpu_supports_engine_dtypes(
    platform: Platform, dtype: torch.dtype, supported: bool
) -> None:
    assert platform.supports_dtype(dtype) is supported


def test_sharing_a_tensor_is_refused_with_the_remedy(platform: Platform) -> None:
    with pytest.raises(UnsupportedError, match="use the shm transfer path"):
        platform.share_tensor(torch.ones(3))


def test_opening_a_handle_is_refused_with_its_kind(platform: Platform) -> None:
    with pytest.raises(UnsupportedError, match="cannot open cuda memory"):
        platform.open_tensor(SimpleNamespace(device_type="cuda"))


def test_rest_of_a_memory_share_is_at_most_the_free_memory() -> None:
    before = MemoryInfo(free_bytes=90, total_bytes=100)
    after = MemoryInfo(free_bytes=60, total_bytes=100)
    assert after.left_of(0.5, before) == 20
    assert after.left_of(0.2, before) == 0
    assert MemoryInfo(free_bytes=30, total_bytes=100).left_of(0.95, before) == 30


class NeverEvent(DeviceEvent):
    """Does not pass, however often it is asked."""

    asked = 0

    def wait(self) -> None:
        raise AssertionError("synchronize must not queue a wait")

    def block(self) -> None:
        raise AssertionError("synchronize must keep its deadline")

    def done(self) -> bool:
        self.asked += 1
        return False


def test_synchronize_times_out_with_few_queries() -> None:
    event = NeverEvent()
    with pytest.raises(TransportTimeoutError, match=r"not complete after 0\.2 s"):
        event.synchronize(timeout_s=0.2)
    assert event.asked < 2 * 200

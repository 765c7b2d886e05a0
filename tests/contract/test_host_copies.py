"""Encoder outputs that wait in host memory and come back, on every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epd_portable.encode.host_copies import HostCopies
from epd_portable.encode.two_levels import HostOrders
from epd_portable.platforms import registry
from epd_portable.platforms.base import Platform
from epd_portable.transfer.copies import DeviceCopies
from tests.contract.pairs import EACH_PLATFORM
from tests.waiting import until


@pytest.fixture(params=EACH_PLATFORM)
def platform(request: pytest.FixtureRequest) -> Platform:
    return registry.get(request.param)


@pytest.fixture
def device(platform: Platform) -> torch.device:
    platform.set_device(0)
    return platform.device(0)


@pytest.fixture
def copies(platform: Platform) -> Iterator[HostCopies]:
    made = HostCopies(DeviceCopies(platform, 0))
    yield made
    made.close()


DEADLINE_S = 20.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_output_comes_back_as_it_was(
    copies: HostCopies, device: torch.device, dtype: torch.dtype
) -> None:
    content = torch.arange(12, dtype=torch.float32).view(3, 4).to(dtype)
    together = torch.cat([content, content + 1]).to(device)
    copies.carry_out(HostOrders(kept=["cat"]), {})
    copies.output_ready("dog", together[3:])
    copies.output_ready("cat", together[:3])
    cache: dict[str, torch.Tensor] = {}
    copies.carry_out(HostOrders(), cache)
    assert cache == {}

    def restored() -> torch.Tensor:
        cache.clear()
        copies.carry_out(HostOrders(restored=["cat"]), cache)
        assert list(cache) == ["cat"]
        assert cache["cat"].device == together.device
        assert torch.equal(cache["cat"].cpu(), content)
        return cache["cat"]

    restored()  # Whether it is copied yet or not.
    until(lambda: restored().untyped_storage().nbytes() == content.nbytes)
    restored()
    assert not copies.take_lost()


def test_dropped_copy_stays_away_and_is_reported_missing(
    copies: HostCopies, device: torch.device
) -> None:
    copies.carry_out(HostOrders(kept=["cat", "dog"]), {})
    copies.output_ready("cat", torch.zeros(2, 4, device=device))
    cache: dict[str, torch.Tensor] = {}
    copies.carry_out(HostOrders(restored=["cat"], dropped=["cat", "dog"]), cache)
    assert list(cache) == ["cat"], "a step may bring back what it then drops"
    cache.clear()
    copies.output_ready("dog", torch.zeros(2, 4, device=device))
    assert list(copies.carry_out(HostOrders(restored=["cat", "dog"]), cache)) == ["cat", "dog"]
    assert cache == {}
    assert not copies.take_lost()


def test_failed_copy_is_reported_to_the_scheduler(
    copies: HostCopies, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    copies.carry_out(HostOrders(kept=["cat", "dog"]), {})
    copies.output_ready("cat", torch.zeros(2, 4, device="meta"))  # Has no bytes to copy.
    copies.output_ready("dog", torch.zeros(2, 4, device=device))
    lost: set[str] = set()

    def told() -> bool:
        lost.update(copies.take_lost())
        return bool(lost)

    until(told)
    assert lost == {"cat"}
    assert "the copy of item cat in host memory cannot be made" in caplog.text
    cache: dict[str, torch.Tensor] = {}
    assert list(copies.carry_out(HostOrders(restored=["cat", "dog"]), cache)) == ["cat"]
    assert list(cache) == ["dog"]

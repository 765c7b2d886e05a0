"""Device memory of another process: opened by handle, written by the device, kept by its owner."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

from epd_portable.errors import PeerLostError, UnsupportedError
from epd_portable.platforms.base import Platform, ShareHandle
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.transfer.slab import OpenedSlab
from tests.devices.child import Child

AMPLE_S = 60.0
NBYTES = 1 << 20


def share(owner: Child, name: str, make: str) -> ShareHandle:
    assert owner.tell(f"{name} = {make}.to(device); done()") == "done"
    text = owner.tell(f"msgspec.msgpack.encode(platform.share_tensor({name})).hex()")
    return msgspec.msgpack.decode(bytes.fromhex(text), type=ShareHandle)


def test_writes_of_each_end_are_seen_by_the_other(platform: Platform, owner: Child) -> None:
    opened = platform.open_tensor(share(owner, "x", "torch.arange(200, dtype=torch.uint8)"))
    assert opened.cpu().tolist() == list(range(200))
    opened.fill_(7)
    opened.cpu()  # Waits for the device that it is on.
    assert owner.tell("x.cpu().unique().tolist()") == "[7]"
    assert owner.tell("x.fill_(9); done()") == "done"
    assert opened.cpu().unique().tolist() == [9]


def test_part_of_an_allocation_is_opened_without_its_neighbours(
    platform: Platform, owner: Child
) -> None:
    assert owner.tell("whole = (torch.arange(4000) % 251).byte().to(device)") == "done"
    opened = platform.open_tensor(share(owner, "part", "whole[512:1024]"))
    assert opened.cpu().tolist() == [each % 251 for each in range(512, 1024)]
    opened.fill_(255)
    opened.cpu()
    same = owner.tell("(whole.cpu() == torch.arange(4000) % 251).sum().item()")
    assert same == str(4000 - 512)


def test_handle_is_opened_again_while_open_and_after_close(
    platform: Platform, owner: Child
) -> None:
    handle = share(owner, "x", "torch.full((100,), 3, dtype=torch.uint8)")
    first, second = platform.open_tensor(handle), platform.open_tensor(handle)
    first.fill_(4)
    first.cpu()
    assert second.cpu().unique().tolist() == [4]
    del first
    gc.collect()
    assert second.cpu().unique().tolist() == [4]
    del second
    gc.collect()
    assert platform.open_tensor(handle).cpu().unique().tolist() == [4]


def test_a_device_is_found_though_its_owner_counts_it_as_another(platform: Platform) -> None:
    if platform.device_count() < 2:
        pytest.skip("takes two devices")
    variable = str(platform.traits.visible_devices_env)
    with Child(platform.name, **{variable: "1"}) as owner:
        assert owner.tell("device.index") == "0"
        opened = platform.open_tensor(share(owner, "x", "torch.full((100,), 3, dtype=torch.uint8)"))
        assert opened.cpu().unique().tolist() == [3]


def test_device_writes_into_another_slab_behind_its_computation(
    platform: Platform, owner: Child, device: torch.device
) -> None:
    made = f"slab = DeviceSlab(DeviceCopies(platform, last), {NBYTES}, new_session())"
    assert owner.tell(made) == "done"
    assert owner.tell(f"slab.tensor(0, {NBYTES}).fill_(255); done()") == "done"
    slab = OpenedSlab(platform, owner.tell("slab.address"))
    copies = DeviceCopies(platform, 0)
    item = torch.zeros(64 << 10, dtype=torch.uint8, device=device)
    for _ in range(200):
        item.add_(1)
    target = slab.tensor(NBYTES // 2, item.numel())
    computed = platform.record_event()
    copies.queue(target, item, after=computed, deadline_s=copies.clock() + AMPLE_S).finish()
    counted = owner.tell(f"torch.bincount(slab.tensor(0, {NBYTES}).cpu())[[200, 255]].tolist()")
    assert counted == str([item.numel(), NBYTES - item.numel()])
    start = NBYTES // 2
    assert owner.tell(f"slab.tensor({start}, 1).item()") == "200"
    assert owner.tell(f"slab.tensor({start - 1}, 1).item()") == "255"


def test_slab_of_a_killed_process_is_a_lost_peer(platform: Platform) -> None:
    with Child(platform.name) as owner:
        made = f"slab = DeviceSlab(DeviceCopies(platform, last), {NBYTES}, new_session())"
        assert owner.tell(made) == "done"
        address = owner.tell("slab.address")
        slab = OpenedSlab(platform, address)
        owner.kill()
        assert slab.is_gone
        with pytest.raises(PeerLostError):
            OpenedSlab(platform, address)


def test_sharing_of_expandable_segments_is_refused(platform: Platform) -> None:
    variable = f"PYTORCH_{platform.name.upper()}_ALLOC_CONF"
    with Child(platform.name, **{variable: "expandable_segments:True"}) as owner:
        assert owner.tell("x = torch.zeros(1 << 20, device=device)") == "done"
        answer = owner.tell("platform.share_tensor(x)")
    assert answer.startswith(UnsupportedError.__name__)
    assert f"expandable_segments:False in {variable}" in answer


@pytest.mark.needs_cuda
def test_opening_memory_creates_no_context_on_other_devices(platform: Platform) -> None:
    if platform.device_count() < 2:
        pytest.skip("takes two devices")
    with Child("cuda", CUDA_VISIBLE_DEVICES="0") as owner:
        handle = share(owner, "x", "torch.ones(100, dtype=torch.uint8)")
        with Child("cuda", CUDA_VISIBLE_DEVICES="1,0") as opener:
            assert opener.tell("torch._C._cuda_hasPrimaryContext(0)") == "False"
            assert opener.tell(f"y = platform.open_tensor({handle!r}); y.sum().item()") != ""
            assert opener.tell("torch._C._cuda_hasPrimaryContext(1)") == "True"

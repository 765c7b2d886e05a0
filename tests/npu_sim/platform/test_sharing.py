"""Device memory that several processes use, beyond what `tests/devices` shows of any device."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from epd_portable.errors import PlatformError
from epd_portable.platforms.base import Platform, ShareHandle
from tests.npu_sim.platform.children import Child, run_afresh

MIB = 1 << 20


ALLOCATOR = "expandable_segments:False"
"""Allocator of engines with a slab; memory of the other one is not shared, see tests/devices."""


@pytest.fixture(scope="module")
def exporter() -> Iterator[Child]:
    with Child(PYTORCH_NPU_ALLOC_CONF=ALLOCATOR) as child:
        yield child


def share(exporter: Child, name: str, make: str) -> ShareHandle:
    assert exporter.tell(f"{name} = {make}; torch.npu.synchronize('npu:1')") == "done"
    text = exporter.tell(f"msgspec.msgpack.encode(npu.share_tensor({name})).hex()")
    return msgspec.msgpack.decode(bytes.fromhex(text), type=ShareHandle)


def test_hidden_device_is_reached_from_a_visible_one(exporter: Child) -> None:
    handle = share(exporter, "x", "torch.full((100,), 3, dtype=torch.uint8).to('npu:1')")
    with Child(ASCEND_RT_VISIBLE_DEVICES="0", PYTORCH_NPU_ALLOC_CONF=ALLOCATOR) as other:
        assert other.tell("npu.device_count()") == "1"
        code = f"y = npu.open_tensor({handle!r})"
        assert other.tell(code) == "done"
        assert other.tell("str(y.device), y.cpu().unique().tolist()") == "('npu:0', [3])"
        assert other.tell("y.fill_(6); torch.npu.synchronize()") == "done"
    assert exporter.tell("x.cpu().unique().tolist()") == "[6]"


def test_a_handle_of_a_dead_exporter_is_an_error(npu: Platform) -> None:
    with Child(PYTORCH_NPU_ALLOC_CONF=ALLOCATOR) as gone:
        handle = share(gone, "x", "torch.full((100,), 3, dtype=torch.uint8).to('npu:1')")
        gone.kill()
    with pytest.raises(PlatformError, match=r"cannot open memory of device .*, if it is still"):
        npu.open_tensor(handle)


def test_shared_memory_is_freed_without_live_openers(exporter: Child) -> None:
    free = "(gc.collect(), torch.npu.empty_cache(), npu.memory_info(1).free_bytes)[2]"
    assert exporter.tell("import gc; torch.zeros(1, device='npu:1'); npu.memory_info(1)")
    before = int(exporter.tell(free))
    for _ in range(2):
        handle = share(exporter, "x", f"torch.zeros({64 * MIB}, dtype=torch.uint8).to('npu:1')")
        with Child(PYTORCH_NPU_ALLOC_CONF=ALLOCATOR) as opener:
            code = f"y = npu.open_tensor({handle!r})"
            assert opener.tell(code) == "done"
            opener.kill()
        assert before - int(exporter.tell(free)) >= 64 * MIB
        assert exporter.tell("del x") == "done"
        assert int(exporter.tell(free)) == before
    share(exporter, "x", f"torch.zeros({64 * MIB}, dtype=torch.uint8).to('npu:1')")
    assert exporter.tell("del x") == "done"
    assert int(exporter.tell(free)) == before


def test_process_frees_memory_and_exits_after_a_lost_peer(exporter: Child) -> None:
    handle = share(exporter, "x", "torch.full((100,), 3, dtype=torch.uint8).to('npu:1')")
    packed = msgspec.msgpack.encode(handle)
    script = f"from tests.npu_sim.platform.lost_peer_script import main; main({packed!r})"
    assert "ALIVE [3]" in run_afresh(script).splitlines()

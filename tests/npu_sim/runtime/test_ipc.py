"""Device memory shared between processes by keys."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.multiprocessing

from tests.npu_sim.runtime import acl, children

SIZE = 2 * acl.MIB

# Exports memory that begins with its own name, then does as it is told.
EXPORTER = f"""
acl.call("aclrtSetDevice", 0)
address = acl.malloc({SIZE})
acl.write(address, b"exporter")
print(acl.export(address, {SIZE}).decode())
for line in sys.stdin:
    if line.strip() == "free":
        acl.free(address)
    print(acl.read(address, 8).decode() if line.strip() == "read" else "done")
"""


def test_both_processes_see_the_same_bytes() -> None:
    with children.talking(EXPORTER) as exporter:
        address = acl.import_key(key := children.line_from(exporter).encode())
        assert acl.read(address, 8) == b"exporter"

        acl.write(address, b"importer")
        children.tell(exporter, "read")
        assert children.line_from(exporter) == "importer"
        acl.call("aclrtIpcMemClose", key)


def test_memory_of_a_device_that_the_importer_does_not_see_can_be_opened_and_copied() -> None:
    importer = f"""
acl.call("aclrtSetDevice", 0)
key = sys.stdin.readline().strip().encode()
theirs, mine = acl.import_key(key), acl.malloc({SIZE})
acl.call("aclrtMemcpy", mine, 8, theirs, 8, acl.DEVICE_TO_DEVICE)
print(acl.read(mine, 8).decode(), acl.attributes(theirs).type, acl.attributes(theirs).id)
acl.write(mine, b"importer")
acl.call("aclrtMemcpy", theirs, 8, mine, 8, acl.DEVICE_TO_DEVICE)
print("written")
sys.stdin.readline()
"""
    with (
        children.talking(EXPORTER, ASCEND_RT_VISIBLE_DEVICES="1") as exporter,
        children.talking(importer, ASCEND_RT_VISIBLE_DEVICES="0") as child,
    ):
        children.tell(child, children.line_from(exporter))

        assert children.line_from(child) == f"exporter {acl.LOCATION_DEVICE} 0"
        assert children.line_from(child) == "written"
        children.tell(exporter, "read")
        assert children.line_from(exporter) == "importer"


def test_only_processes_whose_ids_were_set_import_where_ids_are_looked_at() -> None:
    guarded = EXPORTER.replace(
        f"acl.export(address, {SIZE})", f"(key := acl.export(address, {SIZE}, anybody=False))"
    )
    guarded = guarded.replace(
        'print(acl.read(address, 8).decode() if line.strip() == "read" else "done")',
        "pids = (ctypes.c_int32 * 1)(int(line))\n"
        '    acl.call("aclrtIpcMemSetImportPid", key, pids, 1)\n    print("set")',
    )
    with children.talking("import ctypes\n" + guarded) as exporter:
        key = children.line_from(exporter).encode()
        with pytest.raises(acl.RuntimeCallError, match=f"process {os.getpid()} may not import"):
            acl.import_key(key)
        children.tell(exporter, str(os.getpid()))
        assert children.line_from(exporter) == "set"
        assert acl.read(acl.import_key(key), 8) == b"exporter"
        acl.call("aclrtIpcMemClose", key)


def test_memory_of_another_device_is_imported_by_peers_only() -> None:
    with children.talking(EXPORTER, ASCEND_RT_VISIBLE_DEVICES="1") as exporter:
        key = children.line_from(exporter).encode()
        with pytest.raises(acl.RuntimeCallError, match="device 1, imported without peer access"):
            acl.import_key(key, peer=False)
        assert acl.read(acl.import_key(key), 8) == b"exporter"
        acl.call("aclrtIpcMemClose", key)


def test_a_key_of_a_process_that_died_is_refused() -> None:
    with children.talking(EXPORTER) as exporter:
        key = children.line_from(exporter).encode()
        exporter.send_signal(signal.SIGKILL)
        exporter.wait(children.DEADLINE_S)

    with pytest.raises(acl.RuntimeCallError, match=rf"process {exporter.pid} has") as caught:
        acl.import_key(key)
    assert caught.value.code == acl.INVALID_HANDLE


def test_a_key_of_memory_that_was_freed_is_refused_even_if_its_file_number_is_used_again() -> None:
    again = EXPORTER.replace(
        "acl.free(address)", f"acl.free(address); address = acl.malloc({SIZE})"
    )
    with children.talking(again) as exporter:
        key = children.line_from(exporter).encode()
        children.tell(exporter, "free")
        assert children.line_from(exporter) == "done"

        with pytest.raises(acl.RuntimeCallError, match="has freed its shared memory"):
            acl.import_key(key)


def test_memory_that_was_opened_outlives_its_exporter() -> None:
    with children.talking(EXPORTER) as exporter:
        key = children.line_from(exporter).encode()
        address = acl.import_key(key)
    exporter.wait(children.DEADLINE_S)

    assert acl.read(address, 8) == b"exporter"
    acl.call("aclrtIpcMemClose", key)


def test_closed_memory_cannot_be_read_and_opened_memory_cannot_be_freed() -> None:
    with children.talking(EXPORTER) as exporter:
        address = acl.import_key(key := children.line_from(exporter).encode())
        freed = acl.code_of("aclrtFree", address)
        acl.call("aclrtIpcMemClose", key)

        assert freed == acl.INVALID_PARAM
        with pytest.raises(acl.RuntimeCallError, match="outside of allocated"):
            acl.read(address, 8)
        assert acl.code_of("aclrtIpcMemClose", key) == acl.INVALID_PARAM


@pytest.mark.parametrize(
    "key", [b"", b"asim:1:2", f"asim:{os.getpid()}:0:1:99:0".encode()], ids=repr
)
def test_what_is_not_a_key_is_refused(key: bytes) -> None:
    with pytest.raises(acl.RuntimeCallError, match="not a key"):
        acl.import_key(key)


def test_a_key_can_only_name_device_memory_of_its_process() -> None:
    with pytest.raises(acl.RuntimeCallError):
        acl.import_key(f"asim:{os.getpid()}:0:1:0:0".encode())


@pytest.mark.parametrize("offset", [4, SIZE])
def test_only_whole_allocations_are_exported(offset: int) -> None:
    with (
        acl.memory(SIZE) as address,
        pytest.raises(acl.RuntimeCallError, match="not an allocation"),
    ):
        acl.export(address + offset, 4)


def test_a_key_that_does_not_fit_is_not_cut_short() -> None:
    with acl.memory(SIZE) as address:
        code = acl.code_of("aclrtIpcMemGetExportKey", address, SIZE, bytes(9), 8, 1)

        assert code == acl.INVALID_PARAM


def test_torch_shares_a_tensor_with_a_process_that_writes_it() -> None:
    spawn = torch.multiprocessing.get_context("spawn")
    to_child, from_child = spawn.Queue(), spawn.Queue()
    child = spawn.Process(target=double_what_comes, args=(to_child, from_child))
    child.start()
    try:
        tensor = torch.arange(8, dtype=torch.float32).to("npu:1")
        torch.npu.synchronize(1)
        to_child.put(tensor)
        seen = from_child.get(timeout=children.DEADLINE_S)

        assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
        assert tensor.cpu().tolist() == [2 * value for value in seen]
        to_child.put(None)
        child.join(children.DEADLINE_S)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def double_what_comes(
    incoming: torch.multiprocessing.Queue, outgoing: torch.multiprocessing.Queue
) -> None:
    """Run in a child: read a tensor, write it, and keep it until told to let go."""
    tensor = incoming.get(timeout=children.DEADLINE_S)
    values = tensor.cpu()
    tensor.copy_(2 * values)
    torch.npu.synchronize(tensor.device)
    outgoing.put(values.tolist())
    incoming.get(timeout=children.DEADLINE_S)

"""Device memory shared between processes by keys."""

from __future__ import annotations

import os
import signal

import pytest

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


def test_key_of_freed_memory_is_refused_after_inode_reuse() -> None:
    again = EXPORTER.replace(
        "acl.free(address)", f"acl.free(address); address = acl.malloc({SIZE})"
    )
    with children.talking(again) as exporter:
        key = children.line_from(exporter).encode()
        children.tell(exporter, "free")
        assert children.line_from(exporter) == "done"

        with pytest.raises(acl.RuntimeCallError, match="has freed its shared memory"):
            acl.import_key(key)


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
def test_invalid_key_is_refused(key: bytes) -> None:
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

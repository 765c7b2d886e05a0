"""Devices that a process sees: their number, indices and descriptions."""

from __future__ import annotations

import pytest
import torch

from ci.ascend_sim.tests.runtime import acl, children

COUNT = """
count = ctypes.c_uint32()
acl.code_of("aclrtGetDeviceCount", ctypes.byref(count))
print(count.value)
"""


def test_visibility_is_fixed_once_a_device_is_in_use() -> None:
    code = f"os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '1'; acl.library()\n{COUNT}"
    late = "acl.call('aclrtSetDevice', 0); os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '0,1'"

    assert children.answer(f"{code}\n{late}\n{COUNT}") == "1\n1"


def test_an_unknown_device_is_refused() -> None:
    assert acl.code_of("aclrtSetDevice", 2) == acl.INVALID_DEVICE
    assert "device 2 of 2" in acl.message()
    with pytest.raises(RuntimeError, match="107001"):
        torch.npu.set_device(7)


def test_thread_without_a_device_can_not_allocate_or_stream() -> None:
    code = """
out = ctypes.byref(ctypes.c_void_p())
print(acl.code_of("aclrtMalloc", out, 4, 0), acl.code_of("aclrtCreateStream", out))
print(acl.code_of("aclrtSynchronizeStream", None), acl.code_of("aclrtStreamQuery", None, out))
"""

    assert set(children.answer(code).split()) == {str(acl.CONTEXT_NULL)}


def test_the_chip_and_the_version_of_cann_follow_their_settings() -> None:
    code = """
acl.library().aclrtGetSocName.restype = ctypes.c_char_p
version = ctypes.create_string_buffer(1024)
acl.call("aclsysGetVersionStr", b"runtime", version)
print(acl.library().aclrtGetSocName().decode(), version.value.decode())
"""

    assert children.answer(code) == "Ascend910B3 8.5.0"
    assert children.answer(code, ASCEND_SIM_SOC="Ascend310P3", ASCEND_SIM_CANN="9.0.0") == (
        "Ascend310P3 9.0.0"
    )


def test_the_log_names_each_failure_when_it_is_asked_for() -> None:
    code = "acl.code_of('aclrtSetDevice', 5)"

    assert "device 5 of 2" in children.run(code, ASCEND_SIM_LOG="1").stderr
    assert children.run(code).stderr == ""

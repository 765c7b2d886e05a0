"""Intel AMX in workers on the CPU; on other processors there is nothing to permit."""

from __future__ import annotations

import torch

from tests import warm

# arch_prctl(ARCH_GET_XCOMP_PERM) of Linux 5.16; the bit is XFEATURE_XTILEDATA.
SCRIPT = """
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
    done = warm.over_vllm().run("-c", SCRIPT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["False", str(torch.cpu._is_amx_tile_supported())]

"""Ascend NPUs through torch_npu; the only module that imports it.

Written from the code and documentation of torch_npu and CANN; not run on hardware.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from epd_portable.errors import PlatformError, PlatformUnavailableError, UnsupportedError
from epd_portable.platforms.accelerator import AcceleratorPlatform
from epd_portable.platforms.base import Availability, ShareHandle
from epd_portable.platforms.checks import check_address, check_nbytes
from epd_portable.platforms.collectives_torch import DataBackend, Store
from epd_portable.platforms.traits import TRAITS

# A communicator takes twice this much device memory, by default 2 × 200 MB; a pair that only sends
# and receives needs no more than some pipelining.
_HCCL_BUFFER_MB = 32
_HOST_REGISTER_MAPPED = 0
_HOST_REGISTER_DEFAULT = 0
_NEVER = timedelta(days=365)


class NpuPlatform(AcceleratorPlatform):
    """Ascend NPUs; not run on hardware."""

    traits = TRAITS["npu"]

    @property
    def _runtime(self) -> Any:
        return _torch_npu().npu

    def availability(self) -> Availability:
        """Look for torch_npu, for CANN beneath it, and for a device."""
        if importlib.util.find_spec("torch_npu") is None:
            return Availability(ok=False, reason="torch_npu is not installed")
        try:
            torch_npu = _torch_npu()
        except PlatformUnavailableError as error:
            return Availability(ok=False, reason=str(error))
        if not torch_npu.npu.is_available():
            visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "(unset)")
            return Availability(
                ok=False,
                reason=f"torch_npu {torch_npu.__version__} sees no device; look at npu-smi info "
                f"and ASCEND_RT_VISIBLE_DEVICES={visible}",
            )
        count = torch_npu.npu.device_count()
        return Availability(ok=True, reason=f"torch_npu {torch_npu.__version__}, {count} devices")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the current device computes in it; the 310P knows float16 only."""
        if "310P" in self._runtime.get_device_name():
            return dtype == torch.float16
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def pin_host(self, address: int, nbytes: int) -> None:
        """Register the range by torch_npu where it can (2.13 on), else by CANN itself."""
        check_address(address)
        check_nbytes(nbytes)
        runtime = self._registration()
        if runtime is not None:
            code = runtime.npuHostRegister(address, nbytes, _HOST_REGISTER_DEFAULT)
        else:
            device_address = ctypes.c_void_p()
            code = _ascendcl().aclrtHostRegister(
                ctypes.c_void_p(address),
                ctypes.c_uint64(nbytes),
                ctypes.c_int(_HOST_REGISTER_MAPPED),
                ctypes.byref(device_address),
            )
        if int(code) != 0:
            raise PlatformError(
                f"CANN refused to register {nbytes} bytes at {address:#x} with error {int(code)}; "
                "the range may be pinned already, or the driver too old"
            )

    def unpin_host(self, address: int) -> None:
        """Unregister the range that starts at ``address``."""
        check_address(address)
        runtime = self._registration()
        if runtime is not None:
            code = runtime.npuHostUnregister(address)
        else:
            code = _ascendcl().aclrtHostUnregister(ctypes.c_void_p(address))
        if int(code) != 0:
            raise PlatformError(
                f"CANN refused to unregister {address:#x} with error {int(code)}; "
                "pass the start of a pinned range"
            )

    def _registration(self) -> Any:
        """Return torch_npu's own registration calls; ``None`` where it has none."""
        npurt = getattr(self._runtime, "npurt", None)
        return None if npurt is None else npurt()

    def _index_to_open(self, handle: ShareHandle) -> int:
        # The runtime opens memory of any device of the host for a peer, visible or not.
        index = self._visible_index(handle.device_uuid)
        return int(self._runtime.current_device()) if index is None else index

    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        from torch_npu.multiprocessing.reductions import rebuild_npu_tensor

        tensor: torch.Tensor = rebuild_npu_tensor(*arguments)
        return tensor

    def _data_backend(self, store: Store, rank: int, size: int) -> DataBackend:
        backend_cls = _torch_npu()._C._distributed_c10d.ProcessGroupHCCL
        options = backend_cls.Options()
        # Deadlines are kept by the group; HCCL's own would end the process.
        options._timeout = _NEVER
        options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MB}
        backend: DataBackend = backend_cls(store, rank, size, options)
        return backend


def _torch_npu() -> ModuleType:
    """Import torch_npu.

    Raises:
        PlatformUnavailableError: It is not installed, or CANN is not.
    """
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlatformUnavailableError(
            f"no CANN runtime: {reason}; install CANN and source its set_env.sh"
        ) from error
    module: ModuleType = torch_npu
    return module


def _ascendcl() -> ctypes.CDLL:
    """Return CANN's runtime library, which torch_npu has loaded.

    Raises:
        UnsupportedError: It is not to be found.
    """
    try:
        return ctypes.CDLL("libascendcl.so")
    except OSError as error:
        raise UnsupportedError(
            f"host memory cannot be pinned: {error}; torch_npu 2.13 or CANN's libascendcl.so "
            "on LD_LIBRARY_PATH is needed"
        ) from error

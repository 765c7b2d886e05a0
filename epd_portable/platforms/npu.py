"""Ascend NPUs through torch_npu; the only module that imports it.

Exercised with the real torch_npu 2.13 over a simulated runtime; not run on hardware. The fallbacks
for torch_npu 2.10 are exercised there too, with the newer calls hidden.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from epd_portable.errors import PlatformError, PlatformUnavailableError, UnsupportedError
from epd_portable.platforms.accelerator import AcceleratorPlatform, errors_spare_the_process
from epd_portable.platforms.base import Availability, ShareHandle
from epd_portable.platforms.collectives import CollectiveGroup, Rendezvous
from epd_portable.platforms.collectives_device import Turns
from epd_portable.platforms.traits import TRAITS

# HCCL takes twice this much device memory for a communicator, by default 2 x 200 MB: so a group of
# this package costs 64 MB a pair of ranks, which is enough for some pipelining.
_HCCL_BUFFER_MB = 32
# The second is what torch_npu called it before 2.13.
_ERROR_MODE = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
# torch_npu (2.13) hands out 32 streams in turn, and one whose work has failed stays so: the group
# that is given it again fails, and HCCL's watchdog then ends the process. The rest is for others.
_GROUPS_AFTER_FAILURE = 24
_HOST_REGISTER_MAPPED = 0
_HOST_REGISTER_DEFAULT = 0
_NEVER = timedelta(days=365)


class NpuPlatform(AcceleratorPlatform):
    """Ascend NPUs."""

    traits = TRAITS["npu"]
    # torch_npu 2.13 appends a release function to a list of the process each time it has made a
    # communicator, without a lock: two at the same moment corrupt the list, which ends the process
    # there or when it exits. A communicator that the engine makes meanwhile is not covered.
    turns = Turns()

    def __init__(self) -> None:
        super().__init__()
        self._groups_left: int | None = None
        self._opened: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

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
                f"and ASCEND_RT_VISIBLE_DEVICES={visible}, whose ids must exist and ascend",
            )
        count = torch_npu.npu.device_count()
        return Availability(ok=True, reason=f"torch_npu {torch_npu.__version__}, {count} devices")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether devices of this kind compute in it; the 310P supports only float16."""
        self.device(0)
        if "310P" in self._runtime.get_device_name():
            return dtype == torch.float16
        if dtype == torch.bfloat16:
            return bool(self._runtime.is_bf16_supported())
        return dtype in (torch.float32, torch.float16)

    def compute_units(self, index: int) -> Mapping[str, int]:
        """Query CANN (8.2.RC1 on, torch_npu 7.1 on) for cube (matrix) and vector cores."""
        device = self.device(index)
        if not hasattr(self._runtime, "get_device_limit"):
            raise UnsupportedError(
                f"torch_npu {_torch_npu().__version__} does not limit cores: update torch_npu, or "
                "divide the device beforehand (npu-smi set -t create-vnpu)"
            )
        with self._translated(f"read the cores of {device}"), self._runtime.device(device):
            cores = self._runtime.get_device_limit(index)
        return {"cube cores": cores["cube_core_num"], "vector cores": cores["vector_core_num"]}

    def limit_compute(self, index: int, percent: int) -> Mapping[str, int]:
        """Let CANN spread this process's operators over fewer cores."""
        whole = self.compute_units(index)
        cube, vector = (max(1, count * percent // 100) for count in whole.values())
        with self._translated(f"limit the cores of device {index}"):
            self._runtime.set_device_limit(index, cube, vector)
        return self.compute_units(index)

    def _register_host(self, address: int, nbytes: int) -> None:
        """Register the range by torch_npu, else by CANN itself.

        Read in torch_npu's wheels: 2.9.0.post9, 2.11.0.post3, 2.12.0.post3, 2.13.0 and 2.14.0 have
        the call; 2.10.0.post4, which vllm-ascend up to 0.30 requests, does not.
        """
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
                "the driver may be too old"
            )

    def _unregister_host(self, address: int) -> None:
        runtime = self._registration()
        if runtime is not None:
            code = runtime.npuHostUnregister(address)
        else:
            code = _ascendcl().aclrtHostUnregister(ctypes.c_void_p(address))
        if int(code) != 0:
            raise PlatformError(f"CANN refused to unregister {address:#x} with error {int(code)}")

    def _registration(self) -> Any:
        """Return torch_npu's own registration calls; ``None`` where it has none."""
        # CANN registers nothing for a thread without a device.
        self._runtime.set_device(self._runtime.current_device())
        npurt = getattr(self._runtime, "npurt", None)
        return None if npurt is None else npurt()

    def _index_to_open(self, handle: ShareHandle) -> int:
        # The runtime opens memory of any device of the host for a peer, visible or not. Under the
        # opener's own device copies are asynchronous; between two devices torch_npu (2.13) blocks
        # its caller, and all other threads with it, until work before the copy is complete.
        return int(self._runtime.current_device())

    def open_tensor(self, handle: ShareHandle) -> torch.Tensor:
        """Import a peer's memory; after a failed group it is not closed again, see `_keep`."""
        tensor = super().open_tensor(handle)
        self._opened[id(tensor)] = tensor
        if self._groups_left is not None:
            _keep(tensor)
        return tensor

    def _release_counter(self, ref_counter: bytes, offset: int) -> None:
        torch.UntypedStorage._release_ipc_counter_npu(ref_counter, offset)  # type: ignore[attr-defined]

    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        from torch_npu.multiprocessing.reductions import rebuild_npu_tensor

        tensor: torch.Tensor = rebuild_npu_tensor(*arguments)
        return tensor

    def new_group(self, rendezvous: Rendezvous, *, index: int, timeout_s: float) -> CollectiveGroup:
        """Join an HCCL group; some time after a failed one, this process makes no more.

        Raises:
            UnsupportedError: Another group could end the process.
        """
        if self._groups_left is not None:
            if self._groups_left == 0:
                raise UnsupportedError(
                    "a group of this process failed while a tensor moved, and torch_npu is about "
                    "to use the stream that failed again, which would end the process: restart "
                    "the instance, or set transfer.path to ipc, shm or tcp"
                )
            self._groups_left -= 1
        return super().new_group(rendezvous, index=index, timeout_s=timeout_s)

    def group_failed(self) -> None:
        """Count from now on what is left, see `_GROUPS_AFTER_FAILURE`."""
        if self._groups_left is None:
            self._groups_left = _GROUPS_AFTER_FAILURE
            for tensor in self._opened.values():
                _keep(tensor)

    def data_backend(self, store: Store, rank: int, size: int) -> Any:
        backend_cls = _torch_npu()._C._distributed_c10d.ProcessGroupHCCL
        options = backend_cls.Options()
        # Deadlines are kept by the group; HCCL's own would end the process.
        options._timeout = _NEVER
        options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MB}
        with errors_spare_the_process(*_ERROR_MODE):
            return backend_cls(store, rank, size, options)

    def end_work(self, work: Any) -> None:
        if not work.is_success():
            raise RuntimeError("HCCL reports that the work failed")
        # Complete already; the call releases the tensor, which HCCL keeps until then.
        work.wait()


def _keep(tensor: torch.Tensor) -> None:
    """Keep a peer's memory open for as long as the process lives.

    torch_npu (2.13) waits for the whole device before it closes such memory, work that has failed
    included, and raises what it gets where C++ may not raise, which ends the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


def _torch_npu() -> ModuleType:
    """Import torch_npu; `PlatformUnavailableError` if it or CANN is not installed."""
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
    """Return CANN's runtime library, which torch_npu has loaded; may raise `UnsupportedError`."""
    try:
        return ctypes.CDLL("libascendcl.so")
    except OSError as error:
        raise UnsupportedError(
            f"host memory cannot be pinned: {error}; torch_npu 2.11 or CANN's libascendcl.so "
            "on LD_LIBRARY_PATH is needed"
        ) from error

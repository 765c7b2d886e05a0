"""NVIDIA GPUs through ``torch.cuda``; run on one H200, but for what takes several devices."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.multiprocessing import reductions

from epd_portable.errors import PlatformError, UnsupportedError
from epd_portable.platforms.accelerator import AcceleratorPlatform, errors_spare_the_process
from epd_portable.platforms.base import Availability, ShareHandle
from epd_portable.platforms.traits import TRAITS

_HOST_REGISTER_PORTABLE = 1
_NEVER = timedelta(days=365)
# Each channel of a communicator is a block of threads on the device, and buffers of 4 MiB and more
# besides the engine's memory; NCCL takes up to 32 by default. Few move an item fast enough.
_NCCL_CHANNELS = 4


class CudaPlatform(AcceleratorPlatform):
    """NVIDIA GPUs."""

    traits = TRAITS["cuda"]

    @property
    def _runtime(self) -> Any:
        return torch.cuda

    def availability(self) -> Availability:
        """Look for a CUDA build of torch and a device; queries NVML, so no context is created."""
        if torch.version.cuda is None:
            return Availability(
                ok=False,
                reason=f"torch was built without CUDA ({torch.__version__}); "
                "install a CUDA build of torch",
            )
        count = torch.cuda.device_count()
        if count == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(unset)")
            return Availability(
                ok=False,
                reason=f"torch has CUDA {torch.version.cuda} but sees no device; look at "
                f"nvidia-smi and CUDA_VISIBLE_DEVICES={visible}",
            )
        return Availability(ok=True, reason=f"CUDA {torch.version.cuda}, {count} devices")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether devices of this kind compute in it natively."""
        self.device(0)
        if dtype == torch.bfloat16:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return dtype in (torch.float32, torch.float16)

    def raise_current_stream(self) -> None:
        """Set a stream of the highest priority, behind the work of the one before."""
        runtime = self._runtime
        _, highest = runtime.Stream.priority_range()
        with self._translated("make a stream of high priority"):
            stream = runtime.Stream(priority=highest)
            stream.wait_stream(runtime.current_stream())
            runtime.set_stream(stream)

    def _register_host(self, address: int, nbytes: int) -> None:
        code = _cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE)
        if int(code) != 0:
            _clear_error()
            raise PlatformError(
                f"cudaHostRegister refused {nbytes} bytes at {address:#x} with error {int(code)}; "
                "the limit of locked memory (ulimit -l) may be too low"
            )

    def _unregister_host(self, address: int) -> None:
        code = _cudart().cudaHostUnregister(address)
        if int(code) != 0:
            _clear_error()
            raise PlatformError(f"cudaHostUnregister refused {address:#x} with error {int(code)}")

    def _release_counter(self, ref_counter: bytes, offset: int) -> None:
        torch.UntypedStorage._release_ipc_counter_cuda(ref_counter, offset)

    def _index_to_open(self, handle: ShareHandle) -> int:
        for index in range(self.device_count()):
            if handle.device_uuid and self._uuid(index) == handle.device_uuid:
                return index
        raise UnsupportedError(
            f"GPU {handle.device_uuid} is not visible to this process; CUDA opens memory only of "
            "visible devices: list it in CUDA_VISIBLE_DEVICES of both instances"
        )

    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return tensor

    def data_backend(self, store: Store, rank: int, size: int) -> Any:
        backend_cls = torch.distributed.ProcessGroupNCCL
        options = backend_cls.Options()
        # Deadlines are kept by the group; NCCL's own would end the process.
        options._timeout = _NEVER
        options.config.max_ctas = _NCCL_CHANNELS
        with errors_spare_the_process("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            return backend_cls(store, rank, size, options)

    def end_work(self, work: Any) -> None:
        # NCCL's work is completed when it failed, too. It raises when queried for that (torch 2.11
        # to 2.13); the wait, which does not block any more, raises what went wrong.
        work.wait()


def _cudart() -> Any:
    """Return the CUDA runtime, initialised."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error() -> None:
    """Forget the error of the last call in this thread, which has been reported.

    torch calls the runtime without clearing it (2.11 to 2.13), and would take it for that of the
    kernel that is launched next.
    """
    major = str(torch.version.cuda).partition(".")[0]
    # torch has loaded it, and another copy of the name is not loaded.
    ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()

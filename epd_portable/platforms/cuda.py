"""NVIDIA GPUs through ``torch.cuda``.

Written from the documentation of torch and of the CUDA runtime; not run on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.multiprocessing import reductions

from epd_portable.errors import PlatformError, UnsupportedError
from epd_portable.platforms.accelerator import AcceleratorPlatform
from epd_portable.platforms.base import Availability, ShareHandle
from epd_portable.platforms.checks import check_address, check_nbytes
from epd_portable.platforms.collectives_torch import DataBackend, Store
from epd_portable.platforms.traits import TRAITS

_HOST_REGISTER_PORTABLE = 1
_NEVER = timedelta(days=365)


class CudaPlatform(AcceleratorPlatform):
    """NVIDIA GPUs; not run on hardware."""

    traits = TRAITS["cuda"]

    @property
    def _runtime(self) -> Any:
        return torch.cuda

    def availability(self) -> Availability:
        """Look for a CUDA build of torch and a device; asks NVML, so no context is created."""
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
        """Whether the current device computes in it natively."""
        if dtype == torch.bfloat16:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return dtype in (torch.float32, torch.float16)

    def pin_host(self, address: int, nbytes: int) -> None:
        """Register the range for all contexts of this process."""
        check_address(address)
        check_nbytes(nbytes)
        code = _cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE)
        if int(code) != 0:
            raise PlatformError(
                f"cudaHostRegister refused {nbytes} bytes at {address:#x} with error {int(code)}; "
                "the range may be pinned already, or the limit of locked memory (ulimit -l) too low"
            )

    def unpin_host(self, address: int) -> None:
        """Unregister the range that starts at ``address``."""
        check_address(address)
        code = _cudart().cudaHostUnregister(address)
        if int(code) != 0:
            raise PlatformError(
                f"cudaHostUnregister refused {address:#x} with error {int(code)}; "
                "pass the start of a pinned range"
            )

    def _index_to_open(self, handle: ShareHandle) -> int:
        index = self._visible_index(handle.device_uuid)
        if index is None:
            raise UnsupportedError(
                f"GPU {handle.device_uuid} is not visible to this process; CUDA opens memory only "
                "of visible devices: list it in CUDA_VISIBLE_DEVICES of both instances"
            )
        return index

    def _rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return tensor

    def _data_backend(self, store: Store, rank: int, size: int) -> DataBackend:
        backend_cls = torch.distributed.ProcessGroupNCCL
        options = backend_cls.Options()
        # Deadlines are kept by the group; NCCL's own would end the process.
        options._timeout = _NEVER
        with _errors_abort_communicators_only():
            backend: DataBackend = backend_cls(store, rank, size, options)  # type: ignore[assignment]
        return backend


def _cudart() -> Any:
    """Return the CUDA runtime, initialised."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextmanager
def _errors_abort_communicators_only() -> Iterator[None]:
    """Make a NCCL group that, when its peer dies, drops its communicators and not the process.

    The mode is read from the environment when the group is made; 2 is ``CleanUpOnly``. The engine's
    groups keep the mode that they were made with.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

"""Needs of an environment for NVIDIA on its machine, checked before anything is fetched.

The engine is gigabytes with what it needs: a driver or a Python that cannot use it is reported
first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ci.venv import EnvironmentSetupError

ENGINE = "vllm==0.32.0"
"""Engine of `make env PLATFORM=cuda`, of the versions that the package supports."""
NEWEST_PYTHON = (3, 14)
"""Newest Python of the engine; the oldest is that of the project's tools."""
OLDEST_DRIVER = 580
"""Oldest driver for CUDA 13, for which the engine and its torch are built."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
NVCC_PLACES = ("nvcc", "/usr/local/cuda/bin/nvcc")
_ASK_TIMEOUT_S = 20


def check() -> list[str]:
    """Return one line for each thing without which engines run, but not as they should.

    Raises:
        EnvironmentSetupError: The engine cannot run here.
    """
    if sys.version_info[:2] > NEWEST_PYTHON:
        raise EnvironmentSetupError(
            f"{ENGINE} is for Python 3.11 to {'.'.join(map(str, NEWEST_PYTHON))}, this is "
            f"{sys.version_info[0]}.{sys.version_info[1]}: name another one, as in "
            "`make env PLATFORM=cuda PYTHON=python3.12`"
        )
    lines = []
    driver = driver_version()
    if driver is None:
        lines.append(
            "no NVIDIA driver is seen here (nvidia-smi): it installs, and runs where there is one "
            f"from {OLDEST_DRIVER} on"
        )
    elif int(driver.partition(".")[0]) < OLDEST_DRIVER:
        raise EnvironmentSetupError(
            f"the NVIDIA driver is {driver}, and {ENGINE} is built for CUDA 13, which needs "
            f"{OLDEST_DRIVER} or newer: update the driver"
        )
    homes = [f"{home}/bin/nvcc" for home in [os.environ.get("CUDA_HOME")] if home]
    if not any(shutil.which(place) for place in (*homes, *NVCC_PLACES)):
        lines.append(
            "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: the launcher switches off what "
            "would be compiled with it (VLLM_USE_FLASHINFER_SAMPLER=0)"
        )
    return lines


def driver_version() -> str | None:
    """Return the version of the driver, such as ``580.65.06``; ``None`` where none is seen."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        told = KERNEL_MODULE.read_text("utf-8") if KERNEL_MODULE.is_file() else ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", told)
    return found[0] if found else None

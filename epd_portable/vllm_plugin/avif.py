"""AVIF files, decoded in a process that is limited by the size that their container states.

Pillow opens the container in this process: that takes no memory for pixels.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import PIL

from epd_portable.vllm_plugin import avif_frame

_LATEST_FACTOR = 20
"""Time by the clock, compared with processor time: on a machine that is busy."""


class FrameDecoder:
    """Pillow's decoder of an AVIF file whose first frame comes from another process.

    Args:
        data: The file.
        pixels: Width times height, by the container.
    """

    def __init__(self, data: bytes, pixels: int) -> None:
        self._data = data
        self._pixels = pixels
        self._failure = ""

    def get_frame(self, number: int) -> tuple[bytes, int, int, int]:
        """Return the pixels of the first frame, a time scale of 1, and 0 as time and duration.

        Raises:
            OSError: Invalid, or beyond the limits. Later calls raise it without a new process.
        """
        if not self._failure:
            script = [avif_frame.__file__, str(Path(PIL.__file__).parents[1]), str(self._pixels)]
            try:
                done = subprocess.run(
                    [sys.executable, "-IS", *script],
                    input=self._data,
                    capture_output=True,
                    timeout=_LATEST_FACTOR * avif_frame.cpu_limit_s(self._pixels),
                )
            except subprocess.TimeoutExpired:
                self._failure = "timed out"
            else:
                if done.returncode == 0:
                    return done.stdout, 1, 0, 0
                lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
                self._failure = f"{lines[-1]} (status {done.returncode})"
        raise OSError(
            f"AVIF image: not decoded with memory and time for {self._pixels} pixels, the size of "
            f"its container: {self._failure}. Send it in another format"
        )

"""First frames of AVIF files, decoded in a process that is limited by the size of the container.

``python -IS avif.py FOLDER PIXELS < FILE``: ``FOLDER`` holds Pillow. The frame goes to standard
output. The decoder allocates memory for the size in its stream, which Pillow does not show and
which may be far above the size of the container. Pillow opens the container in the first process:
that takes no memory for pixels.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

BYTES_A_PIXEL = 64
MORE_BYTES = 8 << 20
"""Additional memory: 10 bits of four planes, several frames, their copies."""
PIXELS_A_SECOND = 1_000_000
MORE_S = 5
"""Processor time: by a tenth of the speed of a slow core, and some seconds."""
_LATEST_FACTOR = 20
"""Time by the clock, compared with processor time: on a machine that is busy."""


class FrameDecoder:
    """Pillow's decoder of an AVIF file whose first frame comes from another process.

    Args:
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
        import PIL

        if not self._failure:
            script = [__file__, str(Path(PIL.__file__).parents[1]), str(self._pixels)]
            try:
                done = subprocess.run(
                    [sys.executable, "-IS", *script],
                    input=self._data,
                    capture_output=True,
                    timeout=_LATEST_FACTOR * _cpu_limit_s(self._pixels),
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


def _cpu_limit_s(pixels: int) -> int:
    return MORE_S + pixels // PIXELS_A_SECOND


def _main(folder: str, pixels: int) -> None:
    sys.path.insert(0, folder)
    from PIL import _avif

    decoder = _avif.AvifDecoder(sys.stdin.buffer.read(), "auto", 1)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        nbytes = int(sizes.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, nbytes + MORE_BYTES + BYTES_A_PIXEL * pixels)
    _lower(resource.RLIMIT_CPU, _cpu_limit_s(pixels))
    sys.stdout.buffer.write(decoder.get_frame(0)[0])


def _lower(what: int, limit: int) -> None:
    """Limit this process, unless it is limited further already."""
    _, hard = resource.getrlimit(what)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (soft, hard))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))

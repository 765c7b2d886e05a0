"""Decodes the first frame of an AVIF file: ``python -IS avif_frame.py FOLDER PIXELS < FILE``.

A process of its own: the decoder allocates memory for the size in its stream, which Pillow does not
show and which may be far above the size of the container. Memory and processor time of the process
are limited to what ``PIXELS`` need. ``FOLDER`` holds Pillow. The frame goes to standard output.
"""

from __future__ import annotations

import resource
import sys

BYTES_A_PIXEL = 64
MORE_BYTES = 8 << 20
"""Additional memory: 10 bits of four planes, several frames, their copies."""
PIXELS_A_SECOND = 1_000_000
MORE_S = 5
"""Processor time: by a tenth of the speed of a slow core, and some seconds."""


def cpu_limit_s(pixels: int) -> int:
    """Return how long a frame may take, in seconds of processor time."""
    return MORE_S + pixels // PIXELS_A_SECOND


def main() -> None:
    """Decode in this process."""
    folder, pixels = sys.argv[1], int(sys.argv[2])
    sys.path.insert(0, folder)
    from PIL import _avif

    decoder = _avif.AvifDecoder(sys.stdin.buffer.read(), "auto", 1)
    with open("/proc/self/statm", encoding="ascii") as sizes:
        nbytes = int(sizes.read().split()[0]) * resource.getpagesize()
    lower(resource.RLIMIT_AS, nbytes + MORE_BYTES + BYTES_A_PIXEL * pixels)
    lower(resource.RLIMIT_CPU, cpu_limit_s(pixels))
    frame = decoder.get_frame(0)[0]
    sys.stdout.buffer.write(frame)


def lower(what: int, limit: int) -> None:
    """Limit this process, unless it is limited further already."""
    _, hard = resource.getrlimit(what)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (soft, hard))


if __name__ == "__main__":
    main()

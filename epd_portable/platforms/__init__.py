"""Differences between NVIDIA, Ascend and a plain CPU, and nothing else.

``registry`` finds a platform, ``base.Platform`` is the contract, ``traits`` holds the facts that a
plan needs on a machine without torch.
"""

from __future__ import annotations

if __name__ != "epd_portable.platforms":
    raise ImportError(
        f"imported as {__name__!r}: the folder 'platforms' at the top of the repository is a link "
        "for people; import epd_portable.platforms"
    )

"""Fewer garbage collections while vLLM is imported; to be imported before it.

vLLM's five thousand modules make objects that stay, and each collection looks at many of them: a
quarter of the time that the import takes.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
gc.set_threshold(50_000, 20, 50)


def done() -> None:
    """Collect as usual from now on, but never look again at what has been imported."""
    gc.freeze()
    gc.set_threshold(*_USUAL)

"""Run by Python itself when a process starts with this folder on ``PYTHONPATH``.

vLLM imports torchvision before it loads any plug-in, and starts processes of its own; this is the
one hook that comes before both. A ``sitecustomize`` that would have run instead still runs.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from epd_portable.platforms import torchvision_guard

torchvision_guard.install()

_HERE = Path(__file__).resolve().parent
for _folder in sys.path:
    _other = Path(_folder, "sitecustomize.py")
    if _other.is_file() and _other.resolve().parent != _HERE:
        runpy.run_path(str(_other), run_name="sitecustomize")
        break

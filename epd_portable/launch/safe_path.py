"""Keeps the working directory, where others may write, out of the path that Python imports from.

``python -m`` and ``python -c`` put it first, also in what vLLM and multiprocessing start. Python
3.11 leaves it out where a variable asks for that; Python 3.10 has to start in another folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def safe_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python leaves the working directory out of its path.

    Empty elements of ``PYTHONPATH``, which mean it too, are removed.
    """
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    folders = [each for each in safe.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if folders:
        safe["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return safe


def safe_cwd(private: Path, version: tuple[int, ...] = sys.version_info[:2]) -> Path | None:
    """Return where to start a process; ``None`` where `safe_environ` is enough.

    Args:
        private: A folder in which no other user can write.
    """
    return None if version >= (3, 11) else private

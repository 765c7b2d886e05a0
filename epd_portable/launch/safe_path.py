"""What the launcher starts imports nothing from the working directory, which may be anybody's.

``python -m`` and ``python -c`` put that folder in front of everything else. Python 3.11 leaves it
out where a variable asks for it, which children of children inherit: vLLM starts its engine, and
multiprocessing its helpers, in such ways. Python 3.10 knows no such thing and needs another folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def safe_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python leaves the working directory out of its path.

    An empty element of ``PYTHONPATH``, as in ``$PYTHONPATH:/more`` with nothing before, means the
    working directory too, and is left out.
    """
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    folders = [each for each in safe.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if folders:
        safe["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return safe


def safe_cwd(private: Path, version: tuple[int, ...] = sys.version_info[:2]) -> Path | None:
    """Return where a process has to start; ``None`` where `safe_environ` is enough.

    Args:
        private: A folder in which nobody else can write.
        version: Of Python.
    """
    return None if version >= (3, 11) else private

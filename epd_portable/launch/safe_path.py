"""Keeps the working directory, where others may write, out of the path that Python imports from.

``python -m`` and ``python -c`` put it first, also in what vLLM and multiprocessing start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def safe_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python leaves the working directory out of its path.

    Empty elements of ``PYTHONPATH``, which mean it too, are removed.
    """
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    folders = [each for each in safe.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if folders:
        safe["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return safe

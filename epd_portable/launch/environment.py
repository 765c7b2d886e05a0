"""Environment of child processes: a home that can be written, a path without the working directory.

Others may write into the working directory, and ``python -m`` and ``python -c`` put it first into
the path that Python imports from, also in what vLLM and multiprocessing start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from epd_portable.config.folders import with_home


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child process.

    Python leaves the working directory out of its path. Empty elements of ``PYTHONPATH``, which
    mean that directory, are removed.

    Raises:
        ConfigError: See `with_home`.
    """
    safe = {**with_home(environ), "PYTHONSAFEPATH": "1"}
    folders = [each for each in safe.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if folders:
        safe["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return safe

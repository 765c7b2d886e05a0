"""Names that the processes of a run share, and the environment of child processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from epd_portable.config.folders import with_home


def new_run_id() -> str:
    """Return eight random hexadecimal digits."""
    return secrets.token_hex(4)


def shm_prefix(run_id: str) -> str:
    """Return what every ``/dev/shm`` file of a run starts with."""
    return f"epd-{run_id}-"


def run_secret_file(temp_dir: str) -> str:
    """Return the path of the secret of a run: a copy of ``secret_file``, or a fresh one."""
    return f"{temp_dir}/secret"


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child process: a home that can be written, a safe Python path.

    Others may write into the working directory, and ``python -m`` and ``python -c`` put it first
    into the path that Python imports from, also in what vLLM and multiprocessing start. Python
    leaves it out of its path, and empty elements of ``PYTHONPATH``, which mean it, are removed.

    Raises:
        ConfigError: See `with_home`.
    """
    safe = {**with_home(environ), "PYTHONSAFEPATH": "1"}
    folders = [each for each in safe.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if folders:
        safe["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return safe

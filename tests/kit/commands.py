"""Commands that tests run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.sources import ROOT

Ended = subprocess.CompletedProcess[str]


def run(*argv: object, cwd: Path = ROOT, timeout_s: float = 300.0, **env: str) -> Ended:
    """Run a command with further variables; return its status and output."""
    return subprocess.run(
        [*map(str, argv)],
        cwd=cwd,
        env={**os.environ, **env},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )


def python(code: str, **options: str) -> Ended:
    """Run code in a new process."""
    return run(sys.executable, "-c", code, **options)

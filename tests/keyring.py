"""The secret of a test run, which every process of the run reads from one file."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.transfer.curve import CurveKeys

_VARIABLE = "EPD_TEST_SECRET_FILE"
"""Variable that names the file to processes of tests."""


def secret_file() -> str:
    """Return the path of the run's secret file; it is made by whoever asks first."""
    if _VARIABLE not in os.environ:
        folder, owner = tempfile.mkdtemp(prefix="epd-test-secret-"), os.getpid()
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
        path = str(Path(folder, "secret"))
        make_secret_file(path)
        os.environ[_VARIABLE] = path
    return os.environ[_VARIABLE]


def secret() -> Secret:
    return Secret.read(secret_file())


def keys() -> CurveKeys:
    return CurveKeys.derive(secret())

"""The secret of a test run, which every process of the run reads from one file."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import httpx

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
    """Return the run's secret."""
    return Secret.read(secret_file())


def keys() -> CurveKeys:
    """Return the keys that come from it."""
    return CurveKeys.derive(secret())


class Signed(httpx.Auth):
    """Signs requests of a test's client as holders of a secret do."""

    requires_request_body = True

    def __init__(self, held: Secret | None = None) -> None:
        self._secret = held or secret()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        target = request.url.raw_path.decode()
        request.headers["authorization"] = self._secret.sign(
            request.method, target, request.content
        )
        yield request

"""The router as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

TIMEOUT_S = 20

SETTINGS: dict[str, Any] = {
    "port": 0,
    "model": "demo",
    "instances": [
        {
            "name": "pd",
            "role": "prefill-decode",
            "url": "http://127.0.0.1:9",
            "control": "tcp://127.0.0.1:9",
        }
    ],
}


def start(settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "epd_portable.router", "--settings", settings],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def router() -> Iterator[subprocess.Popen[str]]:
    process = start(json.dumps(SETTINGS))
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly_on_a_signal(
    router: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert router.stderr is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", router.stderr.readline())
    assert found
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{found[0]}/health", timeout=TIMEOUT_S)

    router.send_signal(number)

    _, errors = router.communicate(timeout=TIMEOUT_S)
    assert router.returncode == 0
    assert "Traceback" not in errors


def test_a_port_in_use_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(json.dumps({**SETTINGS, "port": port}))
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert f"127.0.0.1:{port} is taken" in errors
    assert "Traceback" not in errors


def test_wrong_settings_end_it_with_their_names() -> None:
    process = start(json.dumps({**SETTINGS, "prot": 1}))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert "prot" in errors
    assert "Traceback" not in errors


def test_it_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, epd_portable.router.app, epd_portable.router.__main__;"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=TIMEOUT_S, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr

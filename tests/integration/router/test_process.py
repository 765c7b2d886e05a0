"""The router as a process of its own."""

from __future__ import annotations

import asyncio
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

import httpx
import pytest
from starlette.responses import Response

from tests.integration.router.stand_in import Received, StandIn
from tests.keyring import secret_file

TIMEOUT_S = 20

SETTINGS: dict[str, Any] = {
    "port": 0,
    "model": "demo",
    "secret_file": secret_file(),
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


async def test_a_request_that_is_under_way_when_it_stops_is_refused_in_openai_form() -> None:
    async def never(received: Received) -> Response:
        await asyncio.Event().wait()
        return Response()

    pd = StandIn("pd", "prefill-decode", never)
    await pd.serving.start()
    instance = {**SETTINGS["instances"][0], "url": pd.serving.url}
    process = start(json.dumps({**SETTINGS, "instances": [instance], "probe_interval_s": 0.1}))
    try:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert found
        async with httpx.AsyncClient(
            base_url=found[0], timeout=TIMEOUT_S, trust_env=False
        ) as client:
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)
            body = {"messages": [{"role": "user", "content": "hello"}]}
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await pd.until(lambda pd: bool(pd.received))
            process.send_signal(signal.SIGTERM)
            answer = await asked
        _, errors = await asyncio.to_thread(process.communicate, timeout=TIMEOUT_S)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["message"] == "the router is stopping"
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
        await pd.serving.stop()


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
        "import sys, epd_portable.router.server, epd_portable.router.__main__;"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=TIMEOUT_S, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr

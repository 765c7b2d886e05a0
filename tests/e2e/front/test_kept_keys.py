"""Keys of `router` about HTTP hold at the engine front: HTTPS, origins of browsers, spans."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest

from tests.certificates import make_certificate
from tests.e2e.asking import body, picture, text
from tests.e2e.collector import collecting
from tests.e2e.conftest import running
from tests.e2e.engines import wait_until
from tests.forked import Popen

pytestmark = pytest.mark.full

ORIGIN = "https://page.example"


def test_it_speaks_https_answers_browsers_and_sends_spans(tmp_path: Path, fork: Popen) -> None:
    cert, key = make_certificate(tmp_path)
    settings = [
        "front=engine",
        f"router.tls_cert_file={cert}",
        f"router.tls_key_file={key}",
        f"router.cors_origins={json.dumps([ORIGIN])}",
    ]
    with (
        collecting() as collector,
        running(
            tmp_path, [*settings, f"router.tracing.endpoint={collector.endpoint}"], popen=fork
        ) as split,
    ):
        trust = ssl.create_default_context(cafile=cert)
        url = split.url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=trust, trust_env=False, timeout=60) as client:
            asked = body([picture(1), text("Describe the picture.")])
            page = {"origin": ORIGIN}
            answer = client.post("/v1/chat/completions", json=asked, headers=page)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            before = {**page, "access-control-request-method": "POST"}
            allowed = client.options("/v1/chat/completions", headers=before)
            assert allowed.headers["access-control-allow-origin"] == ORIGIN
            other = {**before, "origin": "https://other.example"}
            assert client.options("/v1/chat/completions", headers=other).status_code == 400
        wait_until(lambda: {"front"} in collector.services("llm_request"), "the front's span came")

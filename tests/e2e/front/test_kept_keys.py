"""Keys hold at the engine front: HTTPS, origins of browsers, spans, store, trusted gateways."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from epd_portable.front.headers import KEY, MAPPING
from epd_portable.wire.params import FIELD
from tests.certificates import make_certificate
from tests.e2e.asking import body, picture, text
from tests.e2e.collector import Collector, collecting
from tests.e2e.conftest import Split, running
from tests.e2e.engines import wait_until
from tests.forked import Popen

pytestmark = pytest.mark.full

ORIGIN = "https://page.example"


HOP_KEY = "h" * 20
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Served:
    split: Split
    client: httpx.Client
    collector: Collector


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, fork: Popen) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kept")
    cert, key = make_certificate(folder)
    keys = folder / "keys"
    keys.write_text(HOP_KEY)
    keys.chmod(0o600)
    settings = [
        "front=engine",
        f"router.tls_cert_file={cert}",
        f"router.tls_key_file={key}",
        f"router.cors_origins={json.dumps([ORIGIN])}",
        f"router.hop_keys_file={keys}",
        "store.kind=file",
        f"store.path={folder / 'store'}",
        "store.timeout_ms=10000",
        "env.VLLM_SERVER_DEV_MODE='1'",
    ]
    trust = ssl.create_default_context(cafile=cert)
    with collecting() as collector:
        settings.append(f"router.tracing.endpoint={collector.endpoint}")
        with running(folder, settings, popen=fork) as split:
            url = split.url.replace("http://", "https://")
            with httpx.Client(base_url=url, verify=trust, trust_env=False, timeout=60) as client:
                yield Served(split, client, collector)


def test_it_speaks_https_answers_browsers_and_sends_spans(served: Served) -> None:
    client, page = served.client, {"origin": ORIGIN}
    asked = body([picture(1), text("Describe the picture.")])
    answer = client.post(PATH, json=asked, headers=page)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    before = {**page, "access-control-request-method": "POST"}
    allowed = client.options(PATH, headers=before)
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = {**before, "origin": "https://other.example"}
    assert client.options(PATH, headers=other).status_code == 400
    spans = served.collector.services
    wait_until(lambda: {"front"} in spans("llm_request"), "the front's span came")


@pytest.mark.parametrize("stream", [False, True])
def test_gateway_names_the_encoder(served: Served, stream: bool) -> None:
    mapping = json.dumps({"0": "encode-0"})
    asked = {**body([picture(20 + stream), text("Describe.")]), "stream": stream}
    headers = {KEY: HOP_KEY, MAPPING: mapping}
    answer = served.client.post(PATH, json=asked, headers=headers)
    assert (answer.status_code, answer.headers[MAPPING]) == (200, mapping.replace(" ", ""))
    unknown = served.client.post(PATH, json=asked, headers={**headers, MAPPING: '{"0": "x:1"}'})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (403, "not_an_instance")
    client = served.client.post(PATH, json=asked, headers={MAPPING: mapping})
    assert client.status_code == 200 and MAPPING not in client.headers


def test_item_that_engines_have_forgotten_comes_from_the_store(served: Served) -> None:
    asked = body([picture(30), text("Describe.")])
    first = served.client.post(PATH, json=asked).json()
    (item,) = first[FIELD]["items"]
    assert item["source"] == "transfer"
    written = lambda: {e["mm_hash"] for e in served.split.events("store.written")}  # noqa: E731
    wait_until(lambda: item["mm_hash"] in written(), "the item is stored")
    for what in ("encoder_cache", "prefix_cache", "mm_cache"):
        assert served.client.post(f"/reset_{what}").status_code == 200
    begin_s = time.monotonic()
    again = served.client.post(PATH, json=asked).json()
    assert [each["source"] for each in again[FIELD]["items"]] == ["store"]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert not served.split.events("encode.begin", since_s=begin_s)
    page = served.client.get("/metrics").text
    assert 'epd_front_items_total{outcome="stored"} 1.0' in page

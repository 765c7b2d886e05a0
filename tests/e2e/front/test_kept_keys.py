"""Keys of the front: HTTPS, API keys, browser origins, spans, store, gateways, media by URL."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from epd_portable.front.headers import KEY as GATEWAY
from epd_portable.front.headers import MAPPING
from epd_portable.launch.plan.machine import port_source
from epd_portable.wire.params import FIELD
from tests.certificates import make_certificate, served_certificate
from tests.e2e.asking import AUTHORIZED, KEY, body, picture, text
from tests.e2e.collector import Collector, collecting
from tests.e2e.conftest import Split, running
from tests.e2e.engines import RESTART_S, instance, process, wait_until
from tests.forked import Popen
from tests.kit.load import Load
from tests.metrics_page import total
from tests.servers import serving

ORIGIN = "https://page.example"

GATEWAY_KEY = "h" * 20
PATH = "/v1/chat/completions"
WEB_SEED = 900
RANK = 8
"""Rank of LoRA adapters."""


def inlined(seed: int) -> str:
    return str(picture(seed)["image_url"]["url"])


@dataclass(frozen=True)
class Served:
    split: Split
    client: httpx.Client
    collector: Collector
    site: str
    certificate: tuple[Path, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, fork: Popen) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kept")
    cert, key = make_certificate(folder)
    keys = {}
    for name, content in {"gateway": GATEWAY_KEY, "api": KEY}.items():
        keys[name] = folder / f"{name}-keys"
        keys[name].write_text(content)
        keys[name].chmod(0o600)
    site = folder / "site"
    site.mkdir()
    (site / "a.png").write_bytes(base64.b64decode(inlined(WEB_SEED).partition(",")[2]))
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    settings = [
        f"front.tls_cert_file={cert}",
        f"front.tls_key_file={key}",
        f"front.cors_origins={json.dumps([ORIGIN])}",
        f"front.gateway_keys_file={keys['gateway']}",
        f"front.api_keys_file={keys['api']}",
        "store.kind=file",
        f"store.path={folder / 'store'}",
        "store.timeout_ms=10000",
        "env.VLLM_SERVER_DEV_MODE='1'",
        "env.VLLM_ALLOW_RUNTIME_LORA_UPDATING='1'",
        "engine_args.enable_lora=true",
        f"engine_args.max_lora_rank={RANK}",
    ]
    trust = ssl.create_default_context(cafile=cert)
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with collecting() as collector, serving(web):
        domain = f"localhost:{web.server_port}"
        allowed = {"allowed_domains": [domain], "allowed_networks": ["127.0.0.0/8"]}
        settings.append(f"front.media.urls={json.dumps(allowed)}")
        settings.append(f"front.tracing.endpoint={collector.endpoint}")
        with running(folder, settings, popen=fork) as split:
            url = split.url.replace("http://", "https://")
            options: Any = {"base_url": url, "verify": trust, "headers": AUTHORIZED}
            with httpx.Client(**options, trust_env=False, timeout=60) as client:
                yield Served(split, client, collector, f"http://{domain}", (cert, key))


def test_first_request_of_a_client_connects_nothing(served: Served) -> None:
    asked = body([picture(2), text("Describe the picture.")])
    assert served.client.post(PATH, json=asked).json()[FIELD]["items"][0]["source"] == "transfer"
    events = served.split.events
    opened = [*events("control.opened", since_s=0), *events("path.opened", since_s=0)]
    assert len(opened) >= 2
    assert events("control.opened") == events("path.opened") == []


def test_front_serves_https_cors_and_spans(served: Served) -> None:
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
    traces = served.collector.traces

    def of_one_trace(*names: str) -> bool:
        found = [{trace for name, trace in [*traces] if name == each} for each in names]
        return bool(set.intersection(*found))

    wait_until(lambda: of_one_trace("request", "encode", "llm_request"), "spans came")
    assert {"front"} in served.collector.services("encode")


def test_renewed_certificate_is_served_to_new_connections(served: Served) -> None:
    port = int(served.split.url.rpartition(":")[2])
    kept = {path: path.read_bytes() for path in served.certificate}
    try:
        for number in range(2):
            renewed = make_certificate(served.certificate[0].parent, f"renewed-{number}")
            for new, used in zip(renewed, served.certificate, strict=True):
                new.replace(used)
            shown = ssl.PEM_cert_to_DER_cert(served.certificate[0].read_text())
            assert asyncio.run(served_certificate(port)) == shown
        assert served.client.get("/health").status_code == 200, "open connections go on"
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.needs_prometheus
def test_prometheus_reads_the_front_as_documented(served: Served, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/observability.md").read_text("utf-8")
    text = page.partition("```yaml\nscrape_configs:")[2].partition("```")[0]
    jobs = yaml.safe_load(f"scrape_configs:{text}")["scrape_configs"]
    jobs[0]["static_configs"][0]["targets"] = [served.split.url.partition("://")[2]]
    jobs[0] |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    config = tmp_path / "prometheus.yaml"
    every = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    config.write_text(yaml.safe_dump({"global": every, "scrape_configs": jobs[:1]}))
    port = port_source("0000005c")()
    flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    server = subprocess.Popen(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"])
    query = f"http://127.0.0.1:{port}/api/v1/query?query=epd_front_instance_up"

    def seen() -> dict[str, str]:
        try:
            found = httpx.get(query, trust_env=False, timeout=60).json()["data"]["result"]
        except (httpx.HTTPError, ValueError):  # It says in words that it starts.
            return {}
        return {each["metric"]["instance"]: each["value"][1] for each in found}

    try:
        wait_until(lambda: seen() == {"encode-0": "1", "prefill_decode-0": "1"}, "both are read")
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("stream", [False, True])
def test_gateway_names_the_encoder(served: Served, stream: bool) -> None:
    mapping = json.dumps({"0": "encode-0"})
    asked = {**body([picture(20 + stream), text("Describe.")]), "stream": stream}
    headers = {GATEWAY: GATEWAY_KEY, MAPPING: mapping}
    answer = served.client.post(PATH, json=asked, headers=headers)
    assert (answer.status_code, answer.headers[MAPPING]) == (200, mapping.replace(" ", ""))
    unknown = served.client.post(PATH, json=asked, headers={**headers, MAPPING: '{"0": "x:1"}'})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (403, "not_an_instance")
    client = served.client.post(PATH, json=asked, headers={MAPPING: mapping})
    assert client.status_code == 200 and MAPPING not in client.headers


def test_image_by_url_is_the_item_of_the_inlined_image(served: Served) -> None:
    def asked(url: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = served.client.post(PATH, json=body([part, text("Describe.")]))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    linked = asked(f"{served.site}/a.png")
    same = asked(inlined(WEB_SEED))
    assert linked[FIELD]["items"][0]["source"] == "transfer"
    assert same[FIELD]["items"][0]["mm_hash"] == linked[FIELD]["items"][0]["mm_hash"]
    assert same[FIELD]["items"][0]["source"] == "encoder_cache"
    assert same["choices"][0]["message"] == linked["choices"][0]["message"]


def make_adapter(folder: Path, scale: float) -> Path:
    """Write a LoRA adapter of the first layer of the demo's language model; 0 changes nothing."""
    folder.mkdir()
    layer = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_{side}.weight": torch.ones(RANK, 128) for side in "AB"}
    tensors[f"{layer}.lora_B.weight"] = scale * torch.ones(128, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_change_the_language_model_and_share_items(served: Served, tmp_path: Path) -> None:
    client, content = served.client, [picture(40), text("Describe.")]
    for name, scale in (("same", 0.0), ("other", 1.0)):
        path = str(make_adapter(tmp_path / name, scale))
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert loaded.status_code == 200, loaded.text
    found = {}
    for name in ("demo", "same", "other"):
        response = client.post(PATH, json=body(content, model=name))
        assert response.status_code == 200, response.text
        found[name] = response.json()
    (base, same, other) = (each["choices"][0]["logprobs"] for each in found.values())
    assert base == same != other
    sources = [each[FIELD]["items"][0]["source"] for each in found.values()]
    assert sources == ["transfer", "encoder_cache", "encoder_cache"]


def is_up(served: Served) -> bool:
    try:
        counts = served.client.get("/health").json()["counts"]
    except httpx.HTTPError:
        return False
    return bool(counts["up"] == sum(counts.values()))


def restart(served: Served) -> None:
    """Kill both engines, and wait for the new ones."""
    before = [instance(served.split.pid, role).pid for role in ("ec_producer", "ec_consumer")]
    for pid in before:
        os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, before)), "they have ended")
    wait_until(lambda: is_up(served), "both are up again", within_s=RESTART_S)


def reset(served: Served) -> None:
    for what in ("encoder_cache", "prefix_cache", "mm_cache"):
        assert served.client.post(f"/reset_{what}").status_code == 200


@pytest.mark.parametrize("forget", [reset, pytest.param(restart, marks=pytest.mark.full)])
def test_item_that_engines_have_forgotten_comes_from_the_store(
    served: Served, forget: Callable[[Served], None]
) -> None:
    asked = body([picture(30 + (forget is restart)), text("Describe.")])
    first = served.client.post(PATH, json=asked).json()
    (item,) = first[FIELD]["items"]
    assert item["source"] == "transfer"
    wait_until_stored(served, {item["mm_hash"]})
    stored = counted_here(served)
    forget(served)
    begin_s = time.monotonic()
    again = served.client.post(PATH, json=asked).json()
    assert [each["source"] for each in again[FIELD]["items"]] == ["store"]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert not served.split.events("encode.begin", since_s=begin_s)
    assert counted_here(served) == stored + 1


def wait_until_stored(served: Served, hashes: set[str]) -> None:
    def are_written() -> bool:
        return hashes <= {event["mm_hash"] for event in served.split.events("store.written")}

    wait_until(are_written, "the items are stored")


def counted_here(served: Served) -> float:
    """Return how many items the front has had from the store."""
    return total(served.client.get("/metrics").text, 'epd_front_items_total{outcome="stored"}')


def test_killed_encoder_with_store_keys_and_tls_costs_nothing(served: Served) -> None:
    """Runs last, because the encoder need not come back for it.

    Of two requests one has an item of the store, and one an item that no engine has seen.
    """
    stored, question = range(50, 66), QuestionKind.DESCRIBE

    def send(number: int) -> tuple[int, dict[str, Any]]:
        seed = 100 + number if number % 2 else stored[number // 2 % len(stored)]
        response = served.client.post(PATH, json=body([picture(seed), text(QUESTIONS[question])]))
        assert response.status_code == 200, response.text
        reply = response.json()
        assert reply["choices"][0]["message"]["content"] == draw(seed).scene.answer(question)
        (item,) = reply[FIELD]["items"]
        return number, item

    def sources(load: Load[tuple[int, dict[str, Any]]]) -> list[set[str]]:
        """Return the sources of stored items, and those of new ones."""
        return [{item["source"] for n, item in load.seen if n % 2 == odd} for odd in (0, 1)]

    wait_until_stored(served, {send(2 * n)[1]["mm_hash"] for n in range(len(stored))})
    reset(served)
    encoder = process(served.split.pid, "encode-0")
    with Load(send, clients=3) as load:
        load.wait_for(6)
        assert sources(load) == [{"store"}, {"transfer"}]
        encoder.kill()
        encoder.wait(60)
    with Load(lambda number: send(len(stored) + number), clients=3) as without:
        without.wait_for(6)
        wrong = {"authorization": "Bearer wrong"}
        assert served.client.get("/v1/models", headers=wrong).status_code == 401
    assert sources(load)[0] == {"store"}
    assert sources(without) == [{"store"}, {"local"}]

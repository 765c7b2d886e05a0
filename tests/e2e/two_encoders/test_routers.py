"""A router beside the deployment's own, over its engines, with what its requests do not show.

It hears a coordinator that chooses instances for it, fetches pictures, has the items of a request
encoded one after the other, and sends the prefill+decode instance no media: what no encoder brings
cannot be had.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from epd_portable.router.client_exchange import LEFT_OUT
from epd_portable.router.hops import (
    ENCODER_MODEL_LABEL,
    ENCODERS,
    KEY,
    MAPPING,
    MODEL,
    PREFILLER,
    REFS,
)
from tests.e2e import flags
from tests.e2e.asking import answer_of, ask, assert_close, body, picture, post, text
from tests.e2e.cases import ASK
from tests.e2e.conftest import Split, encoders_held, router_of, router_settings
from tests.e2e.engines import counted, named, token_of, url_of, wait_until
from tests.e2e.two_encoders.deployment import ENCODERS as NAMES
from tests.e2e.two_encoders.deployment import PD, QUEUE, Deployment
from tests.forked import Popen
from tests.servers import serving

HOP_KEY = "h" * 20


class Site(ThreadingHTTPServer):
    """Pictures of the web, and the paths that were asked for."""

    def __init__(self, folder: Path) -> None:
        asked = self.asked = []

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, format: str, *arguments: Any) -> None:
                asked.append(self.path)

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "a.png").write_bytes(base64.b64decode(inlined(900).partition(",")[2]))
    server = Site(folder)
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def router(
    deployment: Deployment, site: Site, fork: Popen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("router")
    keys = folder / "hop_keys"
    keys.write_text(HOP_KEY)
    keys.chmod(0o600)
    instances = router_settings(deployment.split)["instances"]
    for each in instances:
        if each["role"] == "encode":
            each["labels"] = {ENCODER_MODEL_LABEL: each["name"]}
    changed = {
        "instances": instances,
        "registration": False,
        "warm_up": False,
        "hop_keys_file": str(keys),
        "encode_order": "sequential",
        "media": "metadata",
        "local_encode": False,
        "partial_results": True,
        "media_urls": {
            "allowed_domains": [f"localhost:{site.server_port}"],
            "allowed_networks": ["127.0.0.0/8"],
        },
    }
    with router_of(deployment.split, folder / "beside.log", fork, **changed) as split:
        yield split


def inlined(seed: int) -> str:
    return str(picture(seed)["image_url"]["url"])


def address(split: Split, name: str) -> str:
    return url_of(named(split.pid, name)).partition("://")[2]


def encode_jobs(split: Split, since_s: float) -> list[str]:
    return [event["encoder"] for event in split.events("encode_job", since_s=since_s)]


def test_instances_that_a_coordinator_names_do_the_work_and_it_is_told_so(
    deployment: Deployment, router: Split
) -> None:
    content = [picture(901), text("and"), picture(902), ASK]
    for first, second in (sorted(NAMES), sorted(NAMES, reverse=True)):
        begin_s = time.monotonic()
        mapping = {"0": address(router, first), "1": address(router, second)}
        headers = {KEY: HOP_KEY, PREFILLER: address(router, PD), MAPPING: json.dumps(mapping)}
        response = post(router.url, body(content), headers=headers)
        answer = answer_of(response)
        assert json.loads(response.headers[MAPPING]) == mapping
        assert set(response.headers[ENCODERS].split(",")) == set(mapping.values())
        refs = json.loads(response.headers[REFS])
        assert [each["encoder_host"] for each in refs] == list(mapping.values())
        assert encode_jobs(router, begin_s) == [first, second]
        assert_close(answer, ask(deployment.pair.reference_url, content))


def test_a_picture_that_comes_by_url_is_answered_as_if_it_were_inlined(
    deployment: Deployment, router: Split, site: Site
) -> None:
    url = f"http://localhost:{site.server_port}/a.png"
    linked = ask(router.url, [{"type": "image_url", "image_url": {"url": url}}, ASK])
    deployment.compare([picture(900), ASK], linked)
    assert site.asked == ["/a.png"]
    again_s = time.monotonic()
    # Under one name: the encoder that has it is asked, and encodes nothing.
    again = ask(router.url, [picture(900), text("Once more."), ASK])
    assert [item["mm_hash"] for item in again.items] == [item["mm_hash"] for item in linked.items]
    assert not router.encoding(again_s)


def test_pictures_of_a_request_are_encoded_one_after_the_other_if_asked_so(
    deployment: Deployment, router: Split
) -> None:
    content = [*map(picture, range(910, 914)), ASK]
    with ThreadPoolExecutor() as pool:
        with encoders_held(router) as held_s:
            pending = pool.submit(ask, router.url, content)
            wait_until(lambda: bool(router.encoding(held_s)), "an encoder works")
        deployment.compare(content, pending.result())
    order = [
        each["event"]
        for each in router.events(since_s=held_s)
        if each["event"] in ("encode_job", "encode.begin")
    ]
    assert order == ["encode_job", "encode.begin"] * 4


def test_a_picture_that_an_encoder_has_no_room_for_is_encoded_by_another(
    deployment: Deployment, router: Split
) -> None:
    content = [picture(920), ASK]
    full, other = sorted(NAMES)
    server = named(router.pid, full)
    flood = body([picture(921, 28)] * QUEUE, max_tokens=1)
    headers = {KEY: HOP_KEY, MAPPING: json.dumps({"0": address(router, full)})}
    with ThreadPoolExecutor() as pool:
        with encoders_held(router) as held_s:
            flooded = pool.submit(post, url_of(server), flood, headers=token_of(server))
            wait_until(
                lambda: counted(url_of(server), "epd_encode_queued_items") == QUEUE,
                f"{full} is full",
            )
            pending = pool.submit(ask, router.url, content, headers=headers)
            wait_until(lambda: len(encode_jobs(router, held_s)) == 2, "another is asked")
        answer = pending.result()
    assert flooded.result().status_code == 200, flooded.result().text
    assert encode_jobs(router, held_s) == [full, other]
    assert [item["encoder"] for item in answer.items] == [other]
    deployment.compare(content, answer)


def test_a_picture_that_an_encoder_has_no_memory_for_comes_from_another(
    deployment: Deployment, router: Split
) -> None:
    content = [picture(940), ASK]
    begin_s = time.monotonic()
    (router.flags / flags.NO_MEMORY).touch()
    answer = ask(router.url, content)
    jobs = encode_jobs(router, begin_s)
    assert sorted(jobs) == sorted(NAMES)
    assert [item["encoder"] for item in answer.items] == jobs[1:]
    deployment.compare(content, answer)


def test_a_picture_that_no_encoder_may_bring_is_left_out(
    deployment: Deployment, router: Split
) -> None:
    # No encoder of another model may take its place.
    headers = {KEY: HOP_KEY, MODEL: "encode-0"}
    (router.flags / flags.NO_MEMORY).touch()
    response = post(router.url, body([picture(930), picture(931), ASK]), headers=headers)
    assert response.headers[LEFT_OUT] == "1"
    answer = answer_of(response)
    assert len(answer.items) == 1
    without = [text("[image not available]"), picture(931), ASK]
    assert_close(answer, ask(deployment.pair.reference_url, without))

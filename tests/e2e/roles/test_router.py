"""Every stage apart behind the router: items from a store, and a coordinator of others in front."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_portable.demo import servers
from epd_portable.router.hops import KEY, MAPPING, PREFILLER
from tests.e2e.asking import ask, assert_equal, body, picture, post
from tests.e2e.cases import ASK
from tests.e2e.conftest import Split, running
from tests.e2e.engines import forget, named, token_of, url_of, wait_until
from tests.forked import Popen
from tests.servers import RedisServer

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs_nixl,
    pytest.mark.needs_redis,
    pytest.mark.timeout(1200),
]

CONFIG = Path(__file__).parents[3] / "configs" / "1e1p1d.yaml"
HOP_KEY = "h" * 20
KV_ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def split(fork: Popen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("router")
    keys = folder / "hop_keys"
    keys.write_text(HOP_KEY + "\n")
    keys.chmod(0o600)
    redis = RedisServer(tmp_path_factory.mktemp("redis"), servers.free_port())
    settings = [
        "engine_args.dtype=float32",
        "engine_args.kv_cache_memory_bytes=134217728",
        "transfer.wait_timeout_s=120",
        f"router.hop_keys_file={keys}",
        "env.VLLM_SERVER_DEV_MODE='1'",
        *("store.kind=redis", f"store.url={redis.url}", "store.timeout_ms=10000"),
    ]
    with running(folder, settings, config=CONFIG, popen=fork) as started:
        yield started
    redis.kill()


def test_a_picture_that_all_engines_have_forgotten_comes_from_the_store(split: Split) -> None:
    content = [picture(42), ASK]
    first = ask(split.url, content)
    stored = {item["mm_hash"] for item in first.items}
    wait_until(
        lambda: stored <= {event["mm_hash"] for event in split.events("store.written")},
        "the picture is stored",
    )
    for name in ("encode-0", "prefill-0", "decode-0"):
        forget(named(split.pid, name))
    begin_s = time.monotonic()
    assert_equal(ask(split.url, content), first)
    assert {each["mm_hash"] for each in split.events("store.loaded", since_s=begin_s)} == stored
    assert not split.encoding(begin_s)


def test_beside_a_prefill_instance_the_router_coordinates_for_a_decode_side(
    split: Split, reference_url: str
) -> None:
    """A picker and a decode side of others: they name instances, ask for KV, and go on with it."""
    places = {
        name: url_of(named(split.pid, name)).partition("://")[2]
        for name in ("prefill-0", "encode-0")
    }
    shown = {
        KEY: HOP_KEY,
        PREFILLER: places["prefill-0"],
        MAPPING: json.dumps({"0": places["encode-0"]}),
    }
    content = [picture(62), ASK]

    def said(answer: Any) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    request = body(content, max_tokens=1, kv_transfer_params=KV_ASKED)
    computed = post(split.url, request, headers=shown)
    assert computed.status_code == 200, computed.text
    assert json.loads(computed.headers[MAPPING]) == {"0": places["encode-0"]}
    told = computed.json()["kv_transfer_params"]
    assert told["do_remote_prefill"]
    decode = named(split.pid, "decode-0")
    request = body(content, kv_transfer_params=told)
    expected = said(post(reference_url, body(content)))
    assert said(post(url_of(decode), request, headers=token_of(decode))) == expected
    # By itself it does the whole, as the hop says.
    whole = post(split.url, body(content), headers=shown)
    assert said(whole) == expected
    assert whole.headers[PREFILLER] == places["prefill-0"]

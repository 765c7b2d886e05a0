"""Two encode instances and one PD instance, encrypted as between hosts, beside one process."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from epd_portable.connector.control import ControlClients
from epd_portable.connector.curve import read_keys
from epd_portable.connector.transports import tcp
from epd_portable.router.contents.body import CHAT_PATH, Rules, read_call
from epd_portable.wire.codec import encode
from epd_portable.wire.descriptors import PeerDescriptor, TensorSpec
from epd_portable.wire.messages import LOAD_PATH, Announce, LoadReport, NotNeeded
from tests.e2e.asking import Answer, ask, body, picture, post, text
from tests.e2e.cases import ASK
from tests.e2e.conftest import encoders_held, router_of
from tests.e2e.engines import config_of, named, token_of, url_of, wait_until
from tests.e2e.two_encoders.deployment import (
    ENCODERS,
    OFF_HOST,
    PD,
    Deployment,
    connections,
    epd_launch,
    port_of,
)
from tests.forked import Popen

PAUSE_S = 0.05
"""Of a client that asks again and again."""


def pictures(first: int, count: int = 4) -> list[dict[str, Any]]:
    """Return a question about several pictures; with four, each encoder gets at least one."""
    return [*(picture(seed) for seed in range(first, first + count)), ASK]


def encoders_of(answers: list[Answer]) -> set[str]:
    return {item.get("encoder", item["source"]) for answer in answers for item in answer.items}


def test_every_pair_has_met_before_the_first_request_which_connects_nothing(
    deployment: Deployment,
) -> None:
    split = deployment.split
    config = config_of(named(split.pid, PD))
    control, data = (
        (OFF_HOST, port_of(address)) for address in (config.control_address, config.data_address)
    )
    for opened in deployment.opened.values():
        remote = sorted(each for _, each in opened)
        assert remote == sorted([control] + tcp.CONNECTIONS * [data])
    met = [event["encoder"] for event in split.events("pair.met", since_s=0)]
    assert sorted(met) == sorted(ENCODERS)
    content = pictures(700)
    answer = ask(split.url, content)
    deployment.compare(content, answer)
    assert encoders_of([answer]) == ENCODERS
    assert connections(split) == deployment.opened
    assert split.events("control.opened") == split.events("path.opened") == []


def test_items_of_a_request_are_encoded_by_both_encoders_at_once_and_keep_their_order(
    deployment: Deployment,
) -> None:
    split = deployment.split
    content = [text("The first one:"), picture(710), text("and then:"), *pictures(711, 3)]
    with ThreadPoolExecutor() as pool:
        with encoders_held(split) as held_s:
            pending = pool.submit(ask, split.url, content)
            wait_until(lambda: split.encoding(held_s) == ENCODERS, "both encoders work")
            assert split.events("encode.end", since_s=held_s) == []
        answer = pending.result()
    deployment.compare(content, answer)
    encoded_by = {
        item: event["instance"]
        for event in split.events("encode.begin", since_s=held_s)
        for item in event["items"]
    }
    assert {item["mm_hash"]: item["encoder"] for item in answer.items} == encoded_by
    call = read_call(CHAT_PATH, json.dumps(body(content)).encode(), Rules())
    assert [item["mm_hash"] for item in answer.items] == [item.item_uuid for item in call.items]
    swapped = ask(deployment.pair.reference_url, [*content[:1], *content[3:6], content[1], ASK])
    assert swapped.tokens != answer.tokens, "the order of these pictures makes no difference"


def test_instances_say_how_busy_they_are(
    deployment: Deployment, tmp_path: Path, fork: Popen
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 20)
    keys.chmod(0o600)
    scorer = {"pluginRef": "kv-cache-utilization-scorer"}
    choice = {
        "plugins": [{"type": "kv-cache-utilization-scorer"}],
        "schedulingProfiles": [{"name": "decode", "plugins": [scorer]}],
    }
    changed = {"choice": choice, "api_keys_file": str(keys), "registration": False}
    # Its first requests would have the prefill+decode instance encode a picture.
    changed["warm_up"] = False
    shown = {"authorization": "Bearer " + "k" * 20, "x-epd-explain": "1"}
    with router_of(deployment.split, tmp_path / "loads.log", fork, **changed) as split:

        def told() -> bool:
            answer = post(split.url, body("Hello", max_tokens=1), headers=shown)
            (decision, *_) = json.loads(answer.headers["x-epd-explain"])
            score = decision["scores"][PD]["kv-cache-utilization-scorer"]
            # Of an instance that has told nothing it is 0, and nothing is in use of its KV cache.
            return bool(score > 0.5)

        wait_until(told, "the prefill+decode instance has told")
    server = named(deployment.split.pid, "encode-0")
    url = url_of(server) + LOAD_PATH
    assert httpx.get(url, timeout=30, trust_env=False).status_code == 401
    answer = httpx.get(url, headers=token_of(server), timeout=30, trust_env=False)
    assert msgspec.json.decode(answer.content, type=LoadReport) == LoadReport(items=0, pixels=0)


def test_only_holders_of_the_secret_are_heard(deployment: Deployment) -> None:
    split = deployment.split
    assert {config_of(named(split.pid, name)).host for name in (*ENCODERS, PD)} == {OFF_HOST}
    config = config_of(named(split.pid, PD))
    # Of a transfer that is over: whoever is heard is answered.
    over = split.events("encode_job")[0]["transfer_id"]
    peer = PeerDescriptor(
        instance="x", session="x", host="x", device="cpu:0", fingerprint="x", paths=()
    )
    spec = TensorSpec(shape=(1, 1), dtype="float32")
    announcement = Announce(transfer_id=over, mm_hash="x", tensor=spec, producer=peer)
    with zmq.Context() as context, contextlib.ExitStack() as opened:
        strangers = []
        for address in (config.control_address, config.data_address):
            stranger = opened.enter_context(context.socket(zmq.DEALER))
            stranger.linger = 0
            stranger.connect(address)
            stranger.send(encode(announcement, session="x"))
            strangers.append(stranger)
        holder = ControlClients("holder", read_keys(str(deployment.secret_file)))
        opened.callback(holder.close)
        holder.send(config.control_address, announcement)
        answers: list[Any] = []

        def told() -> bool:
            holder.wait(0.1)
            answers.extend(message for _, message in holder.receive())
            log = (split.log_dir / f"{PD}.log").read_text()
            refused = (f"{where} has refused" for where in addresses_in_log)
            return bool(answers) and all(words in log for words in refused)

        addresses_in_log = (
            f"control channel at {config.control_address}",
            f"receiver of tcp at {config.data_address}",
        )
        wait_until(told, "the holder is answered and both strangers are refused")
        assert answers == [NotNeeded(transfer_id=over)]
        assert not any(stranger.poll(0) for stranger in strangers)


def test_a_wrong_secret_is_refused_and_the_command_says_so(
    deployment: Deployment, tmp_path: Path
) -> None:
    assert epd_launch("secret", str(tmp_path / "other")).returncode == 0
    for words in (["instances"], ["leave", "encode-1"]):
        refused = epd_launch(
            *words, "--router", deployment.split.url, "--secret-file", str(tmp_path / "other")
        )
        assert refused.returncode == 1
        assert "the signature is wrong: it was made with another secret_file" in refused.stderr
    assert deployment.states() == dict.fromkeys([*sorted(ENCODERS), PD], "up")


def test_an_encoder_leaves_and_joins_again_and_no_answer_is_lost(deployment: Deployment) -> None:
    split = deployment.split
    server = named(split.pid, "encode-1")
    asked: list[tuple[Any, Answer]] = []
    enough = threading.Event()
    # Of no other test, however many are asked.
    seeds = itertools.count(2000, 2)

    def keep_asking() -> None:
        while not enough.wait(PAUSE_S):
            content = pictures(next(seeds), 2)
            asked.append((content, ask(split.url, content)))

    def answered_by(since: int) -> set[str]:
        return encoders_of([answer for _, answer in asked[since:]])

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as ended:
        ended.callback(enough.set)
        with encoders_held(split) as held_s:
            inflight = pool.submit(ask, split.url, pictures(720))
            wait_until(lambda: split.encoding(held_s) == ENCODERS, "both encoders work")
            leaving = pool.submit(deployment.members, "leave", "encode-1")
            wait_until(lambda: deployment.states()["encode-1"] == "draining", "it leaves")
            clients = [pool.submit(keep_asking) for _ in range(2)]
            assert not leaving.done()
        left = leaving.result()
        assert (left.returncode, left.stdout) == (0, f"encode-1 has left {split.url}\n")
        asked.append((pictures(720), inflight.result()))
        assert encoders_of([inflight.result()]) == ENCODERS
        away_s = time.monotonic()
        assert deployment.states() == {"encode-0": "up", PD: "up"}
        before = len(asked)
        wait_until(lambda: len(asked) >= before + 4, "others are answered")
        assert answered_by(before) == {"encode-0"}

        words = ("join", "encode-1", "--role", "encode", "--url", url_of(server))
        joined = deployment.members(*words)
        assert (joined.returncode, joined.stdout) == (0, f"encode-1 has joined {split.url}\n")
        before = len(asked)
        wait_until(lambda: answered_by(before) == ENCODERS, "both encode again")
        enough.set()
        for client in clients:
            client.result()
    assert deployment.states()["encode-1"] == "up"
    [met] = split.events("pair.met", since_s=away_s)
    jobs = [e for e in split.events("encode_job", since_s=away_s) if e["encoder"] == "encode-1"]
    assert met["encoder"] == "encode-1"
    assert met["t_s"] < jobs[0]["t_s"]
    for content, answer in asked:
        deployment.compare(content, answer)


def test_the_pd_instance_encoded_nothing(deployment: Deployment) -> None:
    """Runs last: it looks back at everything above."""
    assert len(deployment.split.encoded_by("encode")) >= 20
    assert deployment.split.encoded_by("prefill_decode") == []

"""An encode engine on the front's machine and a joined one, next to one process."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from epd_portable.transfer.control import ControlClients
from epd_portable.transfer.curve import read_keys
from epd_portable.wire.codec import encode
from epd_portable.wire.descriptors import PeerDescriptor, TensorSpec
from epd_portable.wire.messages import Announce, NotNeeded
from tests.e2e import flags
from tests.e2e.asking import Answer, ask, picture, text
from tests.e2e.cases import ASK
from tests.e2e.conftest import encoders_held
from tests.e2e.engines import config_of, named, wait_until
from tests.e2e.two_encoders.deployment import (
    ENCODERS,
    HOST,
    JOINED,
    OTHER_HOST,
    PD,
    Deployment,
    epd_launch,
)
from tests.kit.fronts import killed
from tests.kit.load import Load

REFUSED = f"{PD} refuses its items: encoder outputs differ by"
PAUSE_S = 0.4
"""Seconds between two requests of a client that repeats its request."""


def pictures(first: int, count: int = 4) -> list[dict[str, Any]]:
    """Return a question about several pictures; with four, each encoder gets at least one."""
    return [*(picture(seed) for seed in range(first, first + count)), ASK]


def encoders_of(answers: list[Answer]) -> set[str]:
    return {item.get("encoder", item["source"]) for answer in answers for item in answer.items}


def test_items_of_a_request_are_encoded_by_both_at_once_in_order(deployment: Deployment) -> None:
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
    alone = [ask(split.url, [part, ASK]).items for part in content if part["type"] != "text"]
    names = [item["mm_hash"] for (item,) in alone]
    assert [item["mm_hash"] for item in answer.items] == names
    swapped = ask(deployment.pair.reference_url, [*content[:1], *content[3:6], content[1], ASK])
    assert swapped.tokens != answer.tokens, "the order of these pictures makes no difference"


def test_only_holders_of_the_secret_are_heard(deployment: Deployment) -> None:
    split = deployment.split
    assert config_of(named(deployment.other.pid, JOINED)).host == OTHER_HOST
    config = config_of(named(split.pid, PD))
    assert config.host == HOST
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


def test_wrong_secret_is_refused_with_the_reason(deployment: Deployment, tmp_path: Path) -> None:
    assert epd_launch("secret", str(tmp_path / "other")).returncode == 0
    where = ("--front", deployment.split.url, "--secret-file", str(tmp_path / "other"))
    refused = epd_launch("instances", *where)
    assert refused.returncode == 1
    assert "the signature is wrong: it was made with another secret_file" in refused.stderr
    assert deployment.states() == dict.fromkeys([*sorted(ENCODERS), PD], "up")


@pytest.mark.full
def test_engine_restarts_with_secret_of_its_run_not_the_new_one(
    deployment: Deployment, tmp_path: Path
) -> None:
    split, file, fresh = deployment.split, deployment.secret_file, itertools.count(740, 4)
    used, new = file.read_text(), tmp_path / "new"
    assert epd_launch("secret", str(new)).returncode == 0
    try:
        file.write_text(new.read_text())
        refused = epd_launch("instances", "--front", split.url, "--secret-file", str(file))
        assert "the signature is wrong: it was made with another secret_file" in refused.stderr
        with killed(split, "encode-0"):
            pass
    finally:
        file.write_text(used)
    wait_until(
        lambda: encoders_of([ask(split.url, pictures(next(fresh)))]) == ENCODERS,
        "both encode again",
    )
    content = pictures(next(fresh))
    deployment.compare(content, ask(split.url, content))
    assert deployment.states() == dict.fromkeys([*sorted(ENCODERS), PD], "up")


def test_encoder_leaves_and_joins_under_load_without_loss(deployment: Deployment) -> None:
    split = deployment.split

    def send(number: int) -> tuple[Any, Answer]:
        content = pictures(2000 + 2 * number, 2)  # Of no other test, however many are asked.
        return content, ask(split.url, content)

    def encoders_of_next() -> set[str]:
        return encoders_of([answer for _, answer in load.wait_for(4)])

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as ended:
        with encoders_held(split) as held_s:
            # One request alone may go to the encoder that was a little faster.
            held = [pictures(first) for first in (720, 730, 740)]
            inflight = [pool.submit(ask, split.url, each) for each in held]
            wait_until(lambda: split.encoding(held_s) == ENCODERS, "both encoders work")
            leaving = pool.submit(deployment.other.stop)
            wait_until(lambda: deployment.states()[JOINED] == "draining", "it leaves")
            load = ended.enter_context(Load(send, clients=2, pause_s=PAUSE_S))
            assert not leaving.done()
        assert leaving.result() == 0
        answers = [each.result() for each in inflight]
        assert encoders_of(answers) == ENCODERS
        assert deployment.states() == {"encode-0": "up", PD: "up"}
        assert encoders_of_next() == {"encode-0"}

        # Other weights have the same fingerprint.
        (split.flags / flags.OTHER_WEIGHTS).touch()
        deployment.other.start()
        deployment.other.wait_until_ready()
        wait_until(lambda: REFUSED in deployment.problem(JOINED), "its outputs are refused")
        assert encoders_of_next() == {"encode-0"}
        assert deployment.other.stop() == 0

        (split.flags / flags.OTHER_WEIGHTS).unlink()
        deployment.other.start()
        deployment.other.wait_until_ready()
        wait_until(lambda: encoders_of_next() == ENCODERS, "both encode again")
    assert deployment.problem(JOINED) == ""
    assert deployment.states() == dict.fromkeys([*ENCODERS, PD], "up")
    for content, answer in [*zip(held, answers, strict=True), *load.seen]:
        deployment.compare(content, answer)


def test_the_pd_instance_encoded_nothing(deployment: Deployment) -> None:
    """Runs last: it looks back at everything above."""
    assert len(deployment.split.encoded_by("encode")) >= 20
    assert deployment.split.encoded_by("prefill_decode") == []

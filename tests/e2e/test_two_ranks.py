"""A PD instance of two ranks without encoder, on the CPU, with fewer cores than ranks too."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.asking import ask, body, picture, post, text
from tests.e2e.conftest import Pair, Start
from tests.e2e.engines import instance, shared_memory, wait_until
from tests.e2e.ranks import TWO_RANKS, TwoRanks


@pytest.fixture(scope="module")
def pair(start: Start, reference_url: str) -> Pair:
    settings = [
        "engine_args.dtype=float32",
        TWO_RANKS,
        "instances.prefill_decode.encoder=false",
        # Ranks that share cores with other work answer slowly at times.
        "transfer.wait_timeout_s=120",
        "transfer.lease_s=60",
    ]
    return Pair(split=start(settings), reference_url=reference_url)


class TestTwoRanks(TwoRanks):
    """The ranks exchange their sums through shared memory, and wait for each other by spinning."""


def test_ranks_without_encoder_hold_no_weights_of_it(pair: Pair) -> None:
    loaded = pair.split.events("model.loaded", since_s=0)
    ranks = [e["parameters"] for e in loaded if e["instance"] == "prefill_decode-0"]
    [encoder] = [e["parameters"] for e in loaded if e["instance"] == "encode-0"]
    assert encoder["visual"] > 0
    assert [each.get("visual", 0) for each in ranks] == [0, 0]
    assert all(each["language_model"] > 0 for each in ranks)


def test_without_encoders_images_are_refused_and_text_is_served(pair: Pair) -> None:
    """The encoder does not come back at once."""
    os.killpg(instance(pair.split.pid, "ec_producer").pid, signal.SIGKILL)
    refused = post(pair.split.url, body([picture(600), text("What is in the picture?")]))
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) > 0
    assert ask(pair.split.url, "hello").tokens


def test_a_killed_instance_of_two_ranks_leaves_no_shared_memory(pair: Pair) -> None:
    """Runs last: nothing is left to ask."""
    server = instance(pair.split.pid, "ec_consumer")
    shared = shared_memory([server, *server.children(recursive=True)])
    # Through which vLLM's engine and its workers talk; the pool stays, for the next start.
    theirs = [path for path in shared if not path.name.startswith("epd-")]
    assert any(path.name.startswith("psm_") for path in theirs)
    os.killpg(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(path.exists() for path in theirs), "shared memory is removed")

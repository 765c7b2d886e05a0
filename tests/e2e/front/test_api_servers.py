"""Two API servers of the front before one pair of real engines."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from epd_portable.launch.cli import main
from tests.e2e.asking import Answer, ask, body, picture, text
from tests.e2e.conftest import Split, Start, slow_steps
from tests.e2e.engines import RESTART_S, counted, process, wait_until
from tests.kit.fronts import in_flight, is_up

pytestmark = pytest.mark.full

ASK = text("Describe the picture.")
STREAMS = 8


@pytest.fixture(scope="module")
def front(start: Start) -> Split:
    settings = ["engine_args.dtype=float32", "engine_args.api_server_count=2"]
    steered = "instances.prefill_decode.engine_args.worker_cls=tests.e2e.workers.SteeredPDWorker"
    return start([*settings, steered])


def ask_each(front: Split, seed: int) -> list[Answer]:
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(ask, front.url, [picture(seed + n), ASK]) for n in range(STREAMS)]
        return [each.result() for each in asked]


def connections(front: Split) -> list[int]:
    """Return how many clients each API server has."""
    port = int(front.url.rsplit(":", 1)[1])
    return [
        sum(
            each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port
            for each in server.net_connections("tcp")
        )
        for server in process(front.pid, "front").children()
    ]


def instances(front: Split) -> list[dict[str, Any]]:
    """Return the instances that ``epd-launch instances`` shows."""
    words = process(front.pid, "front").cmdline()
    settings = json.loads(words[words.index("--settings") + 1])
    options = ("--front", f"{front.url}/v1", "--secret-file", settings["secret_file"], "--json")
    result = CliRunner().invoke(main, ("instances", *options))
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["instances"]
    return found


def test_metrics_page_sums_counts_of_both_servers(front: Split) -> None:
    names = ("vllm:request_success_total", "epd_front_items_total", "epd_encode_transfers_total")
    before = [counted(front.url, name) for name in names]
    request = body([picture(30), ASK], stream=True, max_tokens=200, ignore_eos=True)
    with httpx.Client(trust_env=False, timeout=60) as client, ExitStack() as streams:
        with slow_steps(front, 0.1):
            answers = [
                streams.enter_context(
                    client.stream("POST", f"{front.url}/v1/chat/completions", json=request)
                )
                for _ in range(STREAMS)
            ]
            lines = [answer.iter_lines() for answer in answers]
            for each in lines:
                next(each)
            assert in_flight(front) >= STREAMS
            seen = {each["name"]: each["in_flight"] for each in instances(front)}
            assert seen["prefill_decode-0"] == STREAMS
            assert min(connections(front)) > 0
        for each in lines:
            assert [line for line in each if line][-1] == "data: [DONE]"
    wait_until(lambda: in_flight(front) == 0, "nothing is in flight")
    after = [counted(front.url, name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)][:2] == [STREAMS] * 2
    assert after[2] > before[2]


def test_end_of_an_api_server_restarts_all(front: Split) -> None:
    before = ask_each(front, 0)
    old = process(front.pid, "front")
    engines = [process(front.pid, name) for name in ("encode-0", "prefill_decode-0")]
    first, second = old.children()
    os.kill(second.pid, 9)
    _, left = psutil.wait_procs([old, first, *engines], timeout=60)
    assert not left
    for name in ("front", "encode-0", "prefill_decode-0"):
        wait_until(lambda name=name: is_up(front, name), f"{name} is back", within_s=RESTART_S)
    assert [each.tokens for each in ask_each(front, 0)] == [each.tokens for each in before]

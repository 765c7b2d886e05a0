"""The front on any release of vLLM, beside one process; `ci/jobs/engines.sh` runs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.e2e.asking import ask, ask_all, ask_streamed, assert_equal, body, picture, post
from tests.e2e.cases import ASK, mixed_32
from tests.e2e.conftest import Pair, running
from tests.e2e.equality import FloatSmoke
from tests.forked import Popen
from tests.kit.fronts import killed

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

SEEDS = itertools.count(900)


@pytest.fixture(scope="module")
def pair(
    fork: Popen, tmp_path_factory: pytest.TempPathFactory, reference_url: str
) -> Iterator[Pair]:
    settings = [
        "engine_args.dtype=float32",
        "engine_args.api_server_count=2",
        # Beside other work.
        "transfer.wait_timeout_s=120",
    ]
    with running(tmp_path_factory.mktemp("front"), settings, popen=fork) as split:
        yield Pair(split=split, reference_url=reference_url)


class TestRelease(FloatSmoke):
    """Two API servers, one encode engine and one prefill+decode engine."""

    def test_streamed_response_is_that_of_one_process(self, pair: Pair) -> None:
        content = [picture(31), ASK]
        streamed = ask_streamed(pair.split.url, content)
        assert_equal(streamed, ask_streamed(pair.reference_url, content))

    def test_mixed_requests_at_once_are_answered_as_by_one_process(self, pair: Pair) -> None:
        contents = mixed_32()
        for content, ours in zip(contents, ask_all(pair.split.url, contents), strict=True):
            assert_equal(ours, ask(pair.reference_url, content))

    def test_parameters_of_a_wrong_type_end_no_engine(self, pair: Pair) -> None:
        request = body([picture(next(SEEDS)), ASK], vllm_xargs={"kv_transfer_params": "x"})
        ours, theirs = post(pair.split.url, request), post(pair.reference_url, request)
        assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
        content = [picture(next(SEEDS)), ASK]
        assert_equal(ask(pair.split.url, content), ask(pair.reference_url, content))

    def test_encode_engine_that_is_killed_costs_no_response(self, pair: Pair) -> None:
        with killed(pair.split, "encode-0"):
            content = [picture(next(SEEDS)), ASK]
            assert_equal(ask(pair.split.url, content), ask(pair.reference_url, content))

    def test_request_without_an_engine_that_generates_gets_503(self, pair: Pair) -> None:
        with killed(pair.split, "prefill_decode-0"):
            refused = post(pair.split.url, body([picture(next(SEEDS)), ASK]))
            assert refused.status_code == 503, refused.text
        content = [picture(next(SEEDS)), ASK]
        assert_equal(ask(pair.split.url, content), ask(pair.reference_url, content))

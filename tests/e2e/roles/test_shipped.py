"""Every shipped split beside 1E1PD, as its file says: answers of one process, and who did what.

One that is killed costs no answer, unless nobody is left to give it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import Secret
from epd_portable.launch.run.fronts import FrontClient
from tests.e2e.asking import ask, ask_all, ask_streamed, assert_equal, body, picture, post, text
from tests.e2e.cases import ASK, SINGLE
from tests.e2e.conftest import Split, encoders_held, every_instance_is_up, forget, running
from tests.e2e.engines import RESTART_S, config_of, counted, process, rests, wait_until
from tests.e2e.one_pair import test_interfaces as interfaces
from tests.forked import Popen

pytestmark = [pytest.mark.needs_nixl, pytest.mark.timeout(1200)]

CONFIGS = Path(__file__).parents[3] / "configs"
ENCODES = {
    "1e1p1d": {"encode-0"},
    "2ep1d": {"encode_prefill-0", "encode_prefill-1"},
    "1p1d": {"prefill-0"},
    "replicas": {"encode_prefill_decode-0", "encode_prefill_decode-1"},
    "mixed": {"encode-0", "encode_prefill_decode-0"},
}
"""Files, and who encodes in each."""
SHARED = {"2ep1d": "encode_prefill", "replicas": "encode_prefill_decode"}
"""Files of which every instance encodes for the others, with their group."""
QUEUE = 4
"""Items of others that each of these takes at a time."""
KV = ("1e1p1d", "2ep1d", "1p1d")
BY_NIXL = "1e1p1d"
"""File whose items travel by NIXL, as its KV does."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A shipped topology that runs, beside one process."""

    name: str
    split: Split
    reference_url: str

    def counted(self, sample: str) -> float:
        """Return one of the front's counters, by name and labels."""
        return counted(self.split.url, sample)

    def engine(self, name: str, metric: str) -> float:
        """Return a metric of an engine, whose label is its place among all."""
        index = [each["name"] for each in self.engines()].index(name)
        return counted(self.split.url, f'{metric}{{engine="{index}"}}')

    def client(self) -> FrontClient:
        """Return what sends signed requests to the front."""
        name = "decode-0" if self.name in KV else "encode_prefill_decode-0"
        secret = Secret.read(config_of(process(self.split.pid, name)).secret_file)
        return FrontClient(self.split.url, secret)

    def engines(self) -> list[dict[str, Any]]:
        """Return the front's view of all engines."""
        return asyncio.run(self.client().instances())

    def check(self, seed: int) -> None:
        """Ask about a picture that nobody has seen, and compare."""
        content = [picture(seed), ASK]
        answer = ask(self.split.url, content)
        assert_equal(answer, ask(self.reference_url, content))


@pytest.fixture(
    scope="module",
    params=[
        "1e1p1d",
        "replicas",
        # KV that goes from one to another is shown by the first, encoding for others by the second.
        pytest.param("2ep1d", marks=pytest.mark.full),
        # `test_without_encoders_the_prefill_instance_encodes` shows it.
        pytest.param("1p1d", marks=pytest.mark.full),
        pytest.param("mixed", marks=pytest.mark.full),
    ],
)
def served(
    request: pytest.FixtureRequest,
    fork: Popen,
    reference_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    settings = [
        "engine_args.dtype=float32",
        # What carries KV touches all memory that it may be in.
        "engine_args.kv_cache_memory_bytes=134217728",
        "transfer.wait_timeout_s=120",
        "env.VLLM_SERVER_DEV_MODE='1'",
    ]
    if request.param == BY_NIXL:
        stored = ["store.kind=file", f"store.path={folder / 'store'}", "store.timeout_ms=10000"]
        settings += ["transfer.path=nixl", *stored]
    if (group := SHARED.get(request.param)) is not None:
        settings += [
            "instances.encode.count=0",
            f"instances.encode.max_queued_items={QUEUE}",
            f"instances.{group}.engine_args.worker_cls=tests.e2e.workers.HeldWorker",
        ]
    config = CONFIGS / f"{request.param}.yaml"
    if request.param == "2ep1d":
        settings.append("instances.encode_prefill.count=2")
        config = CONFIGS / "1ep1d.yaml"
    with running(folder, settings, config=config, popen=fork) as split:
        yield Served(name=request.param, split=split, reference_url=reference_url)


LONG = [text("And then? " * 300), picture(40), text("Well, " * 200), ASK]
WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{name: (ask, content, {}) for name, content in SINGLE.items()},
    "a long prompt": (ask, LONG, {}),
    "a stream": (ask_streamed, [picture(41), ASK], {}),
    "a prompt that is not split": (ask, [picture(60), ASK], {"prompt_logprobs": 1}),
}


@pytest.mark.full
@pytest.mark.parametrize(("asked", "content", "more"), WAYS.values(), ids=WAYS)
def test_answers_are_those_of_one_process(
    served: Served, asked: Any, content: Any, more: dict[str, Any]
) -> None:
    answer = asked(served.split.url, content, **more)
    assert_equal(answer, ask(served.reference_url, content, **more))


def test_many_at_once_are_answered_as_by_one_process(served: Served) -> None:
    contents: list[Any] = [[picture(seed), ASK] for seed in range(50, 54)]
    contents += [f"How are you, number {number}?" for number in range(4)]
    for answer, content in zip(ask_all(served.split.url, contents), contents, strict=True):
        assert_equal(answer, ask(served.reference_url, content))


def test_images_are_encoded_by_all_engines_with_an_encoder(served: Served) -> None:
    if served.name not in SHARED:
        pytest.skip("its instances do not encode for each other")
    begin_s = time.monotonic()
    content = [*map(picture, range(90, 94)), ASK]
    answer = ask(served.split.url, content)
    assert_equal(answer, ask(served.reference_url, content))
    began = served.split.events("encode.begin", since_s=begin_s)
    encoded = Counter(event["instance"] for event in began for _ in event["items"])
    assert encoded == dict.fromkeys(ENCODES[served.name], 2), encoded
    if served.name not in KV:  # There who answers says of all items that KV came for them.
        assert Counter(each["source"] for each in answer.items) == {"local": 2, "transfer": 2}


def test_images_beyond_an_encoders_memory_are_encoded_locally(served: Served) -> None:
    if served.name not in SHARED:
        pytest.skip("its instances do not encode for each other")
    content = [*map(picture, range(110, 114 + 2 * QUEUE)), ASK]
    with ThreadPoolExecutor() as pool:
        with encoders_held(served.split) as held_s:
            pending = pool.submit(ask, served.split.url, content)
            in_flight = "epd_front_instance_in_flight"
            wait_until(lambda: served.counted(in_flight) >= QUEUE + 1, "a queue is full")
        answer = pending.result()
    assert_equal(answer, ask(served.reference_url, content))
    began = served.split.events("encode.begin", since_s=held_s)
    encoded = Counter(event["instance"] for event in began for _ in event["items"])
    assert sorted(encoded.values()) == [QUEUE, QUEUE + 4], encoded
    if served.name not in KV:
        assert Counter(each["source"] for each in answer.items) == {
            "local": QUEUE + 4,
            "transfer": QUEUE,
        }


def test_pictures_are_encoded_where_the_file_says(served: Served) -> None:
    begun = {event["instance"] for event in served.split.events("encode.begin")}
    assert begun == ENCODES[served.name]
    if served.name == BY_NIXL:
        paths = {event["path"] for event in served.split.events("transfer.begun")}
        assert paths == {"nixl"}


def test_prompts_are_computed_where_the_file_says(served: Served) -> None:
    apart = served.counted('epd_front_prefills_total{where="disaggregated"}')
    if served.name not in KV:
        assert apart == 0
        return
    assert apart > 0
    assert served.counted("epd_front_prefills_total") == apart
    hits = served.engine("decode-0", "vllm:external_prefix_cache_hits_total")
    queries = served.engine("decode-0", "vllm:external_prefix_cache_queries_total")
    # All but the last token of a prompt, and what the decode instance has of it already.
    assert 0.5 * queries < hits


def test_instances_with_nothing_to_do_rest(served: Served) -> None:
    """An engine that carries KV itself polls for it without a pause, on a core of other engines."""
    for each in served.engines():
        server = process(served.split.pid, each["name"])
        wait_until(lambda server=server: rests(server), f"no thread of {each['name']} runs")


def test_without_encoders_the_prefill_instance_encodes(served: Served) -> None:
    """1P1D, by the engines of the file with every stage apart."""
    if served.name != "1e1p1d":
        pytest.skip("shown by the one with every stage apart")
    apart = 'epd_front_prefills_total{where="disaggregated"}'
    before, begin_s = served.counted(apart), time.monotonic()
    client = served.client()
    asyncio.run(client.request("POST", "/encode-0/drain"))
    wait_until(lambda: all(each["idle"] for each in served.engines()), "encode-0 is idle")
    for content in ([picture(43), ASK], "How are you?"):
        assert_equal(ask(served.split.url, content), ask(served.reference_url, content))
    asyncio.run(client.request("POST", "/encode-0/resume"))
    assert served.split.encoding(begin_s) == {"prefill-0"}
    assert served.counted(apart) == before + 2


def test_item_evicted_by_prefill_comes_from_the_store(served: Served) -> None:
    if served.name != BY_NIXL:
        pytest.skip("has no store")
    content = [picture(44), ASK]
    first = ask(served.split.url, content)
    stored = {item["mm_hash"] for item in first.items}

    def written() -> set[str]:
        return {event["mm_hash"] for event in served.split.events("store.written")}

    wait_until(lambda: stored <= written(), "the item is stored")
    forget(served.split)
    begin_s = time.monotonic()
    assert_equal(ask(served.split.url, content), first)
    loaded = served.split.events("store.loaded", since_s=begin_s)
    assert {(each["mm_hash"], each["instance"]) for each in loaded} == {(*stored, "prefill-0")}
    assert not served.split.encoding(begin_s)


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_prompts_of_other_interfaces_are_computed_apart_too(served: Served, path: str) -> None:
    if served.name not in KV:
        pytest.skip("nobody prefills apart")
    responses = path == "/v1/responses"
    request = interfaces.responses(740) if responses else interfaces.messages(750)
    before = served.counted('epd_front_prefills_total{where="disaggregated"}')
    hits = served.engine("decode-0", "vllm:external_prefix_cache_hits_total")
    got = interfaces.answer(served.split.url, path, request)
    assert got == interfaces.answer(served.reference_url, path, request)
    assert served.counted('epd_front_prefills_total{where="disaggregated"}') == before + 1
    assert served.engine("decode-0", "vllm:external_prefix_cache_hits_total") > hits


@pytest.mark.full
def test_requests_survive_a_killed_encoding_replica(served: Served) -> None:
    """After those that say where pictures are encoded: KV that went with it is computed again."""
    if served.name not in SHARED:
        pytest.skip("its instances do not encode for each other")
    begin_s = time.monotonic()
    contents = [[*map(picture, range(100 + 4 * n, 104 + 4 * n)), ASK] for n in range(6)]
    expected = [ask(served.reference_url, content) for content in contents]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_all, served.split.url, contents)
        wait_until(
            lambda: bool(served.split.events("encode.begin", since_s=begin_s)), "one encodes"
        )
        victim = served.split.events("encode.begin", since_s=begin_s)[0]["instance"]
        os.killpg(process(served.split.pid, victim).pid, signal.SIGKILL)
        wait_until(lambda: not every_instance_is_up(served.split), "the front knows")
        for answer, other in zip(asked.result(), expected, strict=True):
            assert_equal(answer, other)
    wait_until(lambda: every_instance_is_up(served.split), f"{victim} is back", within_s=RESTART_S)


@pytest.mark.full
def test_requests_survive_a_kill_of_each_stage(served: Served) -> None:
    """Runs last: whoever is killed comes back, and nothing else may be asked meanwhile."""
    if served.name not in ("1e1p1d", "1p1d"):
        pytest.skip("shown by those with every stage apart")
    stages = ["prefill-0", "decode-0", *(["encode-0"] if served.name == "1e1p1d" else [])]
    for number, name in enumerate(stages):
        os.killpg(process(served.split.pid, name).pid, signal.SIGKILL)
        if name == "decode-0":
            refused = post(served.split.url, body([picture(70), ASK]))
            assert refused.status_code == 503, refused.text
        else:
            served.check(71 + number)
        if name == "prefill-0":
            apart = 'epd_front_prefills_total{where="%s"}'
            assert served.counted(apart % "local") + served.counted(apart % "unavailable") > 0
        wait_until(
            lambda: every_instance_is_up(served.split), f"{name} is back", within_s=RESTART_S
        )
        before = served.counted('epd_front_prefills_total{where="disaggregated"}')
        served.check(80 + number)
        assert served.counted('epd_front_prefills_total{where="disaggregated"}') == before + 1

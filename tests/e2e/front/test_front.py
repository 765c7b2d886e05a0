"""The front before real engines: answers, and each process killed under load."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from epd_portable.demo import servers
from epd_portable.demo.pictures import draw
from tests import forked, pod
from tests.e2e import flags
from tests.e2e.asking import (
    AUTHORIZED,
    KEY,
    TIMEOUT_S,
    answer_of,
    ask,
    assert_equal,
    body,
    picture,
    post,
    text,
)
from tests.e2e.conftest import VIDEOS, Split, encoders_held, running
from tests.e2e.engines import RESTART_S, counted, process, wait_until
from tests.e2e.front import shapes
from tests.e2e.modalities.parts import frames
from tests.forked import Popen
from tests.kit.fronts import in_flight, is_up, killed
from tests.metrics_page import total
from tests.unit.media import samples

ASK = text("Describe the picture.")
ENGINES = ("encode-0", "encode-1", "prefill_decode-0")


@pytest.fixture(scope="module")
def front(
    tmp_path_factory: pytest.TempPathFactory, fork: Popen, begun: servers.Server
) -> Iterator[Split]:
    """The front and one engine are started as users start them, and the others are forked.

    In a container as Kubernetes runs one, where that is allowed; while the reference starts.
    """
    settings = ["engine_args.dtype=float32", "front.access_log=stderr"]
    settings += [f"engine_args.{key}={json.dumps(value)}" for key, value in VIDEOS.items()]
    steered = "instances.encode.engine_args.worker_cls=tests.e2e.workers.SlowEncodeWorker"
    folder = tmp_path_factory.mktemp("front")
    container = {forked.POD: str(folder)}
    if why_not := pod.why_not(folder / "tried"):
        print(f"no container here, the front starts outside: {why_not}")
        container = {}
    settings += ["instances.encode.count=2", steered]
    env = {"VLLM_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1", forked.COLD: "front encode-1"}
    with running(folder, settings, env=env | container, popen=fork) as split:
        yield split


@contextmanager
def load(front: Split, seeds: range) -> Iterator[list[Future[httpx.Response]]]:
    """Ask of a picture and a video for each seed, six at a time."""
    with ThreadPoolExecutor(6) as pool:
        yield [pool.submit(post, front.url, body(both(seed))) for seed in seeds]


def both(seed: int) -> list[dict[str, Any]]:
    """Return a picture and a video, of which each encode engine gets a part."""
    return [picture(seed), frames(seed, 4), ASK]


JOBS = "epd_front_encode_job_seconds_count"
RETRIED = 'epd_front_items_total{outcome="retried"}'
NOT_NEEDED = 'epd_front_items_total{outcome="not_needed"}'


def test_vllm_api_key_guards_the_front_as_plain_vllm(front: Split) -> None:
    """All other tests send the key: no part of the topology needs it."""
    for path, expected in {"/v1/models": 401, "/health": 200, "/metrics": 200}.items():
        answer = httpx.get(front.url + path, timeout=30, trust_env=False)
        assert answer.status_code == expected
    wrong = {"authorization": "Bearer wrong"}
    assert post(front.url, body([picture(3), ASK]), headers=wrong).status_code == 401
    assert ask(front.url, [picture(3), ASK]).sources == ["transfer"]


def control(front: Split, path: str, **params: str) -> None:
    """Send one of vLLM's calls to all engines."""
    url = f"{front.url}/{path}"
    answer = httpx.post(url, params=params, headers=AUTHORIZED, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def test_weights_are_updated_while_requests_wait_for_items(
    front: Split, reference_url: str
) -> None:
    """The calls of an update, in its order; the update itself needs no engine of ours."""

    def begun(since_s: float) -> int:
        """Return how many requests the engine that generates has begun."""
        steps = front.events("step", since_s=since_s)
        decoding = [each for each in steps if each["instance"] == ENGINES[-1]]
        return len({request_id for each in decoding for request_id in each["tokens"]})

    contents = [
        [text("Words that are computed first. " * 12), picture(910 + n), ASK] for n in range(6)
    ]
    with ThreadPoolExecutor(8) as pool:
        with encoders_held(front) as held_s:
            before = [pool.submit(ask, front.url, each) for each in contents]
            wait_until(lambda: begun(held_s) == 6, "the text before each item is computed")
            wait_until(lambda: in_flight(front) >= 12, "jobs wait at encoders that are held")
            pause = pool.submit(control, front, "pause", mode="wait")
        pause.result()
        answers = [each.result() for each in before]
        later = pool.submit(ask, front.url, contents[0])
        control(front, "reset_prefix_cache")
        control(front, "reset_encoder_cache")
        assert not later.done()
        control(front, "resume")
        answers.append(later.result())
    for ours, content in zip(answers, [*contents, contents[0]], strict=True):
        assert_equal(ours, ask(reference_url, content))
        assert ours.sources == ["transfer"]


def test_first_video_part_is_computed_before_the_next_arrives(
    front: Split, reference_url: str
) -> None:
    # The picture comes last: of what is left for two engines with one item each either may get it.
    content = [frames(80, 16), picture(80), ASK]
    with ThreadPoolExecutor(1) as pool, encoders_held(front) as held_s:
        pending = pool.submit(ask, front.url, content)

        def encoding() -> dict[str, str]:
            begun = front.events("encode.begin", since_s=held_s)
            items = {item: event["instance"] for event in begun for item in event["items"]}
            return {item.partition("#")[2]: encoder for item, encoder in items.items()}

        wait_until(lambda: {"0-4", "4-8"} <= encoding().keys(), "both parts are encoded")
        (front.flags / flags.HOLD).write_text(encoding()["4-8"])

        def progress() -> list[int]:
            told = front.events("request.progress", since_s=held_s)
            return [event["mm_inputs_done"] for event in told]

        wait_until(lambda: progress() == [1], "the prompt is computed behind the first part")
    ours, theirs = pending.result(), ask(reference_url, content)
    assert_equal(ours, theirs)
    assert ours.sources == ["transfer"] * 3
    parts = [each["mm_hash"].rpartition("#")[2] for each in ours.items[:2]]
    assert parts == ["0-4", "4-8"]
    assert len({each["encoder"] for each in ours.items[:2]}) == 2
    again = ask(front.url, [text("Look: "), *content])
    assert again.sources == ["encoder_cache"] * 3
    assert_equal(again, ask(reference_url, [text("Look: "), *content]))


@pytest.mark.full
def test_lost_video_parts_come_from_caches_of_their_encoders(
    front: Split, reference_url: str
) -> None:
    content = [frames(90, 16, 112), ASK]
    part = 64
    assert len(ask(front.url, content).items) == 2
    # Pictures take all room but that of one part and a little more.
    left = counted(front.url, "epd_pd_encoder_cache_embeddings") - part
    sides = [16] * int(left // 16**2)
    sides.append(math.isqrt(int(left % 16**2)))
    taken = sum(side**2 for side in sides)
    assert left - taken < part
    pictures = [picture(300 + seed, 28 * side) for seed, side in enumerate(sides)]
    for some in (pictures[::2], pictures[1::2]):
        ask(front.url, [*some, ASK])
    used = "epd_pd_encoder_cache_used_embeddings"
    wait_until(lambda: counted(front.url, used) == taken + part, "one of the two parts is left")
    encoded = front.encoded_by("encode")
    again = ask(front.url, [text("Look: "), *content])
    # The first to come back takes the room of the other.
    assert again.sources == ["transfer"] * 2
    assert front.encoded_by("encode") == encoded
    assert_equal(again, ask(reference_url, [text("Look: "), *content]))


def test_repeated_image_is_processed_and_encoded_once(front: Split) -> None:
    answers, counts = [], []
    for _ in range(2):
        answers.append(ask(front.url, [picture(20), ASK]))
        # Its job may end after its answer has begun.
        wait_until(lambda: in_flight(front) == 0, "nothing is in flight")
        counts.append([counted(front.url, name) for name in (JOBS, NOT_NEEDED)])
    first, again = answers
    assert again.tokens == first.tokens
    assert again.sources == ["encoder_cache"]
    jobs, held = counts[0]
    assert counts[1] == [jobs, held + 1]
    assert counted(front.url, "vllm:mm_cache_hits_total") >= 1


def test_image_beyond_an_encoders_memory_comes_from_the_other(
    front: Split, reference_url: str
) -> None:
    content = [picture(70), ASK]
    retried = counted(front.url, RETRIED)
    begin_s = time.monotonic()
    (front.flags / flags.NO_MEMORY).touch()
    answer = ask(front.url, content)
    asked = [event["instance"] for event in front.events("encode.begin", since_s=begin_s)]
    assert sorted(asked) == ["encode-0", "encode-1"]
    assert [(each["source"], each["encoder"]) for each in answer.items] == [("transfer", asked[1])]
    assert counted(front.url, RETRIED) == retried + 1
    assert_equal(answer, ask(reference_url, content))


def test_an_item_that_a_client_names_is_not_another_ones(front: Split) -> None:
    named_alike = [{**picture(seed), "uuid": "mine"} for seed in (21, 22)]
    ours = [ask(front.url, [each, ASK]) for each in named_alike]
    plain = [ask(front.url, [picture(seed), ASK]) for seed in (21, 22)]
    assert [each.tokens for each in ours] == [each.tokens for each in plain]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "mine"},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "mine"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}},
    ],
)
def test_items_without_their_media_are_refused(front: Split, part: dict[str, Any]) -> None:
    assert post(front.url, body([part, ASK])).status_code == 400


URL = picture(1, 28)["image_url"]["url"]
SOURCE = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
INPUT = {"type": "input_image", "image_url": URL}
FORMS: dict[str, tuple[str, Any, str]] = {
    "a part": (shapes.CHAT, picture(1, 28), "utf-8"),
    "a string without a type": (shapes.CHAT, {"image_url": URL}, "utf-8"),
    "input_image in chat": (shapes.CHAT, {**INPUT, "detail": "auto"}, "utf-8"),
    "a part after a byte order mark": (shapes.CHAT, picture(1, 28), "utf-8-sig"),
    "a part in another encoding": (shapes.CHAT, picture(1, 28), "utf-16"),
    "input_image": (shapes.RESPONSES, INPUT, "utf-8"),
    "a block": (shapes.MESSAGES, {"type": "image", "source": SOURCE}, "utf-8"),
    "a part of a batch": (shapes.BATCH, picture(1, 28), "utf-8"),
    "a part to tokenize": (shapes.TOKENIZE, {"image_url": URL}, "utf-8"),
}
"""Forms of an image in requests: the path, the part, the encoding of the body."""


@pytest.mark.parametrize("form", FORMS)
def test_items_beyond_the_limit_are_refused_in_each_form(front: Split, form: str) -> None:
    path, part, encoding = FORMS[form]

    def send(count: int) -> httpx.Response:
        request = (shapes.responses if path == shapes.RESPONSES else shapes.chat)([part] * count)
        if path == shapes.BATCH:
            request["messages"] = [request["messages"]]
        content = json.dumps(request).encode(encoding)
        headers = {"content-type": "application/json", **AUTHORIZED}
        return httpx.post(front.url + path, content=content, headers=headers, timeout=TIMEOUT_S)

    most = 64
    served, refused = send(most), send(most + 1)
    assert (served.status_code, refused.status_code) == (200, 400), (served.text, refused.text)
    words = refused.json()["error"]["message"]
    assert "at most 64" in words and "front.media.max_items" in words


def test_requests_of_each_shape_get_plain_vllms_response(
    front: Split, reference_url: str, subtests: pytest.Subtests
) -> None:
    rows = list(shapes.requests())
    with ThreadPoolExecutor(4) as pool:
        sent = [
            [pool.submit(shapes.answer, url, path, asked) for url in (front.url, reference_url)]
            for _, path, asked in rows
        ]
    assert len(rows) > 200
    for (title, *_), (ours, theirs) in zip(rows, sent, strict=True):
        with subtests.test(title):
            if "a file" in title:  # vLLM answers with 500, and does not say why.
                assert (ours.result()[0], theirs.result()[0]) == (400, 500)
            else:
                assert ours.result() == theirs.result()


@pytest.mark.parametrize("kind", samples.UNUSUAL)
def test_unusual_image_files_are_read_as_by_plain_vllm(
    front: Split, reference_url: str, kind: str
) -> None:
    data = samples.UNUSUAL[kind](draw(400).image)
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, ASK]
    ours = ask(front.url, content)
    assert_equal(ours, ask(reference_url, content))
    assert ours.sources == ["transfer"]


def shared(seed: int) -> list[dict[str, Any]]:
    """Return what a request that is served shares with one that is refused."""
    return [picture(seed), ASK]


def test_refused_requests_do_not_affect_waiting_ones(front: Split, reference_url: str) -> None:
    """The refused ones come while the item is encoded, and have ended before it is there."""
    refused = dict(enumerate(shapes.REFUSED.values(), 410))
    with ThreadPoolExecutor(len(refused)) as pool, encoders_held(front) as held_s:
        served = {seed: pool.submit(ask, front.url, shared(seed)) for seed in refused}
        wait_until(lambda: len(front.encoding(held_s)) == 2, "both encoders are held")
        for seed, extra in refused.items():
            for _ in range(2):
                assert post(front.url, body(shared(seed), **extra)).status_code >= 400
        assert not any(each.done() for each in served.values())
    for seed, each in served.items():
        assert_equal(each.result(), ask(reference_url, shared(seed)))


def test_refused_requests_do_not_affect_concurrent_ones(front: Split, reference_url: str) -> None:
    refused = dict(enumerate(shapes.REFUSED.values(), 510))
    with ThreadPoolExecutor(16) as pool:
        sent = {
            seed: [
                pool.submit(post, front.url, body(shared(seed), **more))
                for more in (extra, {}, extra, {})
            ]
            for seed, extra in refused.items()
        }
    for seed, replies in sent.items():
        first, served, second, after = (each.result() for each in replies)
        assert first.status_code == second.status_code >= 400
        # Plain vLLM gets none of the refused: it fails the next request that has their items.
        theirs = ask(reference_url, shared(seed))
        for reply in (served, after):
            assert_equal(answer_of(reply), theirs)


def test_a_request_keeps_its_id_which_the_access_line_has(front: Split) -> None:
    asked = body([picture(77), ASK], max_tokens=3, ignore_eos=True)
    answer = post(front.url, asked, headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"

    def lines() -> list[str]:
        log = (front.log_dir / "front.log").read_text()
        return [each for each in log.splitlines() if '"request_id": "mine-7"' in each]

    wait_until(lambda: bool(lines()), "the line is in the log")
    (line,) = lines()
    noted = json.loads(line[line.index("{") :])
    assert (noted["path"], noted["status"]) == ("/v1/chat/completions", 200)
    assert (noted["engine"], noted["tokens"]) == ("prefill_decode-0", 3)
    (item,) = noted["items"]
    assert (item["source"], item["encoder"][:7]) == ("transfer", "encode-")
    assert item["path"] and item["nbytes"] and item["transfer_ms"]


def test_backlog_counts_work_from_dispatch_to_completion(front: Split) -> None:
    def seen() -> dict[str, float]:
        page = httpx.get(f"{front.url}/metrics", trust_env=False).text
        found = {"in flight": total(page, 'epd_front_instance_in_flight{role="prefill-decode"}')}
        for role, kind in (("encode", "image"), ("prefill-decode", "text")):
            came = f'epd_front_work_seconds_total{{role="{role}",modality="{kind}"}}'
            found[f"came {role}"] = total(page, came)
            found[f"backlog {role}"] = total(page, f'epd_front_backlog_seconds{{role="{role}"}}')
        for name in ("prompt", "generation"):
            found[name] = total(page, f"vllm:{name}_tokens_total{{}}")
        return found

    ask(front.url, [picture(50), ASK], max_tokens=50)  # From then on it is known what both take.
    before = seen()
    with ThreadPoolExecutor(3) as pool:
        pages = []
        with encoders_held(front):
            pending = [
                pool.submit(post, front.url, body([picture(seed), ASK])) for seed in (51, 52, 53)
            ]
            wait_until(lambda: pages.append(seen()) or pages[-1]["in flight"] == 3, "all are sent")
        answers = [each.result().json()["usage"] for each in pending]
    sent, done = pages[-1], seen()
    came_s = sent["came prefill-decode"] - before["came prefill-decode"]
    assert sent["backlog prefill-decode"] == pytest.approx(came_s, abs=0.003)
    assert came_s > 0 and done["came encode"] > before["came encode"]
    assert [done["backlog encode"], done["backlog prefill-decode"]] == [0, 0]
    for name, key in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        assert done[name] - before[name] == sum(usage[key] for usage in answers)


def test_requests_that_clients_give_up_leave_nothing(front: Split) -> None:
    with httpx.Client(headers=AUTHORIZED, trust_env=False) as client:
        for seed, timeout_s in enumerate((0.01, 0.03, 0.06, 0.1, 0.2)):
            request = body(both(60 + seed), max_tokens=500, ignore_eos=True)
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{front.url}/v1/chat/completions", json=request, timeout=timeout_s)
    wait_until(lambda: in_flight(front) == 0, "nothing is in flight")


def test_encode_engines_may_be_killed_under_load(front: Split, reference_url: str) -> None:
    known, fresh = range(100, 108), range(120, 128)
    expected = {seed: ask(reference_url, both(seed)).tokens for seed in (*known, *fresh)}
    for seed in known:  # Encoders have their items then.
        assert ask(front.url, both(seed)).tokens == expected[seed]
    for seeds in (known, fresh):
        with load(front, seeds) as answers, killed(front, "encode-0"):
            replies = [each.result() for each in answers]
        assert [reply.status_code for reply in replies] == [200] * len(replies)
        for seed, reply in zip(seeds, replies, strict=True):
            words = reply.json()["choices"][0]["logprobs"]["content"]
            tokens = tuple(word["token"] for word in words)
            assert tokens == expected[seed]
    assert ask(front.url, [picture(200), ASK]).sources == ["transfer"]


def test_killed_engine_ends_open_streams_and_refuses_others(front: Split) -> None:
    url = f"{front.url}/v1/chat/completions"
    request = body([picture(30), ASK], stream=True, max_tokens=2000, ignore_eos=True)
    options: Any = {"headers": AUTHORIZED, "timeout": 60, "trust_env": False}
    with httpx.stream("POST", url, json=request, **options) as stream:
        lines = stream.iter_lines()
        next(lines)
        with killed(front, "prefill_decode-0"):
            rest = [line for line in lines if line]
            refused = post(front.url, body([picture(31), ASK]))
    assert any('"error"' in line for line in rest[-2:])
    assert refused.status_code == 503
    assert ask(front.url, [picture(31), ASK]).tokens


@pytest.mark.full
def test_a_killed_front_comes_back_with_new_engines(front: Split) -> None:
    before = ask(front.url, [picture(40), ASK])
    engines = [process(front.pid, name) for name in ENGINES]
    with killed(front, "front"):
        psutil.wait_procs(engines, timeout=60)
        assert not any(each.is_running() for each in engines)
    for name in ENGINES:
        wait_until(lambda name=name: is_up(front, name), f"{name} is back", within_s=RESTART_S)
    assert ask(front.url, [picture(40), ASK]).tokens == before.tokens

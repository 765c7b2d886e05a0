"""The status page's JSON and files, from a router over HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, get_args

from starlette.responses import JSONResponse, Response

from epd_portable.config.roles import ROLES
from epd_portable.config.secret import Secret
from epd_portable.router.observability.status import MAX_ENDED_SHOWN, SCHEMA
from epd_portable.wire.outcomes import Fallback
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, Received, answer, once, refuse
from tests.integration.router.test_requests import BLUE, RED, TEXT
from tests.integration.router.test_warm_up import transferring
from tests.keyring import secret

HOUR_S = 3600.0


def bearer(held: Secret | None = None, *, valid_s: float = HOUR_S) -> dict[str, str]:
    """Return the header of who holds a key of the page."""
    key = (held or secret()).page_key(until=time.time() + valid_s)
    return {"authorization": f"Bearer {key}"}


async def status(t: Topology) -> Any:
    answer = await t.client.get("/status.json", headers=bearer())
    assert answer.status_code == 200
    return answer.json()


async def until(t: Topology, condition: Any) -> Any:
    """Wait until what the page shows fulfils a condition, and return that."""

    async def fulfilled() -> Any:
        while not condition(found := await status(t)):
            await asyncio.sleep(0.02)
        return found

    return await asyncio.wait_for(fulfilled(), DEADLINE_S)


async def with_outcome(received: Received) -> Response:
    """Answer as an instance does that had every item by `shm`, a thousand bytes each."""
    items = [
        {
            "mm_hash": each["item_uuid"],
            "source": "transfer",
            "encoder": each["encoder"],
            "path": "shm",
            "nbytes": 1000,
        }
        for each in (received.params or {"transfers": []})["transfers"]
    ]
    return JSONResponse({"choices": [], "ec_transfer_params": {"instance": "pd-0", "items": items}})


async def test_only_a_key_shows_more_than_health_does_and_it_opens_nothing_else(
    build: Build,
) -> None:
    t = await build(registration=True)
    health = (await t.client.get("/health")).json()
    assert (await t.client.get("/status.json")).json() == {"schema": SCHEMA, **health}
    other = bearer(Secret("another secret of thirty-two characters"))
    for headers, word in ((other, "epd-launch page"), (bearer(valid_s=-2), "time of this key")):
        refused = await t.client.get("/status.json", headers=headers)
        assert refused.status_code == 401
        assert word in refused.json()["error"]["message"]
    assert "instances" not in (await t.client.get("/health", headers=bearer())).json()
    assert (await t.client.get("/epd/instances", headers=bearer())).status_code == 401
    assert (await t.client.post("/status.json", headers=bearer())).status_code == 405
    # Looks do not count as requests.
    await status(t)
    assert await t.metric('epd_router_requests_total{endpoint="other",status="200"}') == 0


async def test_it_shows_the_instances_as_they_are(build: Build) -> None:
    t = await build(encoders=1, pds=2)
    await t.pds[1].serving.stop()
    found = await until(t, lambda shown: shown["instances"][2]["state"] == "down")
    assert found["model"] == "demo"
    encoder, pd, down = found["instances"]
    assert (encoder["name"], encoder["role"], encoder["state"]) == ("encode-0", "encode", "up")
    assert (pd["name"], pd["role"], pd["in_flight"]) == ("pd-0", "prefill-decode", 0)
    assert down["reason"]


async def test_it_counts_what_goes_between_instances(build: Build) -> None:
    t = await build(encoders=1, pds=1, behaviour=with_outcome)
    await t.chat(TEXT, RED, BLUE)
    (pair,) = (await until(t, lambda shown: shown["pairs"] and shown["pairs"][0]["count"] == 2))[
        "pairs"
    ]
    assert pair == {
        "source": "encode-0",
        "target": "pd-0",
        "cargo": "items",
        "path": "shm",
        "count": 2,
        "reported": 2,
        "nbytes": 2000,
    }


async def test_the_path_of_a_pair_is_known_as_soon_as_it_has_met(build: Build) -> None:
    t = await build(pds=["prefill-decode"], warm_up=True, behaviour=transferring())
    found = await until(t, lambda shown: shown["pairs"])
    (pair,) = found["pairs"]
    assert (pair["source"], pair["target"], pair["path"]) == ("encode-0", "pd-0", "shm")
    assert (pair["count"], pair["reported"]) == (1, 1)
    assert found["requests"] == []  # No client has asked.


async def test_it_shows_the_fallbacks_that_were_used_and_when(build: Build) -> None:
    t = await build(behaviour=refuse(500))
    before = time.monotonic()
    await t.chat(TEXT)
    uses = {use["fallback"]: use for use in (await status(t))["fallbacks"]}
    assert uses["error"]["count"] == 1
    assert before <= uses["error"]["at"] <= time.monotonic()
    assert uses["retried"] == {"fallback": "retried", "count": 0, "at": 0.0}


async def test_it_shows_the_stages_of_requests(build: Build) -> None:
    may_encode, may_answer = asyncio.Event(), asyncio.Event()
    t = await build(encoding=once(may_encode), behaviour=once(may_answer))
    asking = asyncio.create_task(t.chat(TEXT, RED))
    found = await until(t, lambda shown: shown["requests"] and shown["requests"][0]["items"])
    (request,) = found["requests"]
    assert (found["in_flight"], found["waiting"]) == (1, 0)
    assert (request["status"], request["ended_at"]) == (0, 0)
    may_encode.set()
    await until(t, lambda shown: shown["requests"][0]["items"][0]["jobs"][0]["end"])
    may_answer.set()
    named = (await asking).headers["x-request-id"]
    (request,) = (await until(t, lambda shown: not shown["in_flight"]))["requests"]
    assert (request["id"], request["status"], request["items_in_all"]) == (named, 200, 1)
    (job,) = request["items"][0]["jobs"]
    (leg,) = request["legs"]
    assert (job["instance"], job["end"]) == ("encode-0", "encoded")
    assert (leg["stage"], leg["instance"], leg["end"]) == ("answer", "pd-0", "done")
    assert request["began_at"] <= job["began_at"] <= job["ended_at"] <= leg["ended_at"]


async def test_those_in_flight_come_first_and_the_rest_is_bounded(build: Build) -> None:
    never = asyncio.Event()

    async def behave(received: Received) -> Response:
        if received.body.get("stream"):
            await never.wait()
        return await answer(received)

    t = await build(behaviour=behave)
    hanging = [asyncio.create_task(t.chat(TEXT, stream=True)) for _ in range(12)]
    await until(t, lambda shown: shown["in_flight"] == 12)
    for _ in range(MAX_ENDED_SHOWN + 3):
        last = await t.chat(TEXT)
    found = await until(t, lambda shown: shown["in_flight"] == 12)
    shown = found["requests"]
    assert [bool(each["ended_at"]) for each in shown] == [False] * 10 + [True] * MAX_ENDED_SHOWN
    assert shown[10]["id"] == last.headers["x-request-id"]
    never.set()
    await asyncio.gather(*hanging)


async def test_what_has_not_changed_is_not_sent_again(build: Build) -> None:
    t = await build()
    # The first look has the engines asked for their figures.
    await until(t, lambda shown: all(each["engine"] for each in shown["instances"]))
    first = await t.client.get("/status.json", headers=bearer())
    known = {**bearer(), "if-none-match": first.headers["etag"]}
    second = await t.client.get("/status.json", headers=known)
    assert (second.status_code, second.content) == (304, b"")
    assert float(second.headers["x-epd-now"]) >= float(first.headers["x-epd-now"])
    await t.chat(TEXT)
    assert (await t.client.get("/status.json", headers=known)).status_code == 200


async def test_engines_are_asked_for_figures_only_while_somebody_looks(build: Build) -> None:
    t = await build()
    t.pd.metrics = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="demo"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="demo"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25\n'
        'epd_pd_received_bytes_total{path="shm"} 4096.0\n'
    )
    await asyncio.sleep(0.05)
    assert not t.pd.metrics_asked
    found = await until(t, lambda shown: shown["instances"][1]["engine"])
    assert found["instances"][1]["engine"] == {
        "running": 3,
        "waiting": 2,
        "kv_used": 0.25,
        "queued_items": None,
        "received_bytes": {"shm": 4096},
    }
    for _ in range(5):
        await status(t)
    assert t.pd.metrics_asked == 1


async def test_the_pages_files_are_there_and_let_nothing_else_in(build: Build) -> None:
    t = await build()
    page = await t.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in re.findall(r'(?:href|src)="([a-z.]+)"', page.text):
        answer = await t.client.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == policy
        again = await t.client.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
        # Nothing of it lies elsewhere.
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
    # It has words for fallbacks, and a place for every role.
    script = (await t.client.get("/status.js")).text
    for name, known in (("FALLBACK_WORDS", get_args(Fallback)), ("STAGES", ROLES)):
        table = script.partition(f"const {name} = {{")[2].partition("\n};")[0]
        assert set(re.findall(r'(?:^|[\s,{])"?([a-z_-]+)"?: ["\[]', table)) == set(known)

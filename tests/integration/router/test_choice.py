"""A configuration chooses instances, and says why."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from epd_portable.config.load import parse_topology
from epd_portable.errors import ConfigError
from epd_portable.media.limits import PIXELS_PER_BYTE
from epd_portable.placement.profiles.catalogue import GROUP
from epd_portable.router.server import Router
from epd_portable.router.settings import RouterSettings
from epd_portable.wire.messages import LoadReport
from epd_portable.wire.params import EncodeParams, read_params
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    DEADLINE_S,
    ControlEnd,
    Received,
    answer,
    once,
    streamed,
    until,
)
from tests.integration.router.test_access import KEY, bearer, keys_file
from tests.integration.router.test_prefill import compute
from tests.integration.router.test_requests import TEXT, image
from tests.keyring import secret_file

PAGE = Path(__file__).parents[3] / "docs/choice.md"
ON_THE_PAGE = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def on_the_page(language: str, index: int = 0) -> str:
    return [text for kind, text in ON_THE_PAGE if kind == language][index]


def choice_on_the_page(index: int) -> dict[str, Any]:
    topology = parse_topology(on_the_page("yaml", index), "cpu")
    assert topology.router.choice is not None
    return topology.router.choice.model_dump()


AFFINITY = choice_on_the_page(0)


SMALL_BYTES = 64 * 64 // PIXELS_PER_BYTE
"""From so many on a file counts as a picture of 64 × 64 pixels."""


def picture(content: bytes = b"", nbytes: int = SMALL_BYTES) -> dict[str, Any]:
    return image(content.ljust(nbytes, b"."))


RED, BLUE = picture(b"red"), picture(b"blue")


def configured(*plugins: str | dict[str, Any], **profiles: dict[str, float]) -> dict[str, Any]:
    """Return a configuration of plug-ins, by type or whole, and their weights in profiles."""
    return {
        "plugins": [{"type": each} if isinstance(each, str) else each for each in plugins],
        "schedulingProfiles": [
            {
                "name": name,
                "plugins": [
                    {"pluginRef": plugin, "weight": weight} for plugin, weight in weights.items()
                ],
            }
            for name, weights in profiles.items()
        ],
    }


async def explained(t: Topology, path: str, **body: Any) -> list[dict[str, Any]]:
    """Ask with a key, and return the reasons of what was chosen."""
    wanted = {**bearer(KEY), "x-epd-explain": "1"}
    response = await t.client.post(path, json=body, headers=wanted)
    assert response.status_code == 200
    found = json.loads(response.headers["x-epd-explain"])
    assert isinstance(found, list)
    return found


def asked(t: Topology) -> list[int]:
    return [len(pd.received) for pd in t.pds]


async def test_a_repeated_picture_meets_the_encoder_that_has_it(build: Build) -> None:
    t = await build(encoders=3, pds=2, choice=AFFINITY)
    for _ in range(6):
        for part in (RED, BLUE, TEXT):
            assert (await t.chat(part, TEXT)).status_code == 200
    jobs = [
        {read_params(r.params, EncodeParams).transfers[0].item_uuid for r in encoder.received}
        for encoder in t.encoders
    ]
    assert sum(map(len, jobs)) == 2
    assert sum(len(encoder.received) for encoder in t.encoders) == 12


async def test_small_pictures_stay_where_they_are_needed(build: Build) -> None:
    t = await build(choice=AFFINITY)
    assert (await t.chat(picture(nbytes=SMALL_BYTES - 3), RED, TEXT)).status_code == 200
    (job,) = t.encoders[0].received
    part = job.body["messages"][0]["content"][0]
    assert part["image_url"] == RED["image_url"]
    assert await t.metric('epd_router_items_total{outcome="local_first"}') == 1


async def test_nobody_decides_for_instances_that_cannot_encode(build: Build) -> None:
    t = await build(choice=AFFINITY, local_encode=False)
    assert (await t.chat(picture(nbytes=8), TEXT)).status_code == 200
    assert len(t.encoders[0].received) == 1


async def test_who_holds_a_key_is_told_why(build: Build, tmp_path: Path) -> None:
    t = await build(pds=2, choice=AFFINITY, api_keys_file=keys_file(tmp_path, KEY))
    wanted = {**bearer(KEY), "x-epd-explain": "1"}
    response = await t.chat(TEXT, RED, headers=wanted)
    # With Envoy in front, who comes next is chosen, too.
    decode, encode, *_ = json.loads(response.headers["x-epd-explain"])
    (winner,) = (pd.name for pd in t.pds if pd.received)
    assert (decode["stage"], decode["winner"]) == ("decode", winner)
    assert decode["filters"] == {"there": 2, "decode-filter": 2}
    assert decode["scores"][winner]["active-request-scorer"] == 1
    assert (encode["stage"], encode["winner"]) == ("encode", "encode-0")
    # The instances hear nothing of it, and nobody who did not ask.
    assert all("x-epd-explain" not in r.headers for pd in t.pds for r in pd.received)
    response = await t.chat(TEXT, RED, headers=bearer(KEY))
    assert "x-epd-explain" not in response.headers
    response = await t.chat(TEXT, RED, headers={"x-epd-explain": "1"})
    assert response.status_code == 401 and "x-epd-explain" not in response.headers
    # Why there is nobody is told, too.
    for pd in t.pds:
        await pd.serving.stop()
    await t.until_health(lambda states: not any(states[pd.name]["healthy"] for pd in t.pds))
    response = await t.chat(TEXT, RED, headers=wanted)
    assert response.status_code == 503 and "x-epd-explain" in response.headers


def settings(choice: object) -> RouterSettings:
    given = {"port": 0, "model": "demo", "instances": [], "choice": choice}
    return RouterSettings.model_validate({**given, "secret_file": secret_file()})


SPLIT = configured(
    *("prefix-cache-scorer", "queue-scorer"),
    {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 100}},
    {
        "type": "disagg-profile-handler",
        "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}},
    },
    prefill={"prefix-cache-scorer": 4},
    decode={"queue-scorer": 1},
)


async def test_long_prompts_are_computed_apart_where_their_beginning_is(
    build: Build, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, KEY)
    pds = ("prefill", "prefill", "decode")
    t = await build(pds=pds, choice=SPLIT, api_keys_file=keys)
    for pd in t.pds[:2]:
        pd.behaviour = compute

    async def ask(text: str) -> list[dict[str, Any]]:
        return await explained(t, "/v1/completions", prompt=text)

    _, stays = await ask("short")
    assert (stays["stage"], stays["winner"]) == ("prefill", "pd-2")
    assert stays["reason"] == "prefix-based-pd-decider decides so"
    assert asked(t) == [0, 0, 1]
    one, other = "once upon a time " * 100, "the end " * 200
    for turn in range(1, 5):
        decode, prefill = await ask(one + other * turn)
        assert (decode["winner"], prefill["winner"]) == ("pd-2", prefill["winner"])
    assert sorted(asked(t)) == [0, 4, 5]
    # What the decode instance has by now, it need not be told again.
    decode, stays = await ask(one + other * 4)
    assert stays["winner"] == "pd-2"
    assert await t.metric('epd_router_prefills_total{where="local_first"}') == 2
    assert await t.metric('epd_router_prefills_total{where="disaggregated"}') == 4


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the plug-in that the page shows, as an installer leaves it."""
    site = tmp_path / "site"
    info = site / "zones-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "zones.py").write_text(on_the_page("python"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zones\nVersion: 1.0\n")
    points = tomllib.loads(on_the_page("toml"))["project"]["entry-points"]
    assert list(points) == [GROUP]
    lines = [f"{name} = {target}" for name, target in points[GROUP].items()]
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "zones", raising=False)
    return site


async def test_prompts_count_where_they_are_not_cached_until_the_answer_begins(
    build: Build, tmp_path: Path
) -> None:
    limit = {"queueThresholdTokens": 1000}
    scorer = {"type": "token-load-scorer", "parameters": limit}
    choice = configured(scorer, decode={"token-load-scorer": 1})
    goes_on, ends = asyncio.Event(), asyncio.Event()
    begins = streamed(b"data: {}\n\n", ends)

    async def waits(received: Received) -> Response:
        streams = received.body.get("stream")
        return await (once(goes_on, begins) if streams else answer)(received)

    t = await build(
        encoders=0, behaviour=waits, choice=choice, api_keys_file=keys_file(tmp_path, KEY)
    )
    long = {"type": "text", "text": "x" * 2000}
    short = [{"role": "user", "content": "short"}]

    async def load() -> int:
        """Return the tokens in flight, and those of the short request."""
        [choice] = await explained(t, "/v1/chat/completions", messages=short)
        return round(1000 * (1 - choice["scores"]["pd-0"]["total"]))

    new = await load()
    own = await load()
    assert 0 == own < new < 20
    async with asyncio.TaskGroup() as group:
        first = group.create_task(t.chat(long, stream=True, headers=bearer(KEY)))
        await t.pd.until(lambda pd: len(pd.received) == 3)
        assert 500 <= await load() < 520
        # The same prompt again is one that the instance has.
        second = group.create_task(t.chat(long, stream=True, headers=bearer(KEY)))
        await t.pd.until(lambda pd: len(pd.received) == 5)
        assert 500 <= await load() < 520
        goes_on.set()
        async with asyncio.timeout(DEADLINE_S):
            while await load():
                await asyncio.sleep(0.01)
        assert not first.done() and not second.done()
        ends.set()


async def test_a_header_names_the_profile_where_the_configuration_lets_it(
    build: Build, tmp_path: Path
) -> None:
    choice = configured(
        "header-profile-handler",
        {"type": "by-label", "name": "only-other", "parameters": {"label": "other"}},
        decode={},
        nobody={"only-other": 1},
    )
    t = await build(encoders=0, choice=choice)
    for given, status in (("", 200), ("decode", 200), ("nobody", 503), ("unknown", 503)):
        headers = {"EPP-Profile": given} if given else {}
        assert (await t.chat(TEXT, headers=headers)).status_code == status


async def test_a_users_plugin_chooses(build: Build, installed: Path) -> None:
    t = await build(pds=3, choice=choice_on_the_page(1), in_zones=["west", "east", "west"])
    for _ in range(5):
        assert (await t.chat(TEXT)).status_code == 200
    assert asked(t) == [0, 5, 0]


async def test_a_users_plugin_that_cannot_be_made_is_said_so(installed: Path) -> None:
    choice = choice_on_the_page(1)
    choice["plugins"][0]["parameters"] = {}
    with pytest.raises(
        ConfigError, match=r"'zone-scorer' \(zones:ZoneScorer\).*KeyError\('zone'\)"
    ):
        Router(settings(choice))
    (installed / "zones.py").write_text("def ZoneScorer(name, parameters):\n    return 3\n")
    sys.modules.pop("zones")
    with pytest.raises(ConfigError, match="is a int with none of the methods keep, score"):
        Router(settings(choice))
    (installed / "zones-1.0.dist-info" / "entry_points.txt").write_text("")
    with pytest.raises(ConfigError, match="'zone-scorer' is not known"):
        Router(settings(choice))


async def test_a_decider_that_wants_longer_than_there_is_is_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = configured("multimodal-epd-decider", decode={})
    for wanted_ms, said in ((2_000, False), (20_000, True)):
        choice["plugins"][0]["parameters"] = {"encoderTimeout": wanted_ms}
        router = Router(settings(choice))
        await router.close()
        assert router.settings.encode_job_s == min(wanted_ms / 1000, 15)
        assert ("of encoderTimeout, 20 s, an encode job gets 15 s" in caplog.text) is said


QUEUES = configured(
    *("queue-scorer", "encode-pixels-scorer", "kv-cache-utilization-scorer"),
    decode={"queue-scorer": 2, "kv-cache-utilization-scorer": 1},
    encode={"encode-pixels-scorer": 1},
)


async def test_engines_that_are_busy_for_others_get_less(build: Build, tmp_path: Path) -> None:
    t = await build(encoders=2, pds=2, choice=QUEUES, api_keys_file=keys_file(tmp_path, KEY))
    busy, idle = (
        LoadReport(waiting=5, running=8, kv_used=0.5),
        LoadReport(waiting=0, running=1, kv_used=0.1),
    )
    t.encoders[0].load = LoadReport(items=1, pixels=1 << 20)
    t.encoders[1].load = LoadReport(items=3, pixels=1 << 10)
    everybody = t.router.router.instances.all

    async def tell(control: ControlEnd, load: LoadReport) -> None:
        while True:
            await control.tell(load)

    telling = [
        asyncio.create_task(tell(control, load))
        for control, load in zip(t.controls, (busy, idle), strict=True)
    ]
    try:
        await until(lambda: all(each.reported for each in everybody))
        messages = [{"role": "user", "content": [RED, TEXT]}]
        decode, encode = await explained(t, "/v1/chat/completions", messages=messages)
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
    assert decode["winner"] == "pd-1"
    assert decode["scores"]["pd-0"]["kv-cache-utilization-scorer"] == 0.5
    assert decode["scores"]["pd-1"]["queue-scorer"] == 2
    assert encode["winner"] == "encode-1"

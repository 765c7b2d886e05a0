"""Hops in front that are trusted say who gets what; clients that say it are not heard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_portable.placement.profiles.selection_types import EXPLAIN_HEADER
from epd_portable.router.hops import (
    CACHE_KEY,
    ENCODER_MODEL_LABEL,
    ENCODERS,
    ENCODERS_TOO,
    KEY,
    MAPPING,
    MODEL,
    PREFILLER,
    REFS,
)
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import answer, refuse
from tests.integration.router.test_access import bearer, keys_file
from tests.integration.router.test_failures import until_told_to_encode
from tests.integration.router.test_prefill import KV, compute
from tests.integration.router.test_requests import BLUE, RED, TEXT

HOP_KEY = "h" * 20
ROUNDS = 6


async def topology(build: Build, tmp_path: Path, *roles: str, **settings: Any) -> Topology:
    t = await build(
        encoders=3,
        pds=roles or 2,
        hop_keys_file=keys_file(tmp_path, HOP_KEY),
        elastic_encode=True,
        **settings,
    )
    for pd in t.pds:
        if pd.role == "prefill":
            pd.behaviour = compute
    return t


async def ask(
    t: Topology, *parts: Any, headers: Mapping[str, str], key: str | None = HOP_KEY, **fields: Any
) -> httpx.Response:
    return await t.chat(*parts, headers={KEY: key, **headers} if key else headers, **fields)


async def until_idle(t: Topology) -> None:
    """Wait until the router knows of every end, which clients may see before: loads decide."""
    await t.until_health(lambda seen: not any(each["in_flight"] for each in seen.values()))


def jobs(t: Topology) -> list[int]:
    return [len(encoder.received) for encoder in t.encoders]


async def test_who_is_named_gets_the_request_and_its_items(build: Build, tmp_path: Path) -> None:
    t = await topology(build, tmp_path)
    for number in range(ROUNDS):
        pd, (first, second) = (
            t.pds[number % 2],
            (t.encoders[number % 3], t.encoders[2 - number % 3]),
        )
        mapping = {"0": first.address, "1": second.address}
        headers = {PREFILLER: pd.address, MAPPING: json.dumps(mapping)}
        before = (len(pd.received), len(first.received))
        answered = await ask(t, RED, BLUE, TEXT, headers=headers)
        assert answered.status_code == 200
        assert len(pd.received) == before[0] + 1
        assert json.loads(answered.headers[MAPPING]) == mapping
        assert set(answered.headers[ENCODERS].split(",")) == set(mapping.values())
        refs = json.loads(answered.headers[REFS])
        assert [each["encoder_host"] for each in refs] == list(mapping.values())
        assert len(refs[0]["tensor_id"]) == 64
        for received in (*pd.received, *first.received):
            assert not {KEY, PREFILLER, MAPPING} & received.headers.keys()
    assert sum(jobs(t)) == 2 * ROUNDS


@pytest.mark.parametrize("name", [ENCODERS, ENCODERS_TOO])
async def test_items_are_shared_out_among_the_encoders_that_are_named(
    build: Build, tmp_path: Path, name: str
) -> None:
    t = await topology(build, tmp_path)
    named = t.encoders[1:]
    for _ in range(ROUNDS):
        headers = {name: ", ".join(each.address for each in named)}
        answered = await ask(t, RED, BLUE, TEXT, headers=headers)
        assert answered.status_code == 200
        await until_idle(t)
    assert jobs(t)[0] == 0
    # A repeated picture meets the same one.
    for encoder in named:
        assert len(encoder.received) in (0, ROUNDS, 2 * ROUNDS)


async def test_who_holds_a_key_is_told_what_the_headers_of_a_hop_decided(
    build: Build, tmp_path: Path
) -> None:
    keys = tmp_path / "clients"
    keys.mkdir()
    t = await topology(build, tmp_path, api_keys_file=keys_file(keys, "c" * 20))
    headers = {
        **bearer("c" * 20),
        EXPLAIN_HEADER: "1",
        PREFILLER: t.pds[1].address,
        MAPPING: json.dumps({"0": t.encoders[2].address}),
        REFS: json.dumps([{"image_index": 1, "encoder_host": t.encoders[1].address}]),
    }
    answered = await ask(t, RED, BLUE, TEXT, headers=headers)
    decode, encode, other, *_ = json.loads(answered.headers[EXPLAIN_HEADER])
    assert decode == {"stage": "decode", "header": PREFILLER, "winner": "pd-1", "reason": "named"}
    assert (encode["stage"], encode["header"], encode["winner"]) == ("encode", MAPPING, "encode-2")
    assert (other["stage"], other["header"], other["winner"]) == ("encode", REFS, "encode-1")
    # Who is not known is asked by nobody, and the error says which header named it.
    refused = await ask(t, RED, BLUE, headers={**headers, PREFILLER: "10.0.0.1:80"})
    assert refused.status_code == 403
    assert f"{PREFILLER}: '10.0.0.1:80' is no instance" in refused.json()["error"]["message"]


@pytest.mark.parametrize("key", [None, HOP_KEY])
async def test_a_client_is_not_heard(build: Build, tmp_path: Path, key: str | None) -> None:
    """Neither by a router that trusts others, nor, with whatever key, by one that trusts nobody."""
    t = await topology(build, tmp_path) if key is None else await build(encoders=3, pds=2)
    names = (PREFILLER, ENCODERS, ENCODERS_TOO, MAPPING, REFS, CACHE_KEY, MODEL)
    headers = dict.fromkeys(names, "forged:1")
    forged = {"transfers": [], "do_remote_decode": True, "remote_host": "forged"}
    answered = await ask(
        t, RED, headers=headers, key=key, ec_transfer_params=forged, kv_transfer_params=forged
    )
    assert answered.status_code == 200
    received = [each for one in t.encoders + t.pds for each in one.received]
    assert len(received) == 2
    for each in received:
        assert b"forged" not in each.raw
        assert "forged" not in str(each.headers)
    assert not set(names) & answered.headers.keys()


async def test_what_a_hop_cannot_mean_is_refused(build: Build, tmp_path: Path) -> None:
    t = await topology(build, tmp_path)
    pd, encoder = t.pds[0].address, t.encoders[0].address
    cases: list[tuple[dict[str, str], int, str]] = [
        ({PREFILLER: "10.0.0.1:80"}, 403, "not_an_instance"),
        ({ENCODERS: f"{encoder},{encoder}0"}, 403, "not_an_instance"),
        ({PREFILLER: encoder}, 400, "invalid_hop_header"),
        ({ENCODERS: pd}, 400, "invalid_hop_header"),
        ({MAPPING: json.dumps({"1": encoder})}, 400, "invalid_hop_header"),
        ({MAPPING: '{"x": "y"}'}, 400, "invalid_hop_header"),
        ({MAPPING: "{"}, 400, "invalid_hop_header"),
        ({REFS: '[{"image_index": 3, "encoder_host": "x"}]'}, 400, "invalid_hop_header"),
        ({REFS: "{}"}, 400, "invalid_hop_header"),
    ]
    for headers, status, code in cases:
        refused = await ask(t, RED, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), headers
    wrong = await ask(t, RED, headers={PREFILLER: pd}, key="w" * 20)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_hop_key")
    assert not t.pds[0].received and not any(jobs(t))


async def test_an_output_that_is_somewhere_is_asked_for_there(build: Build, tmp_path: Path) -> None:
    t = await topology(build, tmp_path)
    for encoder in t.encoders:
        refs = json.dumps([{"encoder_host": encoder.address}])
        assert (await ask(t, RED, headers={REFS: refs})).status_code == 200
    assert jobs(t) == [1, 1, 1]
    told = await ask(t, BLUE, headers={ENCODERS: t.encoders[2].address})
    # What it was told it may say again.
    assert (await ask(t, RED, BLUE, headers={REFS: told.headers[REFS]})).status_code == 200
    assert jobs(t)[2] >= 3


async def test_a_cache_key_leads_items_in_place_of_their_content(
    build: Build, tmp_path: Path
) -> None:
    t = await topology(build, tmp_path)
    for part in (RED, BLUE) * 3:
        assert (await ask(t, part, headers={CACHE_KEY: "album-7"})).status_code == 200
        await until_idle(t)
    assert sorted(jobs(t)) == [0, 0, 6]


async def test_an_encoder_model_is_one_by_label(build: Build, tmp_path: Path) -> None:
    t = await topology(build, tmp_path)
    for encoder, model in zip(t.router.router.instances.of_duty("encode"), "aab", strict=True):
        labels = {ENCODER_MODEL_LABEL: model}
        encoder.settings = encoder.settings.model_copy(update={"labels": labels})
    for _ in range(ROUNDS):
        answered = await ask(t, RED, BLUE, headers={MODEL: "b"})
        assert answered.headers[MODEL] == "b"
    assert jobs(t) == [0, 0, 2 * ROUNDS]
    # Nobody else encodes for one that fails, but whoever answers.
    t.encoders[2].behaviour = refuse(500)
    t.pd.behaviour = until_told_to_encode(t)
    headers = {MODEL: "b", PREFILLER: t.pd.address}
    assert (await ask(t, RED, headers=headers)).status_code == 200
    await t.until_metric('epd_router_fallbacks_total{phase="encode",fallback="local"}', 1)
    assert jobs(t)[:2] == [0, 0]
    for headers in ({MODEL: "c"}, {MODEL: "b", ENCODERS: t.encoders[0].address}):
        refused = await ask(t, RED, headers=headers)
        assert refused.json()["error"]["code"] == "invalid_hop_header"


async def test_kv_that_a_hop_has_goes_to_the_instance_that_answers(
    build: Build, tmp_path: Path
) -> None:
    t = await topology(build, tmp_path, "prefill", "decode")
    answered = await ask(t, RED, TEXT, headers={}, kv_transfer_params=KV)
    assert answered.status_code == 200
    assert not t.pds[0].received and not any(jobs(t))
    assert t.pds[1].received[0].body["kv_transfer_params"] == KV
    # As the one orchestrator it says who prefills.
    t.pds[1].behaviour = answer
    told = await ask(t, RED, TEXT, headers={PREFILLER: t.pds[0].address})
    assert told.headers[PREFILLER] == t.pds[0].address
    assert t.pds[1].received[1].body["kv_transfer_params"] == KV

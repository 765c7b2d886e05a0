"""Who may ask for what, and what those learn who may not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd_portable.config import api_keys as access
from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.secret import INSTANCE_TOKEN_HEADER
from epd_portable.errors import ConfigError
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import says
from tests.integration.router.test_requests import RED, TEXT
from tests.keyring import secret

KEY, OTHER_KEY = "k" * 20, "o" * 20


def keys_file(tmp_path: Path, *keys: str) -> str:
    path = tmp_path / "keys"
    path.write_text("# for tests\n" + "\n".join(keys) + "\n")
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_only_clients_with_a_key_are_served(build: Build, tmp_path: Path) -> None:
    t = await build(api_keys_file=keys_file(tmp_path, KEY, OTHER_KEY))
    for headers in ({}, bearer("wrong"), bearer(KEY + "x"), {"x-api-key": "wrong"}):
        refused = await t.chat(TEXT, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert not t.pd.received
    for headers in (bearer(KEY), bearer(OTHER_KEY), {"x-api-key": KEY}):
        assert (await t.chat(TEXT, headers=headers)).status_code == 200
    # The key is the router's and concerns no instance.
    assert all("authorization" not in received.headers for received in t.pd.received)
    assert (await t.client.get("/v1/models")).status_code == 401
    assert (await t.client.get("/health")).status_code == 200


async def test_keys_change_while_the_router_runs(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOOK_EVERY_S", 0.05)
    t = await build(api_keys_file=keys_file(tmp_path, KEY))
    assert (await t.client.get("/v1/models", headers=bearer(OTHER_KEY))).status_code == 401
    keys_file(tmp_path, OTHER_KEY)
    await asyncio.sleep(0.1)
    assert (await t.client.get("/v1/models", headers=bearer(OTHER_KEY))).status_code == 200
    assert (await t.client.get("/v1/models", headers=bearer(KEY))).status_code == 401
    # A file that is no good changes nothing.
    Path(tmp_path, "keys").write_text("")
    await asyncio.sleep(0.1)
    assert (await t.client.get("/v1/models", headers=bearer(OTHER_KEY))).status_code == 200


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("short", 0o600, "at least 16 characters"),
        ("", 0o600, "holds 0 keys"),
        (KEY, 0o644, "chmod 600"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_no_good_is_refused(
    tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        ApiKeys(str(path))


async def test_health_tells_names_to_holders_of_the_secret_only(build: Build) -> None:
    t = await build()
    told = await t.client.get("/health")
    assert told.json() == {
        "status": "ok",
        "counts": {"up": 2, "joining": 0, "down": 0, "draining": 0},
    }
    assert set((await t.health()).json()["instances"]) == {"encode-0", "pd-0"}
    forged = await t.client.get("/health", headers={"authorization": "EPD-HMAC time=1"})
    assert "instances" not in forged.json()


async def test_instances_are_shown_the_token_and_no_other_headers(build: Build) -> None:
    t = await build()
    headers = {
        "x-session-id": "s",
        "x-vllm-priority": "3",
        "endpoint-load-metrics-format": "text",
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        "x-request-id": "mine",
        "x-forged": "x",
        "x-forwarded-proto": "https",
        INSTANCE_TOKEN_HEADER: "forged",
        **bearer("of-the-engine"),
    }
    await t.chat(TEXT, headers=headers)
    seen = t.pd.received[0].headers
    expected = {**headers, INSTANCE_TOKEN_HEADER: secret().instance_token()}
    del expected["x-forged"], expected["x-forwarded-proto"]
    assert {name: seen.get(name) for name in expected} == expected
    assert not {"x-forged", "x-forwarded-proto"} & seen.keys()


async def test_what_became_of_items_is_told_to_those_who_may_know(build: Build) -> None:
    item = {"mm_hash": "a" * 64, "source": "transfer", "path": "shm", "encoder": "encode-0"}
    outcome = {"instance": "pd-0", "items": [item]}
    generate = says({"choices": [], "ec_transfer_params": outcome})
    t = await build(behaviour=generate, item_outcomes=False)
    assert (await t.chat(RED)).json() == {"choices": []}
    line = 'epd_router_item_sources_total{path="shm",source="transfer"}'
    assert await t.metric(line) == 1
    t = await build(behaviour=generate, item_outcomes=True)
    assert (await t.chat(RED)).json()["ec_transfer_params"] == outcome


async def test_pages_of_other_origins_ask_where_that_is_allowed(build: Build) -> None:
    t = await build(cors_origins=["https://app.example"])
    asks = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = await t.client.options("/v1/chat/completions", headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    # A cache must not give one page what another got.
    assert allowed.headers["vary"].startswith("Origin")
    for refused in ({"origin": "https://b"}, {"access-control-request-method": "GET, POST"}):
        asked = await t.client.options("/v1/chat/completions", headers={**asks, **refused})
        assert asked.status_code == 400
    # What is no question of a browser is a request.
    assert (
        await t.client.options("/v1/models", headers={"origin": "https://b"})
    ).status_code == 405
    assert (await t.client.post("/v1/completions", json={"prompt": ""}, headers=asks)).is_success
    served = await t.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert served.headers["access-control-allow-origin"] == "https://app.example"
    stranger = await t.client.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in stranger.headers
    plain = await build()
    refused = await plain.client.options("/v1/chat/completions", headers=asks)
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers


FORMS: list[dict[str, str]] = [
    {"content-type": "text/plain"},
    {"content-type": "text/plain; x=application/json"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {},
]
"""What browsers send to other origins without asking for permission."""
ASKED = b'{"messages": [{"role": "user", "content": "hi"}]}'


async def test_what_a_page_may_send_unasked_reaches_no_instance(build: Build) -> None:
    t = await build(encoders=0)
    for path in ("/v1/chat/completions", "/tokenize"):
        for headers in FORMS:
            refused = await t.client.post(path, content=ASKED, headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (415, "unsupported_media_type")
            assert "content-type: application/json" in error["message"]
    assert not t.pd.received
    for kind in ("application/json; charset=utf-8", "Application/JSON ;x=y"):
        served = await t.client.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}
        )
        assert served.status_code == 200


async def test_forms_are_taken_from_who_may_send_them(build: Build) -> None:
    t = await build(encoders=0, cors_origins=["https://app.example"])
    sound = {"file": ("a.wav", b"RIFF")}
    for origin, status in (
        (None, 200),
        ("https://app.example", 200),
        ("https://other.example", 403),
        ("null", 403),
    ):
        headers = {} if origin is None else {"origin": origin}
        response = await t.client.post("/v1/audio/transcriptions", files=sound, headers=headers)
        assert response.status_code == status
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "router.cors_origins" in response.json()["error"]["message"]
    assert len(t.pd.received) == 2
    assert all(
        each.headers["content-type"].startswith("multipart/form-data; boundary=")
        for each in t.pd.received
    )


def test_keys_are_compared_by_digest(tmp_path: Path) -> None:
    assert KEY not in repr(vars(ApiKeys(keys_file(tmp_path, KEY))))

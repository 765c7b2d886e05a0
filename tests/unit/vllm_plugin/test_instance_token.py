"""The token that an instance's server asks for, by messages of ASGI."""

from __future__ import annotations

import hmac
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_portable.config.secret import INSTANCE_TOKEN_HEADER, Secret, make_secret_file
from epd_portable.errors import ConfigError
from epd_portable.vllm_plugin.instance_token import TokenMiddleware

SECRET = Secret("s" * 40)
NAME = INSTANCE_TOKEN_HEADER.encode()
TOKEN = SECRET.instance_token().encode()
KEY = (b"authorization", b"Bearer a-key-of-vllm")


class Application:
    """What is behind: answers 200 and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "lifespan.startup.complete"})


async def call(scope: dict[str, Any], *, secret: Secret | None = SECRET) -> tuple[Application, Any]:
    behind = Application()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        assert scope["type"] != "http", "nobody waits for the body of who may not come in"
        return {"type": "websocket.connect" if scope["type"] == "websocket" else "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await TokenMiddleware(behind, secret=secret)(scope, receive, send)
    return behind, sent


def http(
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    root_path: str = "",
) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": root_path,
        "headers": [KEY, *headers],
    }


@pytest.mark.parametrize("name", [NAME, NAME.upper()])
async def test_who_shows_the_token_comes_in_and_it_is_taken_off(name: bytes) -> None:
    scope = http(headers=((name, TOKEN),))
    behind, sent = await call(scope)
    assert sent[0]["status"] == 200
    (seen,) = behind.seen
    assert seen["headers"] == [KEY], "vLLM's own key stays"
    assert scope["headers"] == [KEY, (name, TOKEN)], "the server's own scope is left alone"


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((NAME, b""),),
        ((NAME, TOKEN[:-1]),),
        ((NAME, TOKEN + b" "),),
        ((NAME, TOKEN.upper()),),
        ((NAME, SECRET.derive("another purpose").hex().encode()),),
        ((NAME, "ü".encode()),),
        ((NAME, TOKEN), (NAME, b"another")),
        ((NAME, TOKEN), (NAME, TOKEN)),
        ((b"authorization", b"Bearer " + TOKEN),),
    ],
)
async def test_anybody_else_hears_401_and_is_not_waited_for(
    headers: tuple[tuple[bytes, bytes], ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    behind, (start, body) = await call(http(headers=headers))
    assert not behind.seen
    assert start["status"] == 401
    assert (b"connection", b"close") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert error["code"] == "unauthorized"
    assert "ask the router" in error["message"] and INSTANCE_TOKEN_HEADER in error["message"]
    assert TOKEN.decode() not in error["message"] + caplog.text


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics"])
async def test_health_and_metrics_are_for_everybody(path: str) -> None:
    for scope in (http(path, "GET"), http(f"/at{path}", "GET", root_path="/at")):
        behind, sent = await call(scope)
        assert sent[0]["status"] == 200 and len(behind.seen) == 1
    _, sent = await call(http(path, "GET", ((NAME, b"wrong"),)))
    assert sent[0]["status"] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/health"),
        ("POST", "/ping"),
        ("HEAD", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/metricsx"),
        ("GET", "//health"),
        ("GET", "/v1/health"),
        ("GET", "/HEALTH"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("GET", "/docs"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/tokenize"),
        ("GET", ""),
    ],
)
async def test_everything_else_is_not(method: str, path: str) -> None:
    behind, sent = await call(http(path, method))
    assert sent[0]["status"] == 401 and not behind.seen


async def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    await call(http(headers=((NAME, b"x"), (NAME, TOKEN))))
    assert compared == [b"x", TOKEN]


@pytest.mark.parametrize(("headers", "kind"), [([], "close"), ([(NAME, TOKEN)], "accept")])
async def test_a_websocket_needs_the_token_too(headers: list[Any], kind: str) -> None:
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
    behind, sent = await call(scope)
    assert sent[0]["type"] == f"websocket.{kind}"
    assert len(behind.seen) == (kind == "accept")
    if kind == "close":
        assert sent == [{"type": "websocket.close", "code": 1008}]


def application(settings: object) -> Any:
    return SimpleNamespace(state=SimpleNamespace(vllm_config=settings))


def told(**settings: Any) -> Any:
    instance = {"instance": "encode-0", "platform": "cpu", **settings}
    return application(
        SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector_extra_config=instance))
    )


async def test_the_token_is_that_of_the_instances_own_secret(tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    make_secret_file(path)
    app = told(secret_file=path)
    behind, sent = await call({"type": "lifespan", "app": app}, secret=None)
    assert sent == [{"type": "lifespan.startup.complete"}] and len(behind.seen) == 1
    token = Secret.read(path).instance_token().encode()
    for shown, status in ((token, 200), (TOKEN, 401)):
        _, sent = await call({**http(headers=((NAME, shown),)), "app": app}, secret=None)
        assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (application(None), "no --ec-transfer-config"),
        (application(SimpleNamespace(ec_transfer_config=None)), "no --ec-transfer-config"),
        (SimpleNamespace(state=SimpleNamespace()), "no --ec-transfer-config"),
        (told(), "there is no secret_file"),
        (told(secret_file="/nowhere/secret"), "cannot be read"),
        (told(secret="x"), "ec_connector_extra_config: secret"),
    ],
)
async def test_a_server_without_a_secret_does_not_start(app: Any, words: str) -> None:
    behind, (failed,) = await call({"type": "lifespan", "app": app}, secret=None)
    assert failed["type"] == "lifespan.startup.failed" and words in failed["message"]
    assert not behind.seen
    with pytest.raises(ConfigError, match=words):
        await call({**http(headers=((NAME, TOKEN),)), "app": app}, secret=None)

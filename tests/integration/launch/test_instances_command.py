"""``epd-launch instances`` against servers that do not list instances."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.cli import main
from tests.listening import stop_listening

NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    make_secret_file(str(tmp_path / "secret"))
    return str(tmp_path / "secret")


async def instances(url: str, secret: str) -> Result:
    words = ("instances", "--front", url, "--secret-file", secret)
    return await asyncio.to_thread(CliRunner().invoke, main, words)


async def refused_by_server(body: bytes, secret: str) -> str:
    """Return the output of the command at a server that responds 401 with a body."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result = await instances(url, secret)
    finally:
        await stop_listening(server)
    assert result.exit_code == 1
    assert f"front {url}" in result.output
    return result.output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"message": "the signature is wrong"}, ["the signature is wrong"]),
        ("Unauthorized", ["status 401, and not the response of a front", "Unauthorized"]),
    ],
)
async def test_refusal_is_reported_with_the_reason(
    secret: str, error: object, words: list[str]
) -> None:
    output = await refused_by_server(json.dumps({"error": error}).encode(), secret)
    assert all(each in output for each in words)


async def test_unreachable_server_and_missing_secret_are_reported(secret: str) -> None:
    unreachable = await instances(NO_SERVER, secret)
    assert unreachable.exit_code == 1
    assert f"front {NO_SERVER} cannot be reached" in unreachable.output
    assert (await instances(NO_SERVER, f"{secret}-none")).exit_code == 2

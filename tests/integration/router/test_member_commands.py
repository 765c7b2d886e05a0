"""``epd-launch join``, ``leave`` and ``instances`` against a real router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.cli import main
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import RouterServing, StandIn
from tests.integration.router.test_warm_up import transferring
from tests.listening import stop_listening


async def run(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, words)


async def test_the_commands_let_an_instance_join_and_leave(build: Build, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    assert (await run("secret", secret)).exit_code == 0
    t = await build(warm_up=True, behaviour=transferring(), secret_file=secret, registration=True)
    newcomer = StandIn("encode-7", "encode")
    await newcomer.serving.start()
    where = ("--router", t.router.url + "/v1", "--secret-file", secret)

    url = newcomer.serving.url
    more = ("--weight", "2", "--label", "zone=east", "--label", "a=b=c")
    joined = await run("join", "encode-7", *where, "--role", "encode", "--url", url, *more)
    assert (joined.exit_code, joined.stdout) == (0, f"encode-7 has joined {where[1]}\n")
    listed = (await run("instances", *where)).output.splitlines()
    assert [line.split()[:3] for line in listed] == [
        ["encode-0", "encode", "up"],
        ["pd-0", "prefill-decode", "up"],
        ["encode-7", "encode", "up"],
    ]
    assert isinstance(t.router, RouterServing)
    known = t.router.router.instances.get("encode-7")
    assert known is not None
    assert (known.weight, known.settings.labels) == (2.0, {"zone": "east", "a": "b=c"})
    wrong = await run("join", "e", *where, "--role", "encode", "--url", url, "--label", "east")
    assert wrong.exit_code == 2 and "write it as key=value" in wrong.output
    left = await run("leave", "encode-7", *where)
    assert (left.exit_code, left.stdout) == (0, f"encode-7 has left {where[1]}\n")
    again = await run("leave", "encode-7", *where)
    assert again.exit_code == 1
    assert "there is no instance 'encode-7'" in again.output
    await newcomer.serving.stop()


@pytest.mark.parametrize(
    ("words", "instead"), [(("join", "e", "--keep"), "router.join"), (("page",), "`instances`")]
)
async def test_what_is_gone_is_answered_with_what_is_used_instead(
    words: tuple[str, ...], instead: str
) -> None:
    result = await run(*words, "--router", "http://127.0.0.1:9", "--secret-file", "none")
    assert result.exit_code == 2
    assert instead in result.output


async def test_one_that_is_not_there_is_still_down_at_the_limit(build: Build) -> None:
    t = await build(registration=True)
    where = ("--router", t.router.url, "--secret-file", t.settings.secret_file)
    instance = ("--role", "encode", "--url", "http://127.0.0.1:9")
    result = await run("join", "e", *where, *instance, "--timeout", "0.1")
    assert result.exit_code == 1
    assert "after 0.1 s: down: health probe" in result.output


async def test_a_wrong_secret_and_a_wrong_address_say_so(build: Build, tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        make_secret_file(str(tmp_path / name))
    t = await build(secret_file=str(tmp_path / "right"), registration=True)
    wrong = await run("instances", "--router", t.router.url, "--secret-file", f"{tmp_path}/wrong")
    assert wrong.exit_code == 1
    assert "the signature is wrong" in wrong.output
    nobody = "http://127.0.0.1:9"
    gone = await run("instances", "--router", nobody, "--secret-file", f"{tmp_path}/right")
    assert gone.exit_code == 1
    assert f"router {nobody} cannot be reached" in gone.output
    missing = await run("instances", "--router", nobody, "--secret-file", f"{tmp_path}/none")
    assert missing.exit_code == 2

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        said = b'{"error":"Unauthorized"}'
        writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
        writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    other = await run("instances", "--router", url, "--secret-file", f"{tmp_path}/right")
    await stop_listening(server)
    assert other.exit_code == 1
    assert f"router {url} answered 401, and not as a router does" in other.output
    assert "Unauthorized" in other.output

"""``epd-launch join``, ``leave``, ``instances`` and ``page`` against a real router."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.cli import main
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import DEADLINE_S, RouterServing, StandIn
from tests.integration.router.test_introduction import transferring


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
    assert (joined.exit_code, joined.output) == (0, f"encode-7 has joined {where[1]}\n")
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
    assert (left.exit_code, left.output) == (0, f"encode-7 has left {where[1]}\n")
    again = await run("leave", "encode-7", *where)
    assert again.exit_code == 1
    assert "there is no instance 'encode-7'" in again.output
    await newcomer.serving.stop()


async def test_a_link_to_the_page_holds_a_key_that_shows_it(build: Build, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    assert (await run("secret", secret)).exit_code == 0
    t = await build(secret_file=secret)
    made = await run("page", "--router", f"{t.router.url}/v1", "--secret-file", secret)
    address, _, key = made.output.strip().partition("#key=")
    assert (made.exit_code, address) == (0, f"{t.router.url}/")
    shown = await t.client.get("/status.json", headers={"authorization": f"Bearer {key}"})
    assert len(shown.json()["instances"]) == 2
    refused = await run("page", "--router", t.router.url, "--secret-file", secret, "--hours", "0")
    assert refused.exit_code == 2


@dataclass(frozen=True)
class Kept:
    """``epd-launch join --keep`` for ``encode-7``, in a process of its own."""

    process: Process
    topology: Topology
    where: tuple[str, ...]
    as_json: bool

    async def says(self, words: str, event: str) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        text = line.decode()
        if self.as_json:
            told = json.loads(text)
            assert (told["schema_version"], told["event"]) == (1, event)
            text = told["error"]["message"] if event == "error" else told["text"]
        assert words in text

    async def has_left(self) -> bool:
        health = await self.topology.health()
        return "encode-7" not in health.json()["instances"]


@pytest.fixture(params=[False, True], ids=["text", "json"])
async def kept(request: pytest.FixtureRequest, build: Build, tmp_path: Path) -> AsyncIterator[Kept]:
    secret = str(tmp_path / "secret")
    make_secret_file(secret)
    t = await build(secret_file=secret, registration=True)
    newcomer = StandIn("encode-7", "encode")
    await newcomer.serving.start()
    where = ("--router", t.router.url, "--secret-file", secret)
    words = ("join", "encode-7", *where, "--role", "encode", "--url", newcomer.serving.url)
    command = (sys.executable, "-u", "-m", "epd_portable.launch.cli", *words, "--keep")
    command += ("--json",) if request.param else ()
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    try:
        joined = Kept(process, t, where, request.param)
        await joined.says("encode-7 has joined", "joined")
        yield joined
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await newcomer.serving.stop()


async def test_a_kept_instance_joins_again_after_a_restart_of_the_router(kept: Kept) -> None:
    t = kept.topology
    await t.until_health(lambda seen: "encode-7" in seen)
    await t.router.stop()
    await kept.says("cannot be reached", "away")
    await t.start_router_again()
    await kept.says("encode-7 has joined again", "joined_again")
    await t.until_health(lambda seen: seen["encode-7"]["state"] == "up")
    kept.process.send_signal(signal.SIGTERM)
    await kept.says("encode-7 has left", "left")
    assert await kept.process.wait() == 0
    assert await kept.has_left()


async def test_a_kept_instance_that_is_told_to_leave_stays_away(kept: Kept) -> None:
    await run("leave", "encode-7", *kept.where)
    await kept.says("has let encode-7 go", "error")
    assert await kept.process.wait() == 1
    assert await kept.has_left()


async def test_one_that_is_not_there_is_still_down_at_the_limit(
    build: Build, tmp_path: Path
) -> None:
    secret = str(tmp_path / "secret")
    make_secret_file(secret)
    t = await build(secret_file=secret, registration=True)
    where = ("--router", t.router.url, "--secret-file", secret)
    instance = ("--role", "encode", "--url", "http://127.0.0.1:9")
    result = await run("join", "e", *where, *instance, "--timeout", "0.1")
    assert result.exit_code == 1
    assert "e has registered and is still down after 0.1 s: health probe" in result.output


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

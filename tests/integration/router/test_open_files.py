"""Open files: a router takes as many as it may have, and blames nobody when they are used up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import subprocess
from collections.abc import AsyncIterator

import psutil
import pytest

from epd_portable.router.http import open_files
from epd_portable.router.server import Router
from tests.integration.router.conftest import Build
from tests.integration.router.stand_in import DEADLINE_S, RouterServing, start_process
from tests.integration.router.test_process import SETTINGS
from tests.integration.router.test_requests import RED, TEXT

FEW = 256


@contextlib.asynccontextmanager
async def no_files(router: Router) -> AsyncIterator[None]:
    """Have every file open that this process may have, and no connection to an instance."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        lowest = held.enter_context(socket.socket()).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        try:
            # One that a probe is using rests a moment later.
            while router.upstream._connections:
                for resting in router.upstream._idle.values():
                    for connection in resting:
                        connection.drop()
                await asyncio.sleep(0.01)
                with contextlib.suppress(OSError):
                    while True:
                        held.enter_context(socket.socket())
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("part", [TEXT, RED], ids=["text", "picture"])
async def test_a_router_without_files_says_so_and_takes_no_instance_for_gone(
    build: Build, part: object, caplog: pytest.LogCaptureFixture
) -> None:
    t = await build(probe_interval_s=0.05)
    assert (await t.chat(part)).status_code == 200
    assert isinstance(t.router, RouterServing)
    async with no_files(t.router.router):
        response = await t.chat(part)
        await asyncio.sleep(0.5)
        seen = {each.state for each in t.router.router.instances.all}
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "Too many open files" in message
    assert "ulimit" in message
    assert seen == {"up"}
    said = [each for each in caplog.records if each.name.endswith("upstream")]
    assert len(said) == 1
    assert (await t.chat(part)).status_code == 200


@pytest.mark.parametrize("most", [FEW, 10_000])
def test_a_router_may_have_as_many_files_as_the_system_allows(most: int) -> None:
    hard = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {hard}))\n"
        "import sys; from epd_portable.router.__main__ import main; sys.exit(main())"
    )
    words = ("-c", limited, "--settings", json.dumps(SETTINGS))
    process = start_process(*words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        assert re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        if hard < open_files.ENOUGH:
            assert re.search(rf"{hard} files open.*LimitNOFILE", process.stderr.readline())
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        process.terminate()
    with process.stderr as rest:
        assert "files open" not in rest.read()
    process.wait(DEADLINE_S)

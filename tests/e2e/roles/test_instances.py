"""A router alone, and instances each started by a command of its own, as on many hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from epd_portable.config.secret import make_secret_file
from epd_portable.demo import servers
from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NO_INSTANCES = ("instances.encode.count=0", "instances.prefill_decode.count=0")


class Launched:
    """``epd-launch`` in the foreground."""

    def __init__(self, command: str, *settings: str) -> None:
        options = (word for setting in settings for word in ("--set", setting))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd_portable.launch.cli", *command.split(), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_ready(self) -> None:
        assert self._process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("ready:")):
            lines.append(self._process.stdout.readline())
            assert lines[-1], lines

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=120)
        return self._process.returncode


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[type[Launched]]:
    started: list[Launched] = []

    class Kept(Launched):
        def __init__(self, *words: str) -> None:
            super().__init__(*words)
            started.append(self)

    yield Kept
    for each in reversed(started):
        each.end()


def test_instances_of_their_own_commands_serve_together_and_leave(
    launch: type[Launched], tmp_path: Path
) -> None:
    secret, port = tmp_path / "secret", servers.free_port()
    make_secret_file(str(secret))
    of_all = "--platform cpu --config configs/1e1pd.yaml"
    common = (
        *(f"secret_file={secret}", "front=router"),
        *("router.item_outcomes=true", "router.elastic_encode=false"),
    )
    url = f"http://localhost:{port}"
    router = launch(f"up {of_all} --port {port}", *common, *NO_INSTANCES)
    router.until_ready()
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 503
    encode, pd = (
        launch(f"instance {of_all} --role {role}", *common, f"router.join={url}")
        for role in ("encode", "prefill-decode")
    )
    encode.until_ready()
    pd.until_ready()
    assert ask(url, [picture(1), ASK]).sources == ["transfer"]
    assert encode.end() == 0
    assert ask(url, [picture(2), ASK]).sources == ["local"]
    assert pd.end() == 0
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 503
    assert router.end() == 0

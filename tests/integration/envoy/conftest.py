"""The picker as a process of its own, which starts a real Envoy."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from epd_portable.demo.servers import free_port
from epd_portable.router.settings import RouterSettings
from tests import warm
from tests.integration.router.conftest import Front, build
from tests.integration.router.stand_in import Serving, start_process

__all__ = ["build"]

DEADLINE_S = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.needs_envoy)


class Fronted(Serving):
    """Envoy with the picker behind it."""

    def __init__(self, settings: RouterSettings, folder: Path) -> None:
        self.port = free_port()
        self._settings = settings.model_copy(update={"port": self.port, "envoy": True})
        self._folder = folder
        self._log = folder / "picker.log"
        self.process: warm.Child | None = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        settings = self._folder / "settings.json"
        settings.write_text(self._settings.model_dump_json())
        words = ("--settings", f"@{settings}", "--folder", self._folder, "--threads", "1")
        with self._log.open("w") as log:
            self.process = start_process("-m", "epd_portable.router", *words, stderr=log)
        async with httpx.AsyncClient() as client:
            while True:
                assert self.process.poll() is None, self.log
                try:
                    # 503 is the picker's own answer while no instance is up, too.
                    if "counts" in (await client.get(f"{self.url}/health")).text:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, DEADLINE_S)
        finally:
            process.kill()
        assert process.returncode == 0, self.log
        assert "Traceback" not in self.log, self.log


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return lambda settings: Fronted(settings, tmp_path / "picker")

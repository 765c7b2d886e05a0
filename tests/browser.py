"""A headless Chromium, by its DevTools protocol: the pages of a test in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
STARTS_WITHIN_S = 30.0
DEADLINE_S = 10.0


def executable() -> str | None:
    """Return where the browser is; ``None`` if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run a browser that keeps what it keeps in a folder; yield its address."""
    found = executable()
    assert found is not None
    command = [
        *(found, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}"),
        # It speaks to nobody of its own accord, so what goes out goes out for the page.
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--disable-default-apps", "--disable-gpu", "--disable-dev-shm-usage"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        port = folder / "DevToolsActivePort"
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not (port.exists() and port.read_text().count("\n")):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        yield f"127.0.0.1:{port.read_text().splitlines()[0]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Page:
    """A tab.

    Attributes:
        asked: URLs that were asked for.
        problems: Errors of scripts, what the page's policy has refused, and dialogs.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self.asked: list[str] = []
        self.problems: list[str] = []

    async def read(self) -> None:
        """Take in what the browser tells, until it is gone."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                waiting = self._waiting.pop(told["id"])
                if "error" in told:
                    waiting.set_exception(RuntimeError(told["error"]["message"]))
                else:
                    waiting.set_result(told["result"])
                continue
            match told["method"]:
                case "Network.requestWillBeSent":
                    self.asked.append(told["params"]["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.problems.append(str(told["params"]["exceptionDetails"]))
                case "Log.entryAdded" if told["params"]["entry"]["source"] != "network":
                    self.problems.append(told["params"]["entry"]["text"])
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Page.javascriptDialogOpening":
                    self.problems.append(f"a dialog: {told['params']['message']}")

    async def do(self, method: str, **params: Any) -> Any:
        """Return what the browser answers to a command."""
        number = next(self._number)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], DEADLINE_S)

    async def open(self, url: str) -> None:
        """Go to an address, and wait until all of the page is there."""
        self._loaded.clear()
        told = await self.do("Page.navigate", url=url)
        assert "errorText" not in told, told["errorText"]
        if "loaderId" in told:  # It was more than a place within the page.
            await asyncio.wait_for(self._loaded.wait(), DEADLINE_S)

    async def reload(self) -> None:
        """Load the page again."""
        self._loaded.clear()
        await self.do("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), DEADLINE_S)

    async def value(self, script: str) -> Any:
        """Return what an expression is in the page."""
        told = await self.do(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """Return what an expression is as soon as that is something."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := await self.value(script)):
            if time.monotonic() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(f"{script}: not within {DEADLINE_S:g} s; the page:\n{text}")
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        """Return the text of an element, as soon as it is there."""
        return str(await self.until(f"document.querySelector({selector!r})?.innerText"))

    async def press(self, *keys: str) -> None:
        """Type text, or one of the keys Tab and Enter."""
        codes = {"Tab": 9, "Enter": 13}
        for key in keys:
            if key not in codes:
                await self.do("Input.insertText", text=key)
                continue
            named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            await self.do("Input.dispatchKeyEvent", type="keyDown", **named, **text)
            await self.do("Input.dispatchKeyEvent", type="keyUp", **named)

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, in pixels, and what its user prefers."""
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])


@contextlib.asynccontextmanager
async def tab(address: str) -> AsyncIterator[Page]:
    """Open a tab in a browser that runs."""
    import aiohttp  # Here: all tests import this module, to know whether there is a browser.

    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{address}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Network", "Runtime", "Log"):
                await page.do(f"{domain}.enable")
            await page.look(1280, 900)
            try:
                yield page
            finally:
                async with session.get(f"http://{address}/json/close/{target['id']}"):
                    pass
                reading.cancel()

"""The documentation site in a browser: built from the pages, served from this machine."""

from __future__ import annotations

import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit.commands import run

pytestmark = pytest.mark.needs_chromium

PAGES = {
    "index.html": ("epd-portable", "Reference", "keys.html"),
    "keys.html": ("Keys and variables - epd-portable", "Metrics", "metrics.html"),
    "repository/SECURITY.html": ("Security - epd-portable", "Performance", "performance.html"),
}
"""Page: its title, a link of the navigation, and the page to which the link leads."""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site, built with --strict."""
    folder: Path = tmp_path_factory.mktemp("site")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    built = run(*mkdocs, NO_MKDOCS_2_WARNING="1")
    assert built.returncode == 0, built.stderr
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pages_work_in_a_browser_without_another_host(site: str) -> None:
    from playwright.sync_api import sync_playwright

    requested: list[str] = []
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.on("request", lambda request: requested.append(request.url))
        page.on("console", lambda line: line.type == "error" and faults.append(line.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        for name, (title, link, target) in PAGES.items():
            page.goto(f"{site}/{name}", wait_until="networkidle")
            assert page.title() == title
            page.get_by_role("link", name=link, exact=True).first.click()
            page.wait_for_url(f"{site}/{target}", wait_until="networkidle")
        assert [url for url in requested if not url.startswith(f"{site}/")] == []
        page.get_by_role("textbox", name="Search").press_sequentially("quarantine")
        page.locator(".md-search-result__link").first.wait_for(state="attached")
        browser.close()
    assert [url for url in requested if not url.startswith(f"{site}/")] == []
    assert not faults

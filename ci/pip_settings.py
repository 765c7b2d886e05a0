"""Settings of pip as variables and options of uv, which reads none of them.

Needs the standard library only: it runs with the machine's own Python, before anything is
installed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# Of the sections of `pip config list`, those that `pip install` obeys; a later one goes over an
# earlier one. The last stands for pip's environment variables.
SECTIONS = ("global", "install", ":env:")
YES = ("1", "on", "t", "true", "y", "yes")
TRANSLATED = {
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "cert",
    "client-cert",
    "proxy",
    "timeout",
    "default-timeout",
    "constraint",
    "no-cache-dir",
}
# About what pip prints, caches and queries, not about what it installs, nor from where.
MEANINGLESS = {
    "break-system-packages",
    "cache-dir",
    "config-file",
    "debug",
    "disable-pip-version-check",
    "exists-action",
    "log",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}


class UntranslatableError(Exception):
    """pip is configured to do something that uv has no counterpart for; the message names it."""


def parse(listing: str) -> dict[str, str]:
    """Return the settings of `pip install` that ``listing``, from `pip config list`, shows."""
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines() if "=" in line]
    for wanted in SECTIONS:
        for key, _, value in lines:
            section, _, name = key.rpartition(".")
            text = str(ast.literal_eval(value)).strip() if section == wanted else ""
            if text:  # pip takes an empty one for none.
                settings[name] = text
    return settings


def translate(
    settings: Mapping[str, str], more_indexes: Sequence[str], default_index: str, root: Path
) -> tuple[dict[str, str], list[str]]:
    """Return ``settings`` in uv's words: variables, and options of ``uv pip``.

    A password in an address stays out of the list of processes by a variable.

    pip takes the best file of all indexes. uv compares versions over all of them, but takes the
    files of one version from the first index that has it: so the main index comes first, where uv
    itself would query it last, because it has the most files of a version.

    Raises:
        UntranslatableError: uv has no word for one of them.
    """
    unknown = sorted(settings.keys() - TRANSLATED - MEANINGLESS)
    if unknown:
        raise UntranslatableError(f"uv has no counterpart of pip's setting {', '.join(unknown)}")
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    options = []
    if settings.get("no-index", "").lower() in YES:
        options.append("--no-index")
    else:
        main = settings.get("index-url", default_index)
        *first, last = [main, *settings.get("extra-index-url", "").split(), *more_indexes]
        env |= {"UV_INDEX": " ".join(first), "UV_DEFAULT_INDEX": last}
    if links := _existing(settings.get("find-links", "").split(), root):
        env["UV_FIND_LINKS"] = ",".join(links)
    if proxy := settings.get("proxy"):
        address = proxy if "://" in proxy else f"http://{proxy}"
        env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
    for name, variable in (
        ("trusted-host", "UV_INSECURE_HOST"),
        ("cert", "SSL_CERT_FILE"),
        ("client-cert", "SSL_CLIENT_CERT"),
        ("constraint", "UV_CONSTRAINT"),
        ("default-timeout", "UV_HTTP_TIMEOUT"),
        ("timeout", "UV_HTTP_TIMEOUT"),
    ):
        if name in settings:
            env[variable] = " ".join(settings[name].split())
    if settings.get("no-cache-dir", "").lower() in YES:
        env["UV_NO_CACHE"] = "1"
    return env, options


def _existing(links: Sequence[str], root: Path) -> list[str]:
    """Return ``links`` less folders that do not exist: pip passes over them, uv ends."""
    found = []
    for link in links:
        path = os.path.expanduser(link)
        if "://" in link:
            missing = link.startswith("file://") and not Path(link.removeprefix("file://")).exists()
        else:
            missing = not (root / path).exists()
        if not missing:
            found.append(link if "://" in link else path)
    return found

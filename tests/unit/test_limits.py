"""The table of limits in docs/configuration.md states the values of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from epd_portable import responses
from epd_portable.config import document, problems
from epd_portable.config.front import MAX_ENCODERS
from epd_portable.encode.store_writer import QUEUE_BYTES
from epd_portable.items import transfers
from epd_portable.launch.plan import ports
from epd_portable.launch.run import lifecycle
from epd_portable.placement import admission, assignment, instances
from epd_portable.wire import jobs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/configuration.md"
KIB, MIB = 1 << 10, 1 << 20


def constants(module: str) -> dict[str, Any]:
    """Return the numbers that a module names, without an import of vLLM."""
    tree = ast.parse((ROOT / "epd_portable" / module).read_text("utf-8"))
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = ast.unparse(node.value)
            if re.fullmatch(r"[\d\s.<]+", value):
                found[node.targets[0].id] = eval(value)
    return found


connections, media_urls = constants("front/connections.py"), constants("front/media_urls.py")
HEAD = f"{connections['MAX_HEAD_BYTES'] // KIB} KiB"

IN_THE_CODE = {
    "encoders tried for one item": str(MAX_ENCODERS),
    "refused announcements of one item": str(transfers.MAX_REFUSED),
    "times that a request is sent": str(assignment.MAX_PD_ATTEMPTS),
    "prefill engines tried for one prompt": str(assignment.MAX_PREFILLS),
    "one encode job": (
        f"`encoderTimeout` of `front.choice`, at most `transfer.wait_timeout_s` / {MAX_ENCODERS}; "
        "otherwise `transfer.wait_timeout_s`"
    ),
    "one prefill job": "none; a hung engine ends after `launch.hung_after_s`",
    "request: body": f"{responses.BODY_TIMEOUT_S:g} s, then 408",
    "request: URL and headers": f"{HEAD} (431), {connections['HEAD_TIMEOUT_S']:g} s (408)",
    "request: framing of chunks": f"{HEAD} and {connections['FRAMING']} times the body",
    "request at `/epd/`": f"{constants('front/http.py')['_MAX_CONTROL_BYTES'] // KIB} KiB",
    "requests of one connection": str(connections["MAX_PIPELINED"]),
    "client that reads nothing": f"disconnected after {connections['SEND_TIMEOUT_S']:g} s",
    "idle connection": f"{connections['KEEP_ALIVE_S']:g} s",
    "one file by URL": (
        f"{media_urls['TIMEOUT_S']:g} s, {media_urls['MAX_REDIRECTS']} redirects, one retry"
    ),
    "files fetched at a time": (
        f"{media_urls['MAX_FETCHES']}, {media_urls['MAX_FETCHES_OF_HOST']} of one host"
    ),
    "engine that joined and is not healthy": (
        f"forgotten after {constants('front/engines.py')['FORGET_S']:g} s"
    ),
    "outputs that wait to be written": f"{QUEUE_BYTES // MIB} MiB; more are dropped",
    "restart of a process": (
        f"after {lifecycle.FIRST_PAUSE_S:g} s, doubled to {lifecycle.LONGEST_PAUSE_S:g} s; "
        f"reset after {lifecycle.FORGIVEN_AFTER_S:g} s of health"
    ),
    "health probes": (
        f"every {lifecycle.PROBE_EVERY_S:g} s, or {lifecycle.PROBES} times within "
        "`launch.hung_after_s`"
    ),
    "engines of one front": str(instances.MAX_INSTANCES),
    "API servers of fronts": str(constants("engine/hub.py")["MAX_FRONTS"]),
    "heartbeats": (
        f"every {jobs.BEAT_S:g} s; {jobs.MISSED_BEATS} without a response count as a lost engine"
    ),
    "`Retry-After` of a 503": f"{responses.RETRY_AFTER_S} s",
    "`Retry-After` of a 429 of admission": f"1 s to {admission.LONGEST_RETRY_S} s",
    "topology file": f"{problems.MAX_FILE_BYTES // MIB} MiB, {document.MAX_VALUES} values",
    "ports without `launch.first_port`": (
        f"{ports.FIRST_PORT} to {ports.LAST_PORT}, without those that a hardware profile avoids"
    ),
}
"""First words of each row, and its value."""


def test_each_limit_in_the_table_is_the_one_of_the_code() -> None:
    section = PAGE.read_text("utf-8").partition("## Fixed limits\n")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)[1:]
    assert len(rows) == len(IN_THE_CODE)
    for (name, value), (begin, expected) in zip(rows, IN_THE_CODE.items(), strict=True):
        assert name.startswith(begin)
        assert value == expected, name

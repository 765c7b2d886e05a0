"""The table of limits in docs/configuration.md tells what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from epd_portable.config import document, problems
from epd_portable.config.routing import MAX_ENCODERS
from epd_portable.connector import consumer
from epd_portable.connector.stores import writer
from epd_portable.launch.plan import ports
from epd_portable.launch.run import lifecycle, supervisor
from epd_portable.placement import admission, fallbacks, instances, replies
from epd_portable.router import prefill
from epd_portable.router.contents import body, media_urls
from epd_portable.router.fleet import health_probes, registration
from epd_portable.router.http import server_connection
from epd_portable.router.settings import RouterSettings

PAGE = Path(__file__).resolve().parents[2] / "docs/configuration.md"
KIB, MIB = 1 << 10, 1 << 20


def setting(name: str) -> str:
    return f"{RouterSettings.model_fields[name].default:g} s"


IN_THE_CODE = {
    "encoders tried for one item": str(MAX_ENCODERS),
    "refused announcements of one item": str(consumer.MAX_REFUSED),
    "times that a request is sent": str(fallbacks.MAX_PD_ATTEMPTS),
    "prefill instances asked for one prompt": str(prefill.MAX_PREFILLS),
    "connecting to an instance": setting("connect_timeout_s"),
    "one encode job": {
        2: "half of `transfer.wait_timeout_s`, unless `router.choice` says otherwise"
    }[MAX_ENCODERS],
    "a request's body arrives": f"within {setting('body_timeout_s')}",
    "a client that takes nothing of its answer": f"after {setting('send_timeout_s')}",
    "fetching one file by URL": (
        f"{media_urls.TIMEOUT_S:g} s each, {media_urls.MAX_REDIRECTS} redirects; a server that "
        "breaks off or answers 5xx is asked once more within that time"
    ),
    "files that are fetched at a time": (
        f"{media_urls.MAX_FETCHES}, {media_urls.MAX_FETCHES_OF_HOST} of one host"
    ),
    "an instance that joined and is not healthy": f"after {setting('forget_after_s')}",
    "outputs that wait in an encode instance": f"{writer.QUEUE_BYTES // MIB} MiB; more are dropped",
    "restart of a process": (
        f"after {lifecycle.FIRST_PAUSE_S:g} s, doubling with each further death to "
        f"{lifecycle.LONGEST_PAUSE_S:g} s; "
        f"anew after {lifecycle.FORGIVEN_AFTER_S:g} s of health"
    ),
    "probes of a process": (
        f"every {supervisor.PROBE_EVERY_S:g} s, or {supervisor.PROBES} times within "
        "`launch.hung_after_s`"
    ),
    "interval of health probes of an instance": (
        f"{setting('probe_interval_s')}, at most {health_probes.PROBES_PER_S:g} probes a second in "
        "all; at once after a failed request"
    ),
    "a health probe waits": setting("probe_timeout_s"),
    "failed health probes": str(instances.PROBES_UNTIL_DOWN),
    "failed requests in a row": (
        f"{instances.MOST_FAILURES}, for {instances.FIRST_SUSPICION_S:g} s to "
        f"{instances.LONGEST_SUSPICION_S:g} s"
    ),
    "instances of one router": str(instances.MAX_INSTANCES),
    "headers of a request": (
        f"{server_connection.MAX_HEAD_BYTES // KIB} KiB, "
        f"at most {server_connection.MAX_HEADERS} headers, "
        f"within {server_connection.HEADERS_WITHIN_S:g} s"
    ),
    "what stands between two chunks of a body": f"{server_connection.MAX_HEAD_BYTES // KIB} KiB",
    "what is read of requests behind one": f"{server_connection.LARGE_BYTES // KIB} KiB",
    "JSON of a request without its long strings": f"{body.MAX_JSON_BYTES // MIB} MiB",
    "a request at `/epd/`": f"{registration.MAX_BODY_BYTES // KIB} KiB",
    "an idle connection of a client": f"{server_connection.KEEP_ALIVE_S} s",
    "`Retry-After` of a 503": f"{replies.RETRY_AFTER_S} s",
    "`Retry-After` of a 429 of the router": f"1 s to {admission.LONGEST_RETRY_S} s",
    "a topology file": f"{problems.MAX_FILE_BYTES // MIB} MiB, {document.MAX_VALUES} values",
    "ports of instances without `launch.first_port`": (
        f"{ports.FIRST_PORT} to {ports.LAST_PORT}, except those that a hardware profile avoids"
    ),
}
"""What each row begins with, and its value."""


def test_each_limit_in_the_table_is_the_one_of_the_code() -> None:
    section = PAGE.read_text("utf-8").partition("## Limits that no key changes\n")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)[1:]
    assert len(rows) == len(IN_THE_CODE)
    for (name, value), (begin, expected) in zip(rows, IN_THE_CODE.items(), strict=True):
        assert name.startswith(begin)
        assert value == expected, name

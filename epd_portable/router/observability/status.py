"""The status page at ``/`` of the operators' port: its files, and what it shows, as JSON.

While it is closed nothing is done for it, but to count what has happened anyway.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from epd_portable.config.secret import Secret
from epd_portable.delivery.instances import EndpointPool, Instance
from epd_portable.delivery.replies import JSON, Reply
from epd_portable.errors import RequestError
from epd_portable.router.observability.engine_figures import EngineFigures, EngineWatch
from epd_portable.router.observability.record import (
    Activity,
    FallbackUse,
    RecentRequests,
    RequestRecord,
)
from epd_portable.wire.outcomes import Fallback

SCHEMA = 4
"""Of the JSON: raised when a field goes, or means something else."""
JSON_PATH = "/status.json"
NOW_HEADER = "x-epd-now"
"""The router's clock in seconds, by which times in the JSON are. It is no part of the JSON, which
would else be another one each time."""
MAX_INSTANCES_SHOWN = 256
MAX_PAIRS_SHOWN = 1024
MAX_IN_FLIGHT_SHOWN = 10
"""The oldest ones: if something hangs it is among them."""
MAX_ENDED_SHOWN = 30
MAX_ITEMS_SHOWN = 16
"""Of a request."""

_FOLDER = Path(__file__).with_name("page")
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset({*_FILES, JSON_PATH})
_SAFE = {
    # Names come from many hands. Whatever they hold, no other script runs, nothing is loaded from
    # anywhere else, and no page of others frames this one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_OF_INSTANCES = (
    *("name", "role", "state", "healthy", "suspected", "ejected"),
    *("reason", "problem", "computes_for"),
)
_OF_REQUESTS = (
    *("id", "endpoint", "stream", "status", "gone"),
    *("began_at", "read_at", "admitted_at", "first_at", "ended_at"),
    *("legs", "steps"),
)


class StatusPage:
    """Answers at the page's paths.

    Args:
        model: Served name of the model.
        activity: What went between instances.
        requests: Those in flight, and the last ones.
        engines: Ask instances how they are.
        secret: Makes the keys of the page.
        health: Returns the answer of ``/health``.
    """

    def __init__(
        self,
        model: str,
        instances: EndpointPool,
        activity: Activity,
        requests: RecentRequests,
        engines: EngineWatch,
        secret: Secret,
        health: Callable[[], dict[str, object]],
    ) -> None:
        self._model = model
        self._instances = instances
        self._activity = activity
        self._requests = requests
        self._engines = engines
        self._secret = secret
        self._health = health

    async def close(self) -> None:
        """Ask instances no more."""
        await self._engines.close()

    async def reply(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        """Answer a request at one of `PATHS`.

        Raises:
            RequestError: 405; it is no GET. 401; it shows a key that is wrong or too old.
        """
        if method not in ("GET", "HEAD"):
            raise RequestError(
                f"{method} {path}: only GET is served at this path",
                status=405,
                code="method_not_allowed",
            )
        if path != JSON_PATH:
            body, kind = _file(path)
            return _unless_known(body, {"content-type": kind, **_SAFE}, headers)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown: dict[str, object] = {"schema": SCHEMA, **self._health()}
        if scheme.lower() == "bearer":
            self._secret.check_page_key(key.strip())
            shown |= self._detail()
        given = {**JSON, "cache-control": "no-cache", NOW_HEADER: f"{time.monotonic():.3f}"}
        return _unless_known(msgspec.json.encode(shown), given, headers)

    def _detail(self) -> dict[str, object]:
        """Return what is for holders of a key."""
        shown = self._instances.all[:MAX_INSTANCES_SHOWN]
        figures = self._engines.of(shown)
        names = {instance.name for instance in shown}
        pairs = [pair for pair in self._activity.pairs if {pair.source, pair.target} <= names]
        uses = self._activity.fallbacks
        in_flight = tuple(self._requests.in_flight)
        ended = tuple(self._requests.ended)[: -MAX_ENDED_SHOWN - 1 : -1]
        return {
            "model": self._model,
            "instances": [_shown(instance, figures) for instance in shown],
            "instances_in_all": len(self._instances),
            "pairs": pairs[-MAX_PAIRS_SHOWN:],
            "in_flight": len(in_flight),
            "waiting": sum(1 for each in in_flight if each.read_at and not each.admitted_at),
            "requests": [*map(_noted, (*in_flight[:MAX_IN_FLIGHT_SHOWN], *ended))],
            "fallbacks": [
                uses.get(name) or FallbackUse(fallback=name) for name in get_args(Fallback)
            ],
        }


def _shown(instance: Instance, figures: Mapping[str, EngineFigures]) -> dict[str, Any]:
    """Return an instance as the page shows it."""
    return {
        **{name: getattr(instance, name) for name in _OF_INSTANCES},
        "in_flight": instance.load,
        "pending_encode_s": round(instance.pending_encode_s, 1),
        "engine": figures.get(instance.name) if instance.healthy else None,
    }


def _noted(record: RequestRecord) -> dict[str, Any]:
    """Return a request as the page shows it: nothing of its content is in a record."""
    noted = {name: msgspec.to_builtins(getattr(record, name)) for name in _OF_REQUESTS}
    noted["items"] = msgspec.to_builtins(record.items[:MAX_ITEMS_SHOWN])
    noted["items_in_all"] = len(record.items)
    return noted


@functools.cache
def _file(path: str) -> tuple[bytes, str]:
    name, kind = _FILES[path]
    return _FOLDER.joinpath(name).read_bytes(), kind


def _unless_known(body: bytes, headers: dict[str, str], request: Mapping[str, str]) -> Reply:
    """Return an answer, or 304 if the client has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
    headers["etag"] = tag
    if tag in request.get("if-none-match", ""):
        return Reply(304, headers, b"")
    return Reply(200, headers, body)

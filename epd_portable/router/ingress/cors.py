"""Cross-origin requests: which pages may send them, and the headers for browsers (CORS).

A browser asks for permission first, but not for what an HTML form could send as well: `check_json`
of `epd_portable.router.contents.body` refuses that, and `Cors.check_origin` where forms are served.
"""

from __future__ import annotations

from collections.abc import Mapping

from epd_portable.errors import RequestError
from epd_portable.placement.replies import Reply

METHODS = "GET, POST"
EXPOSED = "x-request-id, retry-after"
MAX_AGE_S = 600
"""How long a browser may cache a preflight answer."""


class Cors:
    """The rules of one router.

    Source: Fetch standard, section "HTTP-network-or-cache fetch" and "CORS protocol".

    Args:
        origins: Origins that may ask; ``*`` is any.
    """

    def __init__(self, origins: list[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, request: Mapping[str, str]) -> Mapping[str, str]:
        """Return what every answer to a request says."""
        allowed = self._allowed(request.get("origin"))
        return {"vary": "Origin", "access-control-expose-headers": EXPOSED, **allowed}

    def preflight(self, method: str, request: Mapping[str, str]) -> Reply | None:
        """Return the answer if a browser only asks whether it may ask; 400 if it may not."""
        wished = request.get("access-control-request-method")
        if method != "OPTIONS" or wished is None or "origin" not in request:
            return None
        allowed = self._allowed(request["origin"])
        headers = {
            "vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
            "content-type": "text/plain; charset=utf-8",
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE_S),
            **allowed,
        }
        if "access-control-request-headers" in request:
            headers["access-control-allow-headers"] = request["access-control-request-headers"]
        if allowed and wished in METHODS.split(", "):
            return Reply(200, headers, b"OK")
        return Reply(400, headers, b"This origin or method is not allowed")

    def check_origin(self, request: Mapping[str, str]) -> None:
        """Check that a request that a form could send comes from no page that may not ask.

        Raises:
            RequestError: 403; it does.
        """
        origin = request.get("origin")
        if origin is not None and not self._allowed(origin):
            raise RequestError(
                f"pages of origin {origin[:128]!r} may not send forms: add it to "
                "router.cors_origins",
                status=403,
                code="origin_not_allowed",
            )

    def _allowed(self, origin: str | None) -> dict[str, str]:
        if origin is None or not (self._any or origin in self._origins):
            return {}
        return {"access-control-allow-origin": "*" if self._any else origin}

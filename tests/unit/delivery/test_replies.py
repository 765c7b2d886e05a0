from __future__ import annotations

import json

from epd_portable.delivery.replies import error_reply, unavailable


def test_errors_have_openais_form() -> None:
    reply = error_reply(unavailable("nobody is there"))
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) > 0
    assert json.loads(reply.body) == {
        "error": {
            "message": "nobody is there",
            "type": "server_error",
            "param": None,
            "code": "service_unavailable",
        }
    }

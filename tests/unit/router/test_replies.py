from __future__ import annotations

import json

from epd_portable.router.replies import error_reply, refusal, unavailable
from epd_portable.wire.messages import Nack, NackCode


def nack(code: NackCode, detail: str = "because") -> Nack:
    return Nack(transfer_id="t", code=code, detail=detail)


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


def test_a_too_large_item_is_the_clients_error() -> None:
    error = refusal([nack(NackCode.UNAVAILABLE), nack(NackCode.TOO_LARGE, "2 MB of 1 MB")])
    assert error is not None
    assert (error.status, str(error), error.retry_after_s) == (413, "2 MB of 1 MB", None)


def test_an_unavailable_item_asks_to_come_again() -> None:
    error = refusal([nack(NackCode.UNAVAILABLE, "late")])
    assert error is not None
    assert (error.status, str(error)) == (503, "late")
    assert error.retry_after_s


def test_without_a_refusal_there_is_nothing_to_say() -> None:
    assert refusal([]) is None

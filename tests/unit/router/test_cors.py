from __future__ import annotations

import pytest

from epd_portable.router.ingress.cors import Cors

PAGE = {"origin": "https://a.example"}
ASKED = {**PAGE, "access-control-request-method": "POST"}


def test_without_origins_nobody_is_told_anything() -> None:
    cors = Cors([])
    assert cors.headers(PAGE) == {}
    assert cors.preflight("OPTIONS", ASKED) is None


@pytest.mark.parametrize(
    ("origins", "told"),
    [(["*"], "*"), (["https://a.example"], "https://a.example"), (["https://b.example"], None)],
)
def test_a_page_learns_whether_it_may_read(origins: list[str], told: str | None) -> None:
    cors = Cors(origins)
    headers = cors.headers(PAGE)
    assert headers.get("access-control-allow-origin") == told
    # A cache must not give one page what another was told.
    assert headers["vary"] == "Origin"
    answer = cors.preflight("OPTIONS", ASKED)
    assert answer is not None
    assert answer.status == (200 if told else 400)
    assert answer.headers.get("access-control-allow-origin") == told


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("DELETE", 400), ("GET, POST", 400)])
def test_only_methods_that_are_served_are_allowed(method: str, status: int) -> None:
    answer = Cors(["*"]).preflight("OPTIONS", {**ASKED, "access-control-request-method": method})
    assert answer is not None
    assert answer.status == status


@pytest.mark.parametrize(
    ("method", "request_headers"), [("POST", ASKED), ("OPTIONS", PAGE), ("OPTIONS", {})]
)
def test_what_is_no_question_of_a_browser_is_a_request(
    method: str, request_headers: dict[str, str]
) -> None:
    assert Cors(["*"]).preflight(method, request_headers) is None


def test_headers_that_a_page_wants_to_send_are_allowed() -> None:
    wished = {**ASKED, "access-control-request-headers": "authorization,x-a"}
    answer = Cors(["*"]).preflight("OPTIONS", wished)
    assert answer is not None
    assert answer.headers["access-control-allow-headers"] == "authorization,x-a"

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config import secret
from epd_portable.config.secret import MIN_CHARACTERS, Secret, SignatureCheck, make_secret_file
from epd_portable.errors import ConfigError, RequestError
from tests.unit.builders import Clock

HELD, OTHER = Secret("s" * 40), Secret("x" * 40)


def write(path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def test_new_secret_file_is_private_unique_and_not_replaced(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        make_secret_file(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert len({Secret.read(str(path)).derive("a") for path in paths}) == 2
    before = paths[0].read_text()
    with pytest.raises(ConfigError, match="exists"):
        make_secret_file(str(paths[0]))
    assert paths[0].read_text() == before


def test_secret_copies_agree_and_purposes_differ(tmp_path: Path) -> None:
    copy = Secret.read(write(tmp_path / "two", " " + "s" * 40 + "\n"))
    assert copy.derive("a") == HELD.derive("a") not in (HELD.derive("b"), OTHER.derive("a"))
    assert "ssss" not in repr(copy) + str(copy)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("s" * 40, 0o640, "mode 0640"),
        ("s" * 40, 0o606, "chmod 600"),
        ("s" * (MIN_CHARACTERS - 1), 0o600, "31 characters"),
        ("", 0o600, "0 characters"),
        (b"\xff" * 40, 0o600, "cannot be read"),
        (None, 0o600, "epd-launch secret"),
    ],
)
def test_a_file_that_gives_no_secret_is_refused(
    tmp_path: Path, text: str | bytes | None, mode: int, words: str
) -> None:
    path = str(tmp_path / "secret")
    if text is not None:
        write(Path(path), text, mode)
    with pytest.raises(ConfigError, match=words):
        Secret.read(path)
    with pytest.raises(ConfigError, match=r"there is no secret_file.*epd-launch secret FILE"):
        Secret.read("")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to root and a group")
def test_secret_of_root_may_be_read_by_its_group() -> None:
    """A Pod's Secret: ``fsGroup`` makes it a file of root with mode 0440."""
    group = 1000
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  # Folders of pytest are closed to others.
    path = Path(file.name)
    write(path, "s" * 40, 0o440)
    os.chown(path, 0, group)
    with pytest.raises(ConfigError, match="mode 0440"):
        Secret.read(str(path))
    ids, groups = os.getegid(), os.getgroups()
    os.setegid(group)
    os.seteuid(group)
    try:
        assert Secret.read(str(path)).derive("a") == HELD.derive("a")
    finally:
        os.seteuid(0)
        os.setegid(ids)
        os.setgroups(groups)


TRANSFER = {"transfer_id": "t", "item": "cat", "consumer": "tcp://h:1"}


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": "u"},
        {"item": "dog"},
        {"consumer": "tcp://h:2"},
        {"transfer_id": "tc", "item": "at"},
        {"item": "", "consumer": "cattcp://h:1"},
        {"proof": ""},
        {"proof": "0" * 32},
        {"proof": "\ud800"},
        {"proof": "ü"},
        {"proof": OTHER.sign_transfer(**TRANSFER)},
    ],
)
def test_a_proof_is_for_one_transfer_of_one_item_to_one_consumer(changes: dict[str, str]) -> None:
    proof = HELD.sign_transfer(**TRANSFER)
    assert re.fullmatch("[0-9a-f]{32}", proof)
    assert proof not in HELD.derive("transfers").hex()
    assert HELD.verify_transfer(proof, **TRANSFER)
    assert not HELD.verify_transfer(**({"proof": proof} | TRANSFER | changes))


PATH = "/epd/instances?x=1"
BODY = b'{"name": "encode-7"}'
ASKED = ("POST", PATH, BODY)


def signed_check() -> tuple[SignatureCheck, Clock, str]:
    clock = Clock(1.8e9)
    check = SignatureCheck(HELD, clock=clock)
    return check, clock, HELD.sign(*ASKED, clock=clock)


def refused(check: SignatureCheck, signature: str, words: str, *request: Any) -> RequestError:
    with pytest.raises(RequestError, match=words) as caught:
        check.check(signature, *(request or ASKED))
    return caught.value


def test_a_signed_request_is_let_in_once() -> None:
    check, clock, signature = signed_check()
    check.check(signature, *ASKED)
    error = refused(check, signature, "used before: sign each request again")
    assert (error.status, error.code) == (401, "unauthorized")
    check.check(HELD.sign(*ASKED, clock=clock), *ASKED)
    refused(check, OTHER.sign(*ASKED, clock=clock), "signature is wrong")


@pytest.mark.parametrize(
    "request_",
    [
        ("GET", PATH, BODY),
        ("POST", "/epd/instances", BODY),
        ("POST", PATH, BODY + b" "),
        ("POST", PATH, b""),
        ("POST/", PATH[1:], BODY),
    ],
    ids=["method", "query", "body", "no body", "moved end"],
)
def test_a_signature_is_for_one_request(request_: tuple[str, str, bytes]) -> None:
    check, _, signature = signed_check()
    refused(check, signature, "signature is wrong.*another secret_file", *request_)


@pytest.mark.parametrize("field", ["time", "nonce", "mac"])
def test_no_part_of_a_signature_can_be_changed(field: str) -> None:
    check, _, signature = signed_check()
    before, name, value = signature.partition(f"{field}=")
    changed = before + name + ("1" if value[0] != "1" else "2") + value[1:]
    refused(check, changed, "signature is wrong")


@pytest.mark.parametrize(
    ("seconds", "words"), [(-31, "31 s ahead"), (-30, ""), (30, ""), (31, "31 s behind")]
)
def test_clock_skew_beyond_the_tolerance_is_refused(seconds: int, words: str) -> None:
    check, clock, signature = signed_check()
    clock.now += seconds
    if words:
        refused(check, signature, f"{words}, and 30 s are allowed: set the clocks")
    else:
        check.check(signature, *ASKED)


def test_future_signature_is_not_accepted_twice() -> None:
    check, clock, signature = signed_check()
    clock.now -= 30
    check.check(signature, *ASKED)
    clock.now += 60
    refused(check, signature, "used before")


def test_signatures_are_bounded_and_forgotten_when_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "MAX_SIGNATURES", 2)
    check, clock, signature = signed_check()
    check.check(signature, *ASKED)
    check.check(HELD.sign(*ASKED, clock=clock), *ASKED)
    error = refused(check, HELD.sign(*ASKED, clock=clock), "send fewer requests")
    assert (error.status, error.retry_after_s) == (503, 30)
    clock.now += 61
    check.check(HELD.sign(*ASKED, clock=clock), *ASKED)
    refused(check, signature, "61 s behind")


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "EPD-HMAC", "EPD-HMAC time=1, nonce=ü, mac=\ud800", "EPD-HMAC " * 99]
)
def test_malformed_signature_is_refused_with_the_remedy(header: str) -> None:
    assert refused(signed_check()[0], header, "use epd-launch").status == 401

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import (
    INSTANCE_TOKEN_HEADER,
    MIN_CHARACTERS,
    Secret,
    SignatureCheck,
    make_secret_file,
)
from epd_portable.errors import ConfigError, RequestError

HELD = Secret("s" * 40)


def write(path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def test_a_made_file_is_for_its_owner_only_and_different_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        make_secret_file(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert len({Secret.read(str(path)).instance_token() for path in paths}) == 2


def test_an_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", "x" * 40)
    with pytest.raises(ConfigError, match="exists"):
        make_secret_file(path)
    assert Path(path).read_text() == "x" * 40


def test_copies_of_one_secret_agree_and_purposes_do_not(tmp_path: Path) -> None:
    one = Secret.read(write(tmp_path / "one", "s" * 40))
    two = Secret.read(write(tmp_path / "two", " " + "s" * 40 + "\n"))
    assert one.instance_token() == two.instance_token()
    assert one.derive("a") == two.derive("a") != one.derive("b")


def test_nothing_that_is_shown_tells_the_secret(tmp_path: Path) -> None:
    secret = Secret.read(write(tmp_path / "one", "s" * 40))
    assert "ssss" not in secret.instance_token() + repr(secret) + str(secret)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("s" * 40, 0o640, "mode 0640"),
        ("s" * 40, 0o606, "chmod 600"),
        ("s" * (MIN_CHARACTERS - 1), 0o600, "31 characters"),
        ("", 0o600, "0 characters"),
        (b"\xff" * 40, 0o600, "cannot be read"),
    ],
)
def test_a_file_that_gives_no_secret_is_refused(
    tmp_path: Path, text: str | bytes, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Secret.read(write(tmp_path / "secret", text, mode))


def sign_transfer(**changes: str) -> tuple[Secret, str, dict[str, str]]:
    names = {"transfer_id": "t", "item": "cat", "consumer": "tcp://h:1"}
    secret = Secret("s" * 40)
    return secret, secret.sign_transfer(**names), names | changes


def test_what_the_router_signs_is_known_by_who_holds_the_secret() -> None:
    _, proof, names = sign_transfer()
    assert Secret("s" * 40).verify_transfer(proof, **names)
    assert not Secret("x" * 40).verify_transfer(proof, **names)


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": "u"},
        {"item": "dog"},
        {"consumer": "tcp://h:2"},
        {"transfer_id": "tc", "item": "at"},
        {"item": "", "consumer": "cattcp://h:1"},
    ],
    ids=["transfer", "item", "consumer", "moved end", "empty"],
)
def test_a_proof_is_for_one_transfer_of_one_item_to_one_consumer(changes: dict[str, str]) -> None:
    secret, proof, names = sign_transfer(**changes)
    assert not secret.verify_transfer(proof, **names)


@pytest.mark.parametrize("proof", ["", "0" * 32, "\ud800", "ü"])
def test_what_is_no_proof_proves_nothing(proof: str) -> None:
    secret, _, names = sign_transfer()
    assert not secret.verify_transfer(proof, **names)


def test_a_proof_fits_its_field_and_tells_neither_the_secret_nor_other_purposes() -> None:
    secret, proof, _ = sign_transfer()
    assert re.fullmatch("[0-9a-f]{32}", proof)
    assert proof not in secret.instance_token() + secret.derive("transfers").hex()


def test_no_file_is_refused_with_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"there is no secret_file.*epd-launch secret FILE"):
        Secret.read("")


def test_a_missing_file_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epd-launch secret"):
        Secret.read(str(tmp_path / "none"))


def test_the_token_of_instances_is_one_header_value_of_its_own_purpose() -> None:
    secret = Secret("s" * 40)
    assert re.fullmatch("[0-9a-f]{64}", secret.instance_token())
    assert secret.instance_token() == Secret("s" * 40).instance_token()
    assert secret.instance_token() != secret.derive("another purpose").hex()
    assert re.fullmatch("[a-z-]+", INSTANCE_TOKEN_HEADER)


PATH = "/epd/instances?x=1"
BODY = b'{"name": "encode-7"}'


class Clock:
    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


def signed_check(**arguments: Any) -> tuple[SignatureCheck, Clock, str]:
    secret, clock = Secret("s" * 40), Clock()
    return (
        SignatureCheck(secret, clock=clock, **arguments),
        clock,
        secret.sign("POST", PATH, BODY, clock=clock),
    )


def refused(check: SignatureCheck, signature: str, words: str, *request: Any) -> RequestError:
    with pytest.raises(RequestError, match=words) as caught:
        check.check(signature, *(request or ("POST", PATH, BODY)))
    return caught.value


def test_a_signed_request_is_let_in_once() -> None:
    check, clock, signature = signed_check()
    check.check(signature, "POST", PATH, BODY)
    error = refused(check, signature, "used before: sign each request anew")
    assert (error.status, error.code) == (401, "unauthorized")
    check.check(Secret("s" * 40).sign("POST", PATH, BODY, clock=clock), "POST", PATH, BODY)


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


def test_a_signature_by_another_secret_is_wrong() -> None:
    check, _, _ = signed_check()
    refused(check, Secret("x" * 40).sign("POST", PATH, BODY), "signature is wrong")


@pytest.mark.parametrize(("seconds", "words"), [(-31, "31 s ahead"), (31, "31 s behind")])
def test_a_signature_of_another_time_is_refused_with_the_difference(
    seconds: int, words: str
) -> None:
    check, clock, signature = signed_check()
    clock.now += seconds
    refused(check, signature, f"{words}, and 30 s are allowed: set the clocks")


@pytest.mark.parametrize("seconds", [-30, 30])
def test_clocks_may_differ_a_little(seconds: int) -> None:
    check, clock, signature = signed_check()
    clock.now += seconds
    check.check(signature, "POST", PATH, BODY)


def test_a_signature_of_the_future_is_not_taken_twice_when_its_time_has_come() -> None:
    check, clock, signature = signed_check()
    clock.now -= 30
    check.check(signature, "POST", PATH, BODY)
    clock.now += 60
    refused(check, signature, "used before")


def test_what_is_remembered_is_bounded_and_forgotten_when_it_is_too_old() -> None:
    check, clock, signature = signed_check(max_remembered=2)
    check.check(signature, "POST", PATH, BODY)
    ask = ("GET", PATH, b"")
    check.check(Secret("s" * 40).sign(*ask, clock=clock), *ask)
    error = refused(check, Secret("s" * 40).sign(*ask, clock=clock), "ask less often", *ask)
    assert (error.status, error.retry_after_s) == (503, 30)
    clock.now += 61
    check.check(Secret("s" * 40).sign(*ask, clock=clock), *ask)
    refused(check, signature, "61 s behind")


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "EPD-HMAC", "EPD-HMAC time=1, nonce=ü, mac=\ud800", "EPD-HMAC " * 99]
)
def test_what_is_no_signature_is_refused_with_what_to_do(header: str) -> None:
    error = refused(signed_check()[0], header, "ask by epd-launch")
    assert error.status == 401


def test_a_signature_tells_nothing_of_the_secret() -> None:
    _, _, signature = signed_check()
    assert signature.partition("mac=")[2] not in Secret("s" * 40).derive("signatures").hex()


def test_a_key_of_the_page_is_good_until_its_time_is_over() -> None:
    key = HELD.page_key(until=1000.0)
    HELD.check_page_key(key, clock=lambda: 1000.0)
    with pytest.raises(RequestError, match="time of this key") as caught:
        HELD.check_page_key(key, clock=lambda: 1001.0)
    assert caught.value.status == 401


@pytest.mark.parametrize(
    "key", ["", "-", "1000", "9999-" + "0" * 32, "-" + "0" * 32, "é-ü", "\udc80-\udc80", "9" * 5000]
)
def test_what_is_no_key_of_the_page_opens_nothing(key: str) -> None:
    with pytest.raises(RequestError, match="key of the status page is wrong"):
        HELD.check_page_key(key)


def test_nobody_makes_a_key_of_the_page_last_longer() -> None:
    _, _, mac = HELD.page_key(until=1000.0).partition("-")
    with pytest.raises(RequestError, match="is wrong"):
        HELD.check_page_key(f"2000-{mac}", clock=lambda: 1500.0)

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd_portable.config.secret import MIN_CHARACTERS, Secret, make_secret_file
from epd_portable.errors import ConfigError


def write(path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def test_a_made_file_is_for_its_owner_only_and_different_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        make_secret_file(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert len({Secret.read(str(path)).token() for path in paths}) == 2


def test_an_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", "x" * 40)
    with pytest.raises(ConfigError, match="exists"):
        make_secret_file(path)
    assert Path(path).read_text() == "x" * 40


def test_copies_of_one_secret_agree_and_purposes_do_not(tmp_path: Path) -> None:
    one = Secret.read(write(tmp_path / "one", "s" * 40))
    two = Secret.read(write(tmp_path / "two", " " + "s" * 40 + "\n"))
    assert one.token() == two.token()
    assert one.derive("a") == two.derive("a") != one.derive("b")


def test_nothing_that_is_shown_tells_the_secret(tmp_path: Path) -> None:
    secret = Secret.read(write(tmp_path / "one", "s" * 40))
    assert "ssss" not in secret.token() + repr(secret) + str(secret)


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


def vouch(**changes: str) -> tuple[Secret, str, dict[str, str]]:
    names = {"transfer_id": "t", "item": "cat", "consumer": "tcp://h:1"}
    secret = Secret("s" * 40)
    return secret, secret.vouch(**names), names | changes


def test_what_the_router_vouches_for_is_known_by_who_holds_the_secret() -> None:
    _, proof, names = vouch()
    assert Secret("s" * 40).vouched(proof, **names)
    assert not Secret("x" * 40).vouched(proof, **names)


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
    secret, proof, names = vouch(**changes)
    assert not secret.vouched(proof, **names)


@pytest.mark.parametrize("proof", ["", "0" * 32, "\ud800", "ü"])
def test_what_is_no_proof_vouches_for_nothing(proof: str) -> None:
    secret, _, names = vouch()
    assert not secret.vouched(proof, **names)


def test_a_proof_fits_its_field_and_tells_neither_the_secret_nor_other_purposes() -> None:
    secret, proof, _ = vouch()
    assert re.fullmatch("[0-9a-f]{32}", proof)
    assert proof not in secret.token() + secret.derive("transfers").hex()


def test_no_file_is_refused_with_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"there is no secret_file.*epd-launch secret FILE"):
        Secret.read("")


def test_a_missing_file_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epd-launch secret"):
        Secret.read(str(tmp_path / "none"))

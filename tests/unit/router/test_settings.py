from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd_portable.errors import ConfigError
from epd_portable.router.settings import load_settings

ENCODE = {"name": "e", "role": "encode", "url": "http://127.0.0.1:1"}
PD = {
    "name": "p",
    "role": "prefill-decode",
    "url": "http://127.0.0.1:2",
    "control": "tcp://127.0.0.1:3",
}


def text(**changes: Any) -> str:
    return json.dumps({"port": 0, "model": "demo", "instances": [ENCODE, PD], **changes})


def test_settings_come_as_json_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    file.write_text(text())
    assert load_settings(f"@{file}") == load_settings(text())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", ["--settings", "JSON"]),
        (text(prot=1), ["prot", "not permitted"]),
        (text(port=70000), ["port", "65535"]),
        (text(instances=[ENCODE], registration=False), ["prefill-decode", "at least one"]),
        (text(instances=[PD, PD]), ["['p']", "more than once"]),
        (text(instances=[{**PD, "control": ""}]), ["'p'", "no control address"]),
        (text(instances=[PD, {**ENCODE, "control": "tcp://x:1"}]), ["'e'", "remove"]),
        (text(instances=[{**PD, "control": "tcp://nowhere"}]), ["instances.0.control"]),
        (text(instances=[{**PD, "url": "http://h:1/v1"}]), ["instances.0.url"]),
        (text(instances=[{**PD, "role": "decode"}]), ["instances.0.role"]),
        ("@/does/not/exist", ["/does/not/exist", "cannot be read"]),
    ],
)
def test_wrong_settings_are_refused_by_key_and_value(settings: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(settings)
    for word in words:
        assert word in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"port.*model|model.*port"):
        load_settings(text(port=-1, model=""))

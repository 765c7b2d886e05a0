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
    settings = load_settings(f"@{file}")
    assert settings == load_settings(text())
    # They go from process to process as they were.
    assert load_settings(settings.as_json()) == settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", ["--settings", "JSON"]),
        (text(prot=1), ["prot", "not permitted"]),
        (text(port=70000), ["port", "65535"]),
        (text(port=-1, model=""), ["port", "model"]),
        (text(workers=2), ["router.workers is gone: use several routers"]),
        (text(instances=[ENCODE], registration=False), ["prefill-decode", "at least one"]),
        (text(instances=[PD, PD]), ["['p']", "more than once"]),
        (text(instances=[{**PD, "control": ""}]), ["'p'", "no control address"]),
        (text(instances=[PD, {**ENCODE, "control": "tcp://x:1"}]), ["'e'", "remove"]),
        (text(instances=[{**PD, "control": "tcp://nowhere"}]), ["instances.0.control"]),
        (text(instances=[{**PD, "url": "http://h:1/v1"}]), ["instances.0.url"]),
        (text(instances=[{**PD, "role": "decoder"}]), ["instances.0.role"]),
        (text(instances=[{**PD, "role": "p"}], registration=False), ["no instance answers"]),
        ("@/does/not/exist", ["/does/not/exist", "cannot be read"]),
    ],
)
def test_wrong_settings_are_refused_by_key_and_value(settings: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "role"), [("d", "decode"), ("all", "encode-prefill-decode")])
def test_a_role_may_have_a_short_name(name: str, role: str) -> None:
    (instance,) = load_settings(text(instances=[{**PD, "role": name}])).of_duty("answer")
    assert instance.role == role


def test_labels_and_weights_are_kept_within_bounds() -> None:
    given = {**PD, "weight": 2, "labels": {"zone": "east"}}
    settings = load_settings(text(instances=[given]))
    assert (settings.instances[0].weight, settings.instances[0].labels) == (2.0, {"zone": "east"})
    for wrong in (
        {"weight": 0},
        {"weight": 1001},
        {"labels": {"": "x"}},
        {"labels": {"a": "b" * 257}},
    ):
        with pytest.raises(ConfigError, match=f"instances.0.{next(iter(wrong))}"):
            load_settings(text(instances=[{**PD, **wrong}]))

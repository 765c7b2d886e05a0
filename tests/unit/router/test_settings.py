from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd_portable.errors import ConfigError
from epd_portable.router.settings import load_settings, policy_of

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


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"port.*model|model.*port"):
        load_settings(text(port=-1, model=""))


DECIDED = {
    "plugins": [
        {"type": "multimodal-epd-decider", "parameters": {"encoderTimeout": 5000}},
        {
            "type": "epd-profile-handler",
            "parameters": {"deciderPluginName": "multimodal-epd-decider"},
        },
    ],
    "schedulingProfiles": [{"name": "encode", "plugins": []}, {"name": "decode", "plugins": []}],
}


def test_a_decider_may_say_how_long_an_encode_job_takes_at_most() -> None:
    settings = load_settings(text(choice=DECIDED))
    policy = policy_of(settings)
    assert policy is not None and settings.encode_job_s == 15.0
    for wait_s, job_s in ((30.0, 5.0), (9.0, 4.5)):
        more = {"encode_timeout_s": policy.encode_timeout_s, "wait_timeout_s": wait_s}
        assert load_settings(text(choice=DECIDED, **more)).encode_job_s == job_s
    # Settings go from process to process as they were.
    assert load_settings(settings.model_dump_json()) == settings
    assert policy_of(load_settings(text())) is None


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


def test_a_key_that_is_gone_is_answered_with_what_is_used_instead() -> None:
    with pytest.raises(ConfigError, match=r"router\.workers is gone: use router\.envoy"):
        load_settings(text(workers=2))

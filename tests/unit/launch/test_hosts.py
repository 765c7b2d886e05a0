"""Instances that listen on an address of a network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError
from tests.unit.launch.plans import options, plan_of
from tests.unit.launch.test_plan import TEXT

OFF_HOST = "launch: {host: 10.0.0.2}\n"
SECRET = "secret_file: /etc/epd.secret\n"


def configs(text: str) -> list[InstanceConfig]:
    specs = [spec for spec in plan_of(text, "cpu").processes if spec.role != "router"]
    raw: list[Any] = [json.loads(options(spec)["--ec-transfer-config"]) for spec in specs]
    return [InstanceConfig.parse(config["ec_connector_extra_config"]) for config in raw]


def test_http_control_and_data_listen_where_the_file_says() -> None:
    text = TEXT + OFF_HOST + SECRET
    for spec in plan_of(text, "cpu").processes[:-1]:
        assert options(spec)["--host"] == "10.0.0.2"
        assert spec.url.startswith("http://10.0.0.2:")
    _, pd = configs(text)
    assert pd.control_address.startswith("tcp://10.0.0.2:")
    assert pd.data_address.startswith("tcp://10.0.0.2:")
    assert pd.host == "10.0.0.2"


@pytest.mark.parametrize(
    ("text", "path", "others_join"),
    [
        (TEXT + OFF_HOST + SECRET, "/etc/epd.secret", True),
        (TEXT, "/tmp/epd-00c0ffee/secret", False),
    ],
    ids=["the deployment's", "the run's"],
)
def test_every_part_is_told_where_the_secret_is_and_for_a_run_of_its_own_nobody_joins(
    text: str, path: str, others_join: bool
) -> None:
    assert {config.secret_file for config in configs(text)} == {path}
    router = json.loads(options(plan_of(text, "cpu").processes[-1])["--settings"])
    assert (router["secret_file"], router["registration"]) == (path, others_join)


def test_without_a_secret_an_address_of_a_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch.host 10\.0\.0\.2.*secret_file"):
        plan_of(TEXT + OFF_HOST, "cpu")


def test_a_path_that_does_not_encrypt_is_refused_on_a_network_that_is_not_trusted() -> None:
    text = TEXT + OFF_HOST + SECRET
    with pytest.raises(ConfigError, match=r"collective.*trusted_network"):
        plan_of(text + "transfer: {path: collective}\n", "cpu")
    plan_of(text + "transfer: {path: collective, trusted_network: true}\n", "cpu")
    plan_of(TEXT + "transfer: {path: collective}\n", "cpu")


@pytest.mark.parametrize(
    ("host", "words"), [("0.0.0.0", "every address"), ("gpu-7", "no IPv4"), ("::1", "no IPv4")]
)
def test_a_host_that_others_cannot_be_told_is_refused(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(TEXT + f"launch: {{host: '{host}'}}\n" + SECRET, "cpu")

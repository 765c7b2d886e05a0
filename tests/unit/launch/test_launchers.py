"""Launchers on a cluster, planned without one and without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_portable.launch import cli
from epd_portable.launch.plan.launchers import (
    FOLDER,
    HEAD,
    LauncherSpec,
    MostOwed,
    fullness,
    spread,
)
from epd_portable.launch.plan.request import PlanRequest

CONFIGS = Path(__file__).parents[3] / "configs"
JOINS = ("router.join=http://192.0.2.7:8000", "launch.host=192.0.2.1")


def request(config: str, *settings: str, hardware: str | None = None) -> PlanRequest:
    platform = None if hardware else "cpu"
    return PlanRequest.from_options(
        platform=platform, hardware=hardware, config=CONFIGS / config, overrides=settings
    )


def names(config: str, *settings: str) -> list[str]:
    return [name for name, _ in spread(request(config, *settings).load())]


def test_an_encoder_and_an_instance_that_answers_are_a_pair_where_a_path_within_a_node_pays() -> (
    None
):
    assert names("1e1pd.yaml") == ["pair-0"]
    assert names("1e3pd.yaml") == ["pair-0", "prefill-decode-1", "prefill-decode-2"]
    assert names("1e1pd.yaml", "transfer.path=shm", "instances.encode.count=2") == [
        "pair-0",
        "encode-1",
    ]
    assert names("1e1pd.yaml", "transfer.path=tcp") == ["encode-0", "prefill-decode-0"]


def test_every_instance_is_in_one_launcher() -> None:
    for config in ("1e1pd.yaml", "1e3pd.yaml", "1e1p1d.yaml", "replicas.yaml"):
        asked = request(config)
        wanted = asked.load().instances.counts
        found = dict.fromkeys(wanted, 0)
        for _, settings in spread(asked.load()):
            joined = asked.with_settings("secret_file=x", *JOINS, *settings).load()
            for role, count in joined.instances.counts.items():
                found[role] += count
        assert found == wanted


def test_a_launcher_needs_its_devices_of_one_node_and_of_the_profiles_kind() -> None:
    [(name, settings)] = spread(request("1e1pd.yaml", hardware="h200").load())
    spec = LauncherSpec.plan(
        request("1e1pd.yaml", hardware="h200"), name, *JOINS, *settings, secret="s"
    )
    assert spec.resources == {"GPU": 2, "accelerator_type:H200": 0.001}
    npu = LauncherSpec.plan(request("1e1pd.yaml", hardware="910b-64g"), "one")
    assert npu.resources == {"NPU": 2}
    cpu = LauncherSpec.plan(request("1e3pd.yaml"), "one")
    assert cpu.resources == {"CPU": 4}
    router = LauncherSpec.plan(request("1e3pd.yaml"), "router", resources=HEAD)
    assert router.resources == HEAD


def test_a_launcher_is_sent_its_file_and_secret_and_says_neither_on_its_command_line() -> None:
    spec = LauncherSpec.plan(request("1e1pd.yaml", "router.port=8123"), "one", *JOINS, secret="s3")
    assert spec.files == {
        "topology.yaml": (CONFIGS / "1e1pd.yaml").read_text("utf-8"),
        "secret": "s3",
    }
    assert f"{FOLDER}/topology.yaml" in spec.command
    assert {f"secret_file={FOLDER}/secret", "router.port=8123"} < set(spec.command)
    assert "s3" not in spec.command


def test_instances_of_two_launchers_on_one_host_have_different_names() -> None:
    planned = [
        request("1e1pd.yaml", "secret_file=x", *JOINS, f"launch.name={name}").plan_elsewhere(1)[1]
        for name in ("pair-0", "pair-1")
    ]
    first, second = ({spec.name for spec in plan.processes} for plan in planned)
    assert first == {"encode-0@pair-0", "prefill_decode-0@pair-0"}
    assert not first & second


def test_the_fuller_role_says_how_full_a_launcher_is() -> None:
    room_s = LauncherSpec.plan(request("1e3pd.yaml"), "one").room_s
    assert room_s == {"encode": 1.0, "prefill-decode": 12.0}
    apart = LauncherSpec.plan(
        request("1e1p1d.yaml"), "one", most=MostOwed(encode_s=0.3, answer_s=9.0)
    )
    assert apart.room_s == {"encode": 0.3, "prefill": 0.3, "decode": 9.0}
    assert fullness({}, room_s) == 0
    assert fullness({"encode": 0.5, "prefill-decode": 3.0}, room_s) == 0.5
    assert fullness({"encode": 0.5, "prefill-decode": 18.0}, room_s) == 1.5


def test_ray_that_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "epd_portable.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    ended = CliRunner().invoke(cli.main, ["stop", "--cluster", "auto"])
    assert ended.exit_code == 2
    assert "pip install 'epd-portable[ray]'" in ended.stderr

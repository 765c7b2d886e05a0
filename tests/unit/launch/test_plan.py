"""Content of a plan, and refusals; whole plans are in test_golden_plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.hardware import find_hardware
from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import ModelSource
from epd_portable.launch.plan.machine import Machine
from epd_portable.launch.plan.processes import plan_table
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.platforms.traits import TRAITS
from tests.unit.launch.plans import front, instance, options, plan_of

HUB = ModelSource(argument="org/m", served_name="org/m", is_folder=False)
TEXT = """
model: demo
engine_args: {max_model_len: 4096, limit_mm_per_prompt: {video: 0}}
platform:
  cpu: {engine_args: {dtype: bfloat16}}
"""
SECRET = "secret_file: /etc/epd.secret\n"
OFF_HOST = TEXT + "launch: {host: 10.0.0.2}\n"


def test_instance_without_encoder_accepts_only_embeddings() -> None:
    plan = plan_of(f"{TEXT}instances: {{prefill_decode: {{encoder: false}}}}")
    encode, pd, before = plan.processes
    limits = [json.loads(options(spec)["--limit-mm-per-prompt"]) for spec in (pd, before)]
    assert limits == [{"video": 0, "image": 0, "audio": 0}, {"video": 0}]
    assert ["--enable-mm-embeds" in spec.argv for spec in plan.processes] == [False, True, False]
    assert [instance(spec)["can_encode"] for spec in (encode, pd)] == [True, False]
    assert front(plan)["can_encode"] is False


FIVE = ("2", "3", "4", "5", "6")
TWO_PAIRS = "instances: {prefill_decode: {count: 2, tensor_parallel_size: 2}}"
SHARED = "instances: {encode: {devices: [3]}, prefill_decode: {devices: [3]}}"
ALL = ["2,3,4,5,6", "3,4,2,5,6", "5,6,2,3,4", "3,4,2,5,6"]
OWN = ["2", "3,4", "5,6", "3,4"]


@pytest.mark.parametrize(
    ("platform", "path", "text", "seen"),
    [
        # Where memory is opened by device each instance sees all, its own first.
        ("cuda", "auto", TWO_PAIRS, ALL),
        ("cuda", "ipc", TWO_PAIRS, ALL),
        ("cuda", "shm", TWO_PAIRS, OWN),
        ("cuda", "collective", TWO_PAIRS, OWN),
        ("npu", "auto", TWO_PAIRS, OWN),
        ("npu", "ipc", TWO_PAIRS, OWN),
        ("cuda", "auto", SHARED, ["3", "3", "3"]),
    ],
)
def test_visible_devices_of_an_instance(
    platform: str, path: str, text: str, seen: list[str | None]
) -> None:
    plan = plan_of(f"model: m\n{text}\ntransfer: {{path: {path}}}", platform, devices=FIVE)
    variable = TRAITS[platform].visible_devices_env or ""
    assert [spec.env.get(variable) for spec in plan.processes] == seen
    if text == TWO_PAIRS:
        assert [spec.devices for spec in plan.processes[:2]] == [("2",), ("3", "4")]
        assert options(plan.processes[1])["--tensor-parallel-size"] == "2"


def test_ranks_have_their_own_processes_and_rest() -> None:
    text = "model: m\ninstances: {prefill_decode: {tensor_parallel_size: 2}}"
    encode, pd, _ = plan_of(text, cores=(0, 1, 2, 3, 4, 5)).processes
    assert options(encode)["--distributed-executor-backend"].endswith(".UniProcExecutor")
    assert options(pd)["--distributed-executor-backend"].endswith(".EPDExecutor")
    assert pd.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|4,5"
    assert "OMP_NUM_THREADS" not in pd.env
    unbound = plan_of(text, cores=(0, 1))
    assert {spec.cores for spec in unbound.processes} == {()}
    for spec in unbound.processes[:2]:
        assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert spec.env["OMP_NUM_THREADS"] == spec.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert len(unbound.warnings) == 1 and "3 ranks for 2 CPU cores (0-1)" in unbound.warnings[0]


FLASH = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(
    ("text", "platform", "machine", "name", "value"),
    [
        ("engine_args: {enforce_eager: true}", "cpu", {}, "TORCH_COMPILE_DISABLE", "1"),
        ("engine_args: {enforce_eager: false}", "cpu", {}, "TORCH_COMPILE_DISABLE", None),
        (
            "instances: {encode: {engine_args: {enforce_eager: true}}}",
            *("cpu", {}, "TORCH_COMPILE_DISABLE", "1"),
        ),
        (
            "engine_args: {enforce_eager: true}\nenv: {TORCH_COMPILE_DISABLE: '0'}",
            *("cpu", {}, "TORCH_COMPILE_DISABLE", "0"),
        ),
        ("", "cuda", {"has_compiler": True}, FLASH, None),
        ("", "cuda", {"has_compiler": False}, FLASH, "0"),
        (f"env: {{{FLASH}: '1'}}", "cuda", {"has_compiler": False}, FLASH, "1"),
        ("", "cuda", {"model": HUB}, "HF_HUB_OFFLINE", None),
    ],
)
def test_variables_follow_from_the_file_and_the_machine(
    text: str, platform: str, machine: dict[str, Any], name: str, value: str | None
) -> None:
    encode = plan_of(f"model: m\n{text}", platform, **machine).processes[0]
    assert encode.env.get(name) == value


def test_the_most_special_argument_and_variable_win() -> None:
    text = """
    model: demo
    engine_args: {enable_prefix_caching: true, seed: 1, worker_cls: mine.Worker}
    env: {A: "1", VLLM_CPU_KVCACHE_SPACE: "4"}
    instances:
      prefill_decode: {engine_args: {seed: 2, distributed_executor_backend: mp}, env: {A: "2"}}
    """
    encode, pd, _ = plan_of(text).processes
    assert "--no-enable-prefix-caching" in options(encode)
    assert "--enable-prefix-caching" in options(pd)
    assert (options(encode)["--seed"], options(pd)["--seed"]) == ("1", "2")
    assert (encode.env["A"], pd.env["A"]) == ("1", "2")
    assert pd.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert options(pd)["--worker-cls"] == "mine.Worker"
    assert options(pd)["--distributed-executor-backend"] == "mp"


def test_encode_cache_and_queue_follow_the_file() -> None:
    queue = "instances: {encode: {max_queued_items: 7, host_cache_bytes: 0}}\n"
    encode, pd, _ = plan_of(f"{TEXT}{queue}front: {{max_body_bytes: 128MiB}}").processes
    found = instance(encode)
    assert (found["max_queued_items"], found["max_queued_bytes"]) == (7, 1 << 30)
    assert "host_cache_bytes" not in found
    assert not {"max_queued_items", "max_queued_bytes", "host_cache_bytes"} & instance(pd).keys()


@pytest.mark.parametrize("role", ["encode_prefill_decode", "encode_prefill"])
def test_job_bounds_of_encoding_pd_equal_those_of_encode(role: str) -> None:
    counts = {"encode": 0, "prefill_decode": 0, role: 2, "decode": int(role == "encode_prefill")}
    groups: dict[str, Any] = {name: {"count": count} for name, count in counts.items()}
    groups["encode"]["max_queued_items"] = 7
    plan = plan_of(f"{TEXT}instances: {groups}")
    found = next(each for each in plan.processes if each.name == f"{role}-0")
    assert instance(found)["max_queued_items"] == 7


def test_weights_labels_and_the_choice_reach_the_front() -> None:
    groups = "instances: {encode: {weight: 2.5, labels: {zone: east}}}\n"
    profile = "schedulingProfiles: [{name: decode, plugins: []}]"
    choice = f"front: {{choice: {{plugins: [{{type: decode-filter}}], {profile}}}}}"
    settings = front(plan_of(TEXT + groups + choice))
    found = [(each["weight"], each["labels"]) for each in settings["engines"]]
    assert found == [(2.5, {"zone": "east"}), (1.0, {})]
    assert settings["front"]["choice"]["plugins"][0]["type"] == "decode-filter"
    with pytest.raises(ConfigError, match="did you mean decode-filter"):
        plan_of(TEXT + choice.replace("decode-filter", "decode-filtr"))


JOINING = """
model: demo
secret_file: /etc/epd.secret
instances: {encode: {count: 2}, prefill_decode: {count: 0}}
launch: {host: 10.0.0.2, join: "http://10.0.0.1:8000"}
"""


@pytest.mark.parametrize(
    ("text", "platform", "said"),
    [
        (
            "model: m\ninstances: {encode: {cores: [0]}}",
            *("cuda", r"instances\.encode\.cores: platform cuda has no"),
        ),
        (
            "model: m\ninstances: {encode: {devices: [0]}}",
            *("cpu", r"instances\.encode\.devices: platform cpu has no"),
        ),
        (
            "model: m\ntransfer: {path: ipc}",
            *("cpu", r"transfer\.path: ipc .* platform cpu .* auto or shm"),
        ),
        (
            JOINING.replace("host: 10.0.0.2, ", ""),
            *("cuda", r"does not reach launch\.host 127\.0\.0\.1"),
        ),
        (OFF_HOST, "cpu", r"launch.host 10\.0\.0\.2.*secret_file"),
        (
            OFF_HOST + SECRET + "transfer: {path: collective}\n",
            *("cpu", r"collective.*trusted_network"),
        ),
        (TEXT + "launch: {host: 0.0.0.0}", "cpu", "every address"),
        (TEXT + "launch: {host: gpu-7}", "cpu", "no IPv4"),
        (TEXT + "launch: {host: '::1'}", "cpu", "no IPv4"),
    ],
)
def test_path_unfit_for_platform_or_network_is_refused(text: str, platform: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(text, platform, devices=("0", "1") if platform == "cuda" else None)


def test_listening_addresses_follow_the_file() -> None:
    plan = plan_of(OFF_HOST + SECRET + "transfer: {path: collective, trusted_network: true}\n")
    pd = instance(plan.processes[1])
    assert pd["control_address"].startswith("tcp://10.0.0.2:")
    assert pd["data_address"].startswith("tcp://10.0.0.2:")
    assert pd["host"] == "10.0.0.2"
    everywhere = plan_of("model: m\nfront: {host: 0.0.0.0}").processes[-1]
    assert everywhere.url == "http://127.0.0.1:8000"
    assert options(everywhere)["--host"] == "0.0.0.0"


@pytest.mark.parametrize("text", [TEXT + SECRET, TEXT])
def test_every_part_reads_the_secret_of_the_run(text: str) -> None:
    plan, path = plan_of(text), "/tmp/epd-00c0ffee/secret"
    assert {instance(spec)["secret_file"] for spec in plan.processes[:-1]} == {path}
    assert front(plan)["secret_file"] == path


def test_front_and_engines_send_their_spans_to_one_place() -> None:
    plan = plan_of(TEXT + "front: {tracing: {endpoint: 'http://otel:4318/'}}\n")
    for spec in plan.processes:
        assert options(spec)["--otlp-traces-endpoint"] == "http://otel:4318/v1/traces"
        assert spec.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
        assert spec.env["OTEL_SERVICE_NAME"] == spec.name


def test_a_plan_names_who_encodes() -> None:
    both = "model: demo\ninstances: {encode: {}, encode_prefill: {count: 2}, decode: {}}\n"
    text = plan_table(plan_of(both))
    assert "items are encoded by encode-0, encode_prefill-0, encode_prefill-1\n" in text
    assert "\nthe encoder cache of encode-0 takes " in text
    text = plan_table(plan_of("model: demo\ninstances: {prefill: {}, decode: {}}"))
    assert "items are encoded" not in text
    assert "KV goes to decode instances by NixlConnector" in text


def test_plan_table_names_the_hardware_profile(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("platform: npu\ndevice: Device X\ndevices_per_node: 2\n")
    for hardware, said in ((find_hardware(str(path), None), True), (None, False)):
        text = plan_table(plan_of("model: m", "npu", devices=("0", "1"), hardware=hardware))
        assert ("planned for x: Device X" in text, "planned for" in text) == (said, said)


STORE = "\nstore: {kind: redis, url: 'redis://me@cache:6379', password_file: /s/word}"


def test_store_reaches_every_instance_and_front_and_is_shown() -> None:
    plan = plan_of(TEXT + "secret_file: /s/secret" + STORE)
    for spec in plan.processes[:-1]:
        assert InstanceConfig.parse(instance(spec)).store is not None
    assert front(plan)["store"]["url"] == "redis://me@cache:6379"
    assert plan.as_json()["store"] == "redis at redis://me@cache:6379, at most 8192 MiB"
    assert "encoder outputs are kept by redis at redis://me@cache:6379" in plan_table(plan)
    assert not any("store" in warning for warning in plan.warnings)
    # Without a secret that outlives the run.
    [warning] = [each for each in plan_of(TEXT + STORE).warnings if "store" in each]
    assert "epd-launch secret" in warning


def test_joining_instances_are_named_by_host_and_have_no_front() -> None:
    plan = plan_of(JOINING, "cuda", devices=("0", "1"))
    names = ["encode-0@10.0.0.2", "encode-1@10.0.0.2"]
    assert [process.name for process in plan.processes] == names
    assert plan.url == "http://10.0.0.1:8000/v1"
    encode, _ = plan.processes
    assert instance(encode)["instance"] == names[0]
    assert [each["name"] for each in plan.members] == names
    assert plan.joins == ("http://10.0.0.1:8000",)
    assert "instances join http://10.0.0.1:8000" in plan_table(plan)


@pytest.mark.parametrize(
    ("platform", "encode", "cores", "devices"),
    [
        ("npu", "platform: cpu", [((0, 1, 2, 3),), ()], [(), ("0",)]),
        ("npu", "platform: cpu, cores: [3]", [((3,),), ()], [(), ("0",)]),
        ("cpu", "environment: other", [((0, 1),), ((2, 3),)], [(), ()]),
        ("cpu", "environment: other, cores: [3]", [((3,),), ((0, 1, 2),)], [(), ()]),
        ("cuda", "environment: other", [(), ()], [("0",), ("1",)]),
        ("cuda", "environment: other, devices: ['1']", [(), ()], [("1",), ("0",)]),
    ],
)
def test_separately_planned_encoders_share_cores_and_devices(
    platform: str,
    encode: str,
    cores: list[object],
    devices: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "t.yaml"
    config.write_text(f"model: demo\ninstances: {{encode: {{{encode}}}}}\n")
    request = PlanRequest.from_options(platform=platform, config=config)
    machine = Machine(devices=("0", "1"), cores=(0, 1, 2, 3))
    plan = request.plan(
        request.load(),
        "00c0ffee",
        machine,
        encode_machine=machine if platform == "npu" else None,
        temp_dir="/tmp/x",
        free=lambda *_: True,
    )
    by_name = {spec.name: spec for spec in plan.processes}
    engines = [by_name[name] for name in ("encode-0", "prefill_decode-0")]
    assert [each.cores for each in engines] == cores
    assert [each.devices for each in engines] == devices
    own = str(tmp_path / "other/bin/python") if "environment" in encode else sys.executable
    assert by_name["encode-0"].argv[0] == own
    of = platform if "environment" in encode else "cpu"
    assert by_name["encode-0"].apart == f"{of}, {own}"
    assert plan_table(plan).count(f"({of}, {own})") == 1
    assert [each["name"] for each in plan.members] == ["encode-0"]
    assert instance(by_name["prefill_decode-0"])["pool_bytes"] == 1 << 30
    assert [each["name"] for each in front(plan)["engines"]] == ["prefill_decode-0"]

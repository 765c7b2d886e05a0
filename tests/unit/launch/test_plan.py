"""What a plan is made of, and what is refused; whole plans are in test_golden_plans."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import render_arguments
from epd_portable.launch.plan.model import ModelSource
from epd_portable.launch.plan.text import plan_table
from epd_portable.media.limits import MediaLimits
from epd_portable.platforms.traits import TRAITS
from epd_portable.router.settings import load_settings
from tests.unit.launch.plans import connector, options, plan_of

HUB = ModelSource(argument="org/m", served_name="org/m", is_folder=False)

TOKEN = "epd_portable.vllm_plugin.instance_token.TokenMiddleware"
TEXT = """
model: demo
engine_args: {max_model_len: 4096, limit_mm_per_prompt: {video: 0}}
platform:
  cpu: {engine_args: {dtype: bfloat16}}
"""


def test_a_cpu_plan_in_full() -> None:
    plan = plan_of(TEXT, "cpu")
    encode, pd, router = plan.processes
    assert plan.url == "http://127.0.0.1:8000/v1"
    assert [spec.name for spec in plan.processes] == ["encode-0", "prefill_decode-0", "router"]
    assert [spec.role for spec in plan.processes] == ["encode", "prefill-decode", "router"]
    assert encode.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    common = {
        "--model": "/models/m",
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--scheduler-cls": "epd_portable.vllm_plugin.scheduler.make_scheduler",
        "--worker-cls": "epd_portable.vllm_plugin.worker.EPDCPUWorker",
        "--distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "--max-model-len": "4096",
        "--limit-mm-per-prompt": '{"video": 0}',
        "--middleware": TOKEN,
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "1",
    }
    assert options(encode) == common | {
        "--port": "20000",
        "--mm-encoder-only": "",
        "--no-enable-prefix-caching": "",
        "--no-async-scheduling": "",
        "--ec-transfer-config": options(encode)["--ec-transfer-config"],
    }
    assert options(pd) == common | {
        "--port": "20001",
        "--ec-transfer-config": options(pd)["--ec-transfer-config"],
    }
    assert encode.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MAX_IMAGE_PIXELS": "67108864",
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": "600",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "EPD_INSTANCE": "encode-0",
        "EPD_PLATFORM": "cpu",
        "TMPDIR": "/tmp/epd-00c0ffee",
    }
    assert pd.cores == ((2, 3),)
    assert pd.ports == {"http": 20001, "control": 20002, "data": 20003}
    assert pd.shm_name == "epd-00c0ffee-prefill_decode-0"
    assert encode.shm_name == ""
    assert router.argv[1:4] == ("-m", "epd_portable.router", "--settings")
    settings = load_settings(router.argv[4])
    assert settings.model == "m"
    assert settings.port == 8000
    assert [(one.name, one.role, one.url, one.control) for one in settings.instances] == [
        ("encode-0", "encode", "http://127.0.0.1:20000", ""),
        ("prefill_decode-0", "prefill-decode", "http://127.0.0.1:20001", "tcp://127.0.0.1:20002"),
    ]


def test_the_connector_of_each_instance_gets_settings_that_it_can_read() -> None:
    encode, pd, _ = plan_of(TEXT, "cpu").processes
    assert connector(encode)["ec_role"] == "ec_producer"
    assert connector(pd)["ec_role"] == "ec_consumer"
    for spec in (encode, pd):
        assert connector(spec)["ec_connector"] == "EPDConnector"
        module = connector(spec)["ec_connector_module_path"]
        assert module == "epd_portable.vllm_plugin.ec_connector"
    assert InstanceConfig.parse(connector(encode)["ec_connector_extra_config"]) == InstanceConfig(
        instance="encode-0",
        platform="cpu",
        secret_file="/tmp/epd-00c0ffee/secret",
        host_cache_bytes=256 << 20,
    )
    assert InstanceConfig.parse(connector(pd)["ec_connector_extra_config"]) == InstanceConfig(
        instance="prefill_decode-0",
        platform="cpu",
        control_address="tcp://127.0.0.1:20002",
        data_address="tcp://127.0.0.1:20003",
        pool="epd-00c0ffee-prefill_decode-0",
        pool_bytes=2**30,
        secret_file="/tmp/epd-00c0ffee/secret",
    )


BARE = (
    TEXT
    + """
transfer: {media: metadata}
instances: {prefill_decode: {encoder: false}}
"""
)


def test_an_instance_without_encoder_takes_embeddings_only_and_everybody_knows() -> None:
    encode, pd, router = plan_of(BARE, "cpu").processes
    limits = json.loads(pd.argv[pd.argv.index("--limit-mm-per-prompt") + 1])
    assert limits == {"video": 0, "image": 0, "audio": 0}
    assert "--enable-mm-embeds" in pd.argv
    assert "--enable-mm-embeds" not in encode.argv
    assert not connector(pd)["ec_connector_extra_config"]["can_encode"]
    assert connector(encode)["ec_connector_extra_config"]["can_encode"]
    settings = load_settings(router.argv[4])
    assert (settings.media, settings.local_encode) == ("metadata", False)


def test_the_router_is_told_what_becomes_of_media() -> None:
    *_, router = plan_of(TEXT, "cpu").processes
    settings = load_settings(router.argv[4])
    assert (settings.media, settings.local_encode) == ("concurrent", True)


def visible(text: str, platform: str) -> list[str | None]:
    """Return what each process of a plan for five devices sees of them."""
    variable = TRAITS[platform].visible_devices_env
    assert variable is not None
    plan = plan_of(text, platform, devices=("2", "3", "4", "5", "6"))
    return [spec.env.get(variable) for spec in plan.processes]


TWO_PAIRS = "model: m\ninstances: {prefill_decode: {count: 2, tensor_parallel_size: 2}}"


@pytest.mark.parametrize("path", ["auto", "ipc"])
def test_where_memory_is_opened_by_device_each_instance_sees_all_its_own_first(path: str) -> None:
    text = f"{TWO_PAIRS}\ntransfer: {{path: {path}}}"
    assert visible(text, "cuda") == ["2,3,4,5,6", "3,4,2,5,6", "5,6,2,3,4", None]
    # What it runs on is not what it sees.
    plan = plan_of(text, "cuda", devices=("2", "3", "4", "5", "6"))
    assert [spec.devices for spec in plan.processes[:2]] == [("2",), ("3", "4")]
    assert options(plan.processes[1])["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("platform", "path"),
    [("npu", "auto"), ("npu", "ipc"), ("cuda", "shm"), ("cuda", "tcp"), ("cuda", "collective")],
)
def test_elsewhere_each_instance_sees_its_own_devices_only(platform: str, path: str) -> None:
    assert visible(f"{TWO_PAIRS}\ntransfer: {{path: {path}}}", platform) == [
        "2",
        "3,4",
        "5,6",
        None,
    ]


def test_a_device_that_instances_share_is_seen_once() -> None:
    text = "model: m\ninstances: {encode: {devices: [3]}, prefill_decode: {devices: [3]}}"
    assert visible(text, "cuda") == ["3", "3", None]


def test_workers_of_several_ranks_have_processes_of_their_own_and_rest() -> None:
    plan = plan_of(
        "model: m\ninstances: {prefill_decode: {tensor_parallel_size: 2}}",
        "cpu",
        cores=tuple(range(6)),
    )
    encode, pd, _ = plan.processes
    assert options(encode)["--distributed-executor-backend"].endswith(".UniProcExecutor")
    assert options(pd)["--distributed-executor-backend"].endswith(".EPDExecutor")
    assert pd.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|4,5"
    assert "OMP_NUM_THREADS" not in pd.env


@pytest.mark.parametrize(
    ("written", "disabled"),
    [
        ("engine_args: {enforce_eager: true}", "1"),
        ("engine_args: {enforce_eager: false}", None),
        ("instances: {encode: {engine_args: {enforce_eager: true}}}", "1"),
        ("engine_args: {enforce_eager: true}\nenv: {TORCH_COMPILE_DISABLE: '0'}", "0"),
        ("env: {}", None),
    ],
)
def test_nothing_is_compiled_on_the_cpu_where_eager_is_asked_for(
    written: str, disabled: str | None
) -> None:
    encode = plan_of(f"model: m\n{written}", "cpu").processes[0]
    assert encode.env.get("TORCH_COMPILE_DISABLE") == disabled


def test_ranks_without_cores_of_their_own_have_one_thread_that_is_not_bound() -> None:
    plan = plan_of(
        "model: m\ninstances: {prefill_decode: {tensor_parallel_size: 2}}", "cpu", cores=(0, 1)
    )
    for spec in plan.processes[:2]:
        assert spec.cores == ()
        assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert len(plan.warnings) == 1 and "3 ranks for 2 CPU cores (0-1)" in plan.warnings[0]


def test_the_most_special_argument_and_variable_win() -> None:
    text = """
    model: demo
    engine_args: {enable_prefix_caching: true, seed: 1, worker_cls: mine.Worker}
    env: {A: "1", VLLM_CPU_KVCACHE_SPACE: "4"}
    instances:
      prefill_decode: {engine_args: {seed: 2, distributed_executor_backend: mp}, env: {A: "2"}}
    """
    encode, pd, _ = plan_of(text, "cpu").processes
    assert "--no-enable-prefix-caching" in options(encode)
    assert "--enable-prefix-caching" in options(pd)
    assert (options(encode)["--seed"], options(pd)["--seed"]) == ("1", "2")
    assert (encode.env["A"], pd.env["A"]) == ("1", "2")
    assert pd.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert options(pd)["--worker-cls"] == "mine.Worker"
    assert options(pd)["--distributed-executor-backend"] == "mp"


def test_the_queue_of_an_encode_instance_is_as_long_as_the_file_says() -> None:
    queue = "instances: {encode: {max_queued_items: 7}}\nrouter: {max_body_bytes: 128MiB}"
    encode, pd, _ = plan_of(TEXT + queue, "cpu").processes
    told = json.loads(options(encode)["--ec-transfer-config"])["ec_connector_extra_config"]
    assert (told["max_queued_items"], told["max_queued_bytes"]) == (7, 1 << 30)
    assert "max_queued" not in options(pd)["--ec-transfer-config"]


def test_every_instance_asks_for_the_token_before_all_other_middleware() -> None:
    plan = plan_of(TEXT.replace("{max_model_len", "{middleware: a.b, max_model_len"), "cpu")
    named = [
        [word for before, word in itertools.pairwise(spec.argv) if before == "--middleware"]
        for spec in plan.processes
    ]
    admission = "epd_portable.vllm_plugin.admission.AdmissionMiddleware"
    bounds = "epd_portable.vllm_plugin.media_bounds.MediaBoundsMiddleware"
    assert named == [["a.b", bounds, admission, TOKEN], ["a.b", bounds, TOKEN], []]


@pytest.mark.parametrize(("version", "bridged"), [((0, 23), True), ((0, 26), False), (None, False)])
def test_servers_that_do_not_know_the_transfer_parameters_get_a_bridge(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None, bridged: bool
) -> None:
    monkeypatch.setattr("epd_portable.launch.plan.installed.vllm_version", lambda: version)
    bridge = "epd_portable.vllm_plugin.params_bridge.ParamsMiddleware"
    encode, pd, _ = plan_of(TEXT, "cpu").processes
    assert [bridge in encode.argv, bridge in pd.argv] == [bridged, bridged]


def test_only_encode_instances_keep_copies_and_none_if_the_file_says_so() -> None:
    def kept(text: str) -> list[bool]:
        specs = plan_of(text, "cpu").processes[:2]
        return ["host_cache_bytes" in connector(one)["ec_connector_extra_config"] for one in specs]

    assert kept(TEXT) == [True, False]
    assert kept(TEXT + "instances: {encode: {host_cache_bytes: 0}}") == [False, False]


def test_limits_of_media_reach_the_router_and_the_instances() -> None:
    limits = {
        "max_item_pixels": 1,
        "max_request_pixels": 2,
        "max_media_seconds": 4.5,
    }
    memory = 1 << 30
    encode, pd, router = plan_of(
        TEXT + f"router: {limits | {'max_media_memory_bytes': memory}}", "cpu"
    ).processes
    for instance in (encode, pd):
        told = json.loads(options(instance)["--ec-transfer-config"])["ec_connector_extra_config"]
        assert told["media_limits"] == limits | {"max_memory_bytes": memory}
        assert InstanceConfig.parse(told).media_limits == MediaLimits(
            **limits, max_memory_bytes=memory
        )
    assert limits.items() <= json.loads(options(router)["--settings"]).items()


def test_weights_labels_and_the_choice_reach_the_router() -> None:
    groups = "instances: {encode: {weight: 2.5, labels: {zone: east}}}\n"
    profile = "schedulingProfiles: [{name: decode, plugins: []}]"
    choice = f"router: {{choice: {{plugins: [{{type: decode-filter}}], {profile}}}}}"
    router = plan_of(TEXT + groups + choice, "cpu").processes[-1]
    told = json.loads(options(router)["--settings"])
    assert [(each["weight"], each["labels"]) for each in told["instances"]] == [
        (2.5, {"zone": "east"}),
        (1.0, {}),
    ]
    assert told["choice"]["plugins"][0]["type"] == "decode-filter"
    with pytest.raises(ConfigError, match="did you mean decode-filter"):
        plan_of(TEXT + choice.replace("decode-filter", "decode-filtr"), "cpu")


def test_a_model_from_the_hub_may_be_downloaded() -> None:
    assert "HF_HUB_OFFLINE" not in plan_of(TEXT, "cuda", model=HUB).processes[0].env


@pytest.mark.parametrize(("platform", "key"), [("cuda", "cores"), ("cpu", "devices")])
def test_a_list_that_the_platform_has_no_use_for_is_refused(platform: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"instances\.encode\.{key}: platform {platform} has no"):
        plan_of(f"model: m\ninstances: {{encode: {{{key}: [0]}}}}", platform)


def test_a_path_through_device_memory_is_refused_where_devices_have_none() -> None:
    text = "model: m\ntransfer: {path: ipc}"
    with pytest.raises(ConfigError, match=r"transfer\.path: ipc .* platform cpu .* auto or shm"):
        plan_of(text, "cpu")
    assert plan_of(text, "npu").processes


def test_a_wildcard_host_is_probed_on_the_loopback_address() -> None:
    router = plan_of("model: m\nrouter: {host: 0.0.0.0}", "cpu").processes[-1]
    assert router.url == "http://127.0.0.1:8000"
    assert load_settings(router.argv[4]).host == "0.0.0.0"


def test_arguments_become_flags() -> None:
    arguments: dict[str, Any] = {
        "a_b": 1,
        "yes": True,
        "no": False,
        "none": None,
        "mapping": {"x": [1]},
        "text": "t u",
    }
    assert render_arguments(arguments) == [
        *("--a-b", "1", "--yes", "--no-no", "--mapping", '{"x": [1]}', "--text", "t u")
    ]


def test_engines_that_cannot_compile_are_told_to_do_without_unless_the_file_says_otherwise() -> (
    None
):
    name = "VLLM_USE_FLASHINFER_SAMPLER"

    def told(extra: str, *, has_compiler: bool) -> set[str | None]:
        made = plan_of(TEXT + extra, "cuda", has_compiler=has_compiler)
        return {spec.env.get(name) for spec in made.processes if spec.role != "router"}

    assert told("", has_compiler=True) == {None}
    assert told("", has_compiler=False) == {"0"}
    assert told(f'env: {{{name}: "1"}}', has_compiler=False) == {"1"}


def test_engines_send_their_spans_where_the_router_does() -> None:
    traced = TEXT + "router: {tracing: {endpoint: 'http://otel:4318/'}}\n"
    plan = plan_of(traced, "cpu")
    for spec in plan.processes:
        if spec.role == "router":
            settings = load_settings(spec.argv[-1])
            assert settings.tracing.endpoint == "http://otel:4318/"
            continue
        assert options(spec)["--otlp-traces-endpoint"] == "http://otel:4318/v1/traces"
        assert spec.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
        assert spec.env["OTEL_SERVICE_NAME"] == spec.name
    for spec in plan_of(TEXT, "cpu").processes:
        assert "--otlp-traces-endpoint" not in spec.argv
        assert "OTEL_SERVICE_NAME" not in spec.env


STORE = "\nstore: {kind: redis, url: 'redis://me@cache:6379', password_file: /s/word}"


def test_a_store_reaches_every_instance_and_the_router_and_is_told() -> None:
    plan = plan_of(TEXT + "secret_file: /s/secret" + STORE, "cpu")
    *instances, router = plan.processes
    for spec in instances:
        told = json.loads(options(spec)["--ec-transfer-config"])["ec_connector_extra_config"]
        assert InstanceConfig.parse(told).store is not None
    settings = load_settings(options(router)["--settings"])
    assert settings.store is not None and settings.store.url == "redis://me@cache:6379"
    assert plan.as_json()["store"] == "redis at redis://me@cache:6379, at most 8192 MiB"
    assert "encoder outputs are kept by redis at redis://me@cache:6379" in plan_table(plan)
    assert not any("store" in warning for warning in plan.warnings)


def test_a_store_without_a_secret_that_outlives_the_run_is_warned_of() -> None:
    [warning] = [each for each in plan_of(TEXT + STORE, "cpu").warnings if "store" in each]
    assert "epd-launch secret" in warning


def test_without_a_store_nothing_is_said_of_one() -> None:
    plan = plan_of(TEXT, "cpu")
    assert "store" not in plan.as_json()
    assert all('"store"' not in word for spec in plan.processes for word in spec.argv)


JOINING = """
model: demo
secret_file: /etc/epd.secret
instances: {encode: {count: 2}, prefill_decode: {count: 0}}
router: {join: "http://10.0.0.1:8000"}
launch: {host: 10.0.0.2}
"""


def test_instances_that_join_have_names_of_their_host_and_a_registrar_for_a_router() -> None:
    plan = plan_of(JOINING, "cuda", devices=("0", "1"))
    names = ["encode-0@10.0.0.2", "encode-1@10.0.0.2"]
    assert [process.name for process in plan.processes] == [*names, "registrar"]
    assert plan.url == "http://10.0.0.1:8000/v1"
    encode, _, registrar = plan.processes
    assert connector(encode)["ec_connector_extra_config"]["instance"] == names[0]
    settings = json.loads(registrar.argv[-1])
    told = [(each["name"], each["role"], each["url"]) for each in settings["instances"]]
    assert told[0] == (names[0], "encode", encode.url) and encode.url.startswith("http://10.0.0.2:")
    assert settings["routers"] == [*registrar.router_urls] == ["http://10.0.0.1:8000"]
    assert registrar.url.startswith("http://127.0.0.1:")


def test_a_launcher_that_others_cannot_reach_does_not_join_a_router_elsewhere() -> None:
    text = JOINING.replace("launch: {host: 10.0.0.2}", "")
    with pytest.raises(ConfigError, match=r"does not reach launch\.host 127\.0\.0\.1"):
        plan_of(text, "cuda", devices=("0", "1"))

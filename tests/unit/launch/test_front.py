"""Commands of the front and its engines."""

from __future__ import annotations

import json

import pytest
import yaml

from epd_portable.config.document import dotted
from epd_portable.config.front import FrontSection
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.file_checks import engine_settings
from epd_portable.launch.plan.processes import Plan
from epd_portable.platforms.traits import TRAITS
from tests.unit.launch.plans import options, plan_of

CHOICE = "{plugins: [{type: weight-scorer}], schedulingProfiles: [{name: decode, plugins: []}]}"
TLS = "tls_cert_file: /c.pem, tls_key_file: /k.pem"
KEYS = {
    "host": ("host: 0.0.0.0", "--host 0.0.0.0"),
    "port": ("port: 9000", "--port 9000"),
    "tls_cert_file": (TLS, "--ssl-certfile /c.pem"),
    "tls_key_file": (TLS, "--ssl-keyfile /k.pem"),
    "cors_origins": ("cors_origins: ['https://a.example']", '["https://a.example"]'),
    "item_outcomes": ("item_outcomes: true", '"item_outcomes": true'),
    "max_body_bytes": ("max_body_bytes: 1MiB", '"max_body_bytes": 1048576'),
    "max_bodies_bytes": ("max_bodies_bytes: 2GiB", '"max_bodies_bytes": 2147483648'),
    "elastic_encode": ("elastic_encode: false", '"elastic_encode": false'),
    "choice": (f"choice: {CHOICE}", '"choice": {"plugins": [{"type": "weight-scorer"}]'),
    "gateway_keys_file": ("gateway_keys_file: /keys", '"gateway_keys_file": "/keys"'),
    "encode_order": ("encode_order: sequential", '"encode_order": "sequential"'),
    "partial_results": ("partial_results: true", '"partial_results": true'),
    "access_log": ("access_log: /a.log", '"access_log": "/a.log"'),
    "tracing": ("tracing: {endpoint: 'http://a.example'}", "--otlp-traces-endpoint http://a.exam"),
    "api_keys_file": ("api_keys_file: keys", '"api_keys_file": "keys"'),
    "admission": ("admission: {encode: {max_items: 4}}", '"admission": {"encode": {"max_items": 4'),
    "media": (
        "media: {max_items: 3, max_item_pixels: 1234, max_request_pixels: 567890, max_seconds: 77, "
        "max_memory_bytes: 65MiB, urls: {allowed_domains: ['*'], max_bytes: 1MiB}}",
        '"max_items": 3, "max_item_pixels": 1234, "max_request_pixels": 567890, '
        '"max_seconds": 77.0, "max_memory_bytes": 68157440',
    ),
    "drain_s": ("drain_s: 41.5", "--shutdown-timeout 42"),
}
"""Keys of `front`: what a file says, and what that makes of the front's command."""


def planned(extra: str = "") -> Plan:
    return plan_of(f"model: demo\n{extra}")


def test_api_servers_share_bounds_and_are_known_to_engines() -> None:
    *engines, front = planned(
        "engine_args: {api_server_count: 2}\nfront: {max_bodies_bytes: 1GiB}\n"
        "instances: {encode: {max_queued_items: 5}}"
    ).processes
    settings = json.loads(front.argv[4])
    assert len(settings["sockets"]) == 2
    assert all(json.loads(each.argv[3]) == settings["sockets"] for each in engines)
    assert settings["engines"][0]["max_queued_items"] == 3
    assert settings["front"]["max_bodies_bytes"] == 512 << 20
    assert options(front)["--api-server-count"] == "2"


def test_front_has_the_cores_that_no_engine_has_or_may_use_all() -> None:
    lists = "instances: {encode: {cores: [0]}, prefill_decode: {cores: [1]}}"
    *_, beside = plan_of(f"model: demo\n{lists}").processes
    *_, among = plan_of(f"model: demo\n{lists}", cores=(0, 1)).processes
    assert (beside.cores, among.cores) == (((2, 3),), ())


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            "instances: {encode: {engine_args: {api_server_count: 2}}}",
            "encode.engine_args.api_serv",
        ),
        ("instances: {encode: {engine_args: {media_io_kwargs: {}}}}", "set it in engine_args"),
        ("instances: {encode: {engine_args: {mm_tensor_ipc: torch_shm}}}", "torch_shm"),
        ("engine_args: {mm_tensor_ipc: torch_shm}", "torch_shm"),
    ],
)
def test_server_arguments_unknown_to_engines_are_refused(extra: str, problem: str) -> None:
    ((key, found),) = engine_settings(TRAITS["cpu"], yaml.safe_load(extra))
    assert problem in f"{dotted(key)} {found}"


@pytest.mark.parametrize("name", FrontSection.model_fields)
def test_a_key_of_the_file_reaches_the_front(name: str) -> None:
    said, found = KEYS[name]
    shared = "instances: {encode: {cores: [0]}, prefill_decode: {cores: [0]}}"
    assert found in " ".join(planned(f"{shared}\nfront: {{{said}}}").processes[-1].argv)
    assert found not in " ".join(planned(shared).processes[-1].argv)


def test_encode_instances_join_fronts_as_engines_without_servers() -> None:
    joining = (
        "model: demo\nsecret_file: secret\nlaunch: {host: 10.0.0.2, join: 'http://10.0.0.1:8000'}\n"
        "instances: {encode: {labels: {zone: b}}, prefill_decode: {count: 0}}\n"
    )
    plan = plan_of(joining)
    (engine,) = plan.processes
    assert engine.argv[1:3] == ("-m", "epd_portable.engine.remote")
    places = json.loads(engine.argv[3])
    hub = f"tcp://10.0.0.2:{engine.ports['jobs']}"
    assert places == {
        "role": "encode",
        "hub": hub,
        "plain": False,
        "page": ["10.0.0.2", engine.ports["http"]],
    }
    assert engine.url == f"http://10.0.0.2:{engine.ports['http']}"
    (member,) = plan.members
    assert (member["url"], member["labels"]["zone"]) == (hub, "b")
    (plain,) = plan_of(f"{joining}transfer: {{trusted_network: true}}").members
    assert plain["url"] == f"plain+{hub}"


def test_prefill_instances_join_with_their_control_address() -> None:
    joining = (
        "model: demo\nsecret_file: secret\nlaunch: {host: 10.0.0.2, join: 'http://10.0.0.1:8000'}\n"
        "transfer: {trusted_network: true}\ninstances: {prefill: {}, encode_prefill: {}}\n"
    )
    plan = plan_of(joining)
    assert [each["role"] for each in plan.members] == ["prefill", "encode-prefill"]
    for engine, member in zip(plan.processes, plan.members, strict=True):
        assert json.loads(engine.argv[3])["role"] == engine.role
        assert member["control"] == f"tcp://10.0.0.2:{engine.ports['control']}"
        assert engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.2"
        (config,) = (each for each in engine.argv if "kv_producer" in each)
        assert json.loads(config)["kv_connector"] == "NixlConnector"
    with pytest.raises(ConfigError, match="trusted_network"):
        plan_of(joining.replace("true", "false"))

"""Reading topology files: overlays, overrides and complaints."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.load import load_topology, parse_topology
from epd_portable.config.quantities import parse_size
from epd_portable.config.roles import Role
from epd_portable.errors import ConfigError


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "cpu", overrides=overrides, source="t.yaml")
    return [line.strip() for line in str(caught.value).splitlines()]


def test_overlay_of_chosen_platform_is_laid_over_rest_key_by_key() -> None:
    text = """
    model: demo
    engine_args: {max_model_len: 4096, dtype: auto}
    platform:
      cpu: {engine_args: {dtype: bfloat16}, front: {port: 9001}}
      npu: {engine_args: {dtype: float16}}
    """
    assert parse_topology(text, "cpu").engine_args == {"max_model_len": 4096, "dtype": "bfloat16"}
    assert parse_topology(text, "npu").engine_args["dtype"] == "float16"
    assert parse_topology(text, "cuda").engine_args["dtype"] == "auto"
    assert parse_topology(text, "cpu").front.port == 9001


def test_overrides_win_over_overlay_and_last_over_first() -> None:
    text = (
        "model: demo\ninstances: {prefill: {}, decode: {}}\n"
        "platform: {cpu: {front: {port: 9001}, instances: {prefill: {count: 2}}}}"
    )
    overrides = ["front.port=1", "front.port=2", "instances.decode.count=3"]
    overrides += ["engine_args.x={a: [1, true]}", "model=m=n"]
    topology = parse_topology(text, "cpu", overrides=overrides)
    assert topology.front.port == 2
    assert (topology.instances.prefill.count, topology.instances.decode.count) == (2, 3)
    assert topology.engine_args == {"x": {"a": [1, True]}}
    assert topology.model == "m=n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "platform:\n  cpu: {front: {hots: x}}",
            "platform.cpu.front.hots (line 3): unknown key; did you mean host?",
        ),
        # Overlays of other platforms are checked too.
        (
            "platform:\n  npu: {transfer: {lease_s: -1}}",
            "platform.npu.transfer.lease_s (line 3): input should be greater than 0",
        ),
        (
            "instances: {encode: {count: 0}, prefill_decode: {encoder: false}}",
            "encoder is false, and no encode instance is here: raise encode.count",
        ),
        ("instances: {encode: {encoder: false}}", "instances.encode.encoder (line 2): unknown key"),
        (
            "instances:\n  encode: {cuont: 2}",
            "instances.encode.cuont (line 3): unknown key; did you mean count?",
        ),
        (
            "instances: {encode-prefill: {}}",
            "instances.encode-prefill (line 2): unknown key; did you mean encode_prefill?",
        ),
        (
            "instances: {both: {}}",
            "instances.both (line 2): unknown key; known are encode, prefill, decode",
        ),
        ("instances: {prefill: {}}", "no instance generates"),
        ("instances: {decode: {}}", "no instance prefills for the decode instances"),
        ("instances: {encode_prefill: {}}", "no instance generates"),
        ("instances: {encode: {}, decode: {}}", "no instance takes the items"),
        (
            "instances: {prefill_decode: {encoder: false}, encode_prefill_decode: {}}",
            "prefill_decode.encoder is false",
        ),
        ("instances: {encode: {count: 0}, prefill_decode: {count: 0}}", "no instance generates"),
        (
            "instances: {prefill: {}, prefill_decode: {}}",
            "compute for decode instances, and there are none",
        ),
        ("engine_args: {served_model_name: 2}", "write served_model_name at the top of the file"),
        (
            "instances: {encode: {engine_args: {pipeline_parallel_size: 2}}}",
            "this version does not support pipeline parallelism",
        ),
        (
            "engine_args: {--pipeline-parallel-size: 2}",
            "write pipeline_parallel_size: names of engine arguments",
        ),
        ("engine_args: {data_parallel_size: 2}", "raise count in instances instead"),
        ("engine_args: {data_parallel_rank: 2}", "raise count in instances instead"),
        ("engine_args: {config: 2}", "write the arguments into this file"),
        ("front: {zzz: 1}", "front.zzz (line 2): unknown key; known are host, port, tls_cert_file"),
        (
            "engine_args: {x: 2024-01-01}",
            "engine_args.x (line 2): input was not a valid JSON value",
        ),
        (
            "front:\n  choice:\n    schedulingProfiles:\n    - {name: a, plugins: 3}",
            "front.choice.schedulingProfiles.0.plugins (line 5)",
        ),
    ],
)
def test_a_problem_is_named_where_it_was_written(text: str, line: str) -> None:
    assert any(line in each for each in problems(f"model: demo\n{text}"))


def test_names_similar_to_those_of_the_launcher_are_allowed() -> None:
    text = "model: demo\nengine_args: {max_model_len: 1, port_range: 2, decode_x: 3, hosts: 4}"
    assert len(parse_topology(text, "cpu").engine_args) == 4


@pytest.mark.parametrize(
    ("instances", "counts"),
    [
        ("{}", {"encode": 1, "prefill_decode": 1}),
        ("{encode: {count: 2}}", {"encode": 2, "prefill_decode": 1}),
        ("{encode: {}, prefill: {}, decode: {count: 2}}", {"encode": 1, "prefill": 1, "decode": 2}),
        ("{encode_prefill: {}, decode: {}}", {"encode_prefill": 1, "decode": 1}),
        ("{encode_prefill_decode: {count: 2}}", {"encode_prefill_decode": 2}),
        (
            "{encode_prefill_decode: {}, prefill_decode: {}}",
            {"encode_prefill_decode": 1, "prefill_decode": 1},
        ),
        (
            "{encode: {}, prefill: {}, decode: {}, encode_prefill_decode: {}}",
            {"encode": 1, "prefill": 1, "decode": 1, "encode_prefill_decode": 1},
        ),
        ("{prefill_decode: {encoder: false}}", {"encode": 1, "prefill_decode": 1}),
        (
            "{encode: {count: 0}, prefill_decode: {encoder: false}}\nsecret_file: s",
            {"prefill_decode": 1},
        ),
    ],
)
def test_roles_are_those_that_are_named(instances: str, counts: dict[str, int]) -> None:
    found = parse_topology(f"model: demo\ninstances: {instances}", "cpu").instances
    assert {name: group.count for name, group in found if group.count} == counts


def test_own_file_precedes_a_file_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("1e1pd.yaml", "configs/1e1pd.yaml"):
        assert load_topology(Path(name), "cpu").model == "demo"
    for name in ("../1e1pd.yaml", "elsewhere/1e1pd.yaml", "/1e1pd.yaml"):
        with pytest.raises(ConfigError, match="no such file"):
            load_topology(Path(name), "cpu")
    (tmp_path / "1e1pd.yaml").write_text("model: mine")
    assert load_topology(Path("1e1pd.yaml"), "cpu").model == "mine"


def test_file_of_encode_and_prefill_joins_fronts_elsewhere() -> None:
    text = "model: demo\ninstances: {encode: {count: 2}, prefill_decode: {count: 0}}\n"
    join = "launch: {join: http://10.0.0.1:8000/}\n"
    assert any("no instance takes the items" in line for line in problems(text))
    assert any("set secret_file" in line for line in problems(text + join))
    secret = "secret_file: /tmp/secret\n"
    assert parse_topology(text + join + secret, "cpu").launch.join == ["http://10.0.0.1:8000"]
    none = "model: demo\ninstances: {encode: {count: 0}, prefill_decode: {count: 0}}\n"
    assert any("none to join" in line for line in problems(none + join + secret))
    assert any("no instance generates" in line for line in problems(none + secret))
    prefill = "model: demo\ninstances: {prefill: {count: 1}, encode_prefill: {count: 1}}\n"
    assert parse_topology(prefill + join + secret, "cpu").launch.join
    decode = "model: demo\ninstances: {decode: {}}\n"
    assert parse_topology(decode + secret, "cpu").instances.decode.count == 1
    more = text.replace("prefill_decode: {count: 0}", "decode: {}")
    assert any("decode cannot join" in line for line in problems(more + join + secret))
    both = text.replace("prefill_decode: {count: 0}", "prefill_decode: {}")
    assert any("prefill_decode cannot join" in line for line in problems(both + join + secret))
    wrong = problems(text + secret + "launch: {join: 10.0.0.1}")
    assert any("'10.0.0.1' is no URL; write http://10.0.0.1" in line for line in wrong)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: demo\n1: 2", "key 1 under the top is not text"),
        ("model: \x00", "not valid YAML"),
        ("model: &a {b: *a}", "nested more than 32 deep, or refers to itself"),
        ('env: {A: "a\\0b"}', "line 1: 'a\\x00b' has a NUL character; remove it"),
        ("model: !!python/name:os.system x", "line 1: 'x': could not determine a constructor"),
        ("model: 2024-99-99", "line 1: '2024-99-99': month must be in 1..12"),
        ("b: &b {port: 1}\nfront: {<<: *b}", "line 2: merge keys (<<) are not read"),
    ],
)
def test_file_without_mapping_is_refused_with_its_place(text: str, complaint: str) -> None:
    assert complaint in "\n".join(problems(text))


def test_devices_are_indices_or_uuids() -> None:
    topology = parse_topology("model: m\ninstances: {encode: {devices: [0, GPU-a1]}}", "cuda")
    assert topology.instances.encode.devices == ["0", "GPU-a1"]


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("7", 7), ("2KiB", 2048)]
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "role", "gets"),
    [
        ("instances: {encode_prefill: {}, decode: {}}", "encode-prefill", False),
        ("instances: {encode_prefill: {count: 2}, decode: {}}", "encode-prefill", True),
        ("instances: {encode_prefill: {}, encode: {}, decode: {}}", "encode-prefill", True),
        ("instances: {encode_prefill_decode: {}}\nsecret_file: s", "encode-prefill-decode", True),
        ("instances: {prefill: {}, decode: {}}", "prefill", True),
        ("instances: {encode_prefill: {count: 2}, decode: {}}", "decode", False),
    ],
)
def test_encoding_instance_gets_items_of_other_encoders(text: str, role: Role, gets: bool) -> None:
    assert parse_topology(f"model: demo\n{text}", "cpu").gets_items(role) is gets


def test_choice_file_is_read_with_the_topology(tmp_path: Path) -> None:
    choice, path = tmp_path / "choice.yaml", tmp_path / "t.yaml"
    path.write_text(f"model: demo\nfront: {{choice: {{file: {choice}}}}}\n")
    with pytest.raises(ConfigError, match=r"choice.yaml: No such file"):
        load_topology(path, "cpu")
    choice.write_text("kind: EndpointPickerConfig\nschedulingProfiles: [{name: a, plugins: []}]\n")
    read = load_topology(path, "cpu").front.choice
    assert read is not None and read.file is None
    assert [profile.name for profile in read.schedulingProfiles] == ["a"]
    choice.write_text("schedulingProfiles:\n- {name: a, plugin: []}\n")
    with pytest.raises(ConfigError, match=r"choice.yaml: 2 problems\n(.|\n)*did you mean plugins"):
        load_topology(path, "cpu")


def test_partner_of_a_wrong_value_is_not_reported() -> None:
    lines = problems("model: demo\nfront: {tls_cert_file: 3, tls_key_file: b}\n")
    assert len(lines) == 2
    assert "tls_cert_file" in lines[1] and "belong together" not in lines[1]


def test_every_wrong_key_is_named_at_once() -> None:
    raw = {"platform": "tpu", "lease_s": 0, "pool_byte": 1, "wait_timeout_s": -1}
    with pytest.raises(ConfigError) as caught:
        InstanceConfig.parse(raw)
    for key in ("instance", "platform", "lease_s", "pool_byte", "wait_timeout_s"):
        assert f"{key}:" in str(caught.value)

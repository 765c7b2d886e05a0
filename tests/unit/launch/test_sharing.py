"""Instances on one device: their order, their memory, and what is said of both."""

from __future__ import annotations

import pytest

from epd_portable.errors import ConfigError
from epd_portable.launch.plan.processes import Plan, plan_table
from tests.unit.launch.plans import plan_of

SHARE = '{CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: "30"}'
ONE_DEVICE = """
instances:
  encode:
    devices: [0]
    engine_args: {gpu_memory_utilization: 0.2}
    env: {CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: "30"}
  prefill_decode:
    devices: [0]
    engine_args: {gpu_memory_utilization: 0.6, kv_cache_memory_bytes: 1024}
"""


def plan(text: str, platform: str = "cuda") -> Plan:
    return plan_of(f"model: m\n{text}", platform, devices=("0", "1"))


def shared(made: Plan) -> list[str]:
    return [device for device, names in made.devices.items() if len(names) > 1]


def after(made: Plan) -> dict[str, tuple[str, ...]]:
    return {spec.name: spec.after for spec in made.processes if spec.after}


def test_instances_on_devices_of_their_own_start_at_once() -> None:
    made = plan("")
    assert (after(made), shared(made), made.warnings) == ({}, [], ())
    assert made.devices == {"0": ("encode-0",), "1": ("prefill_decode-0",)}
    assert plan("", "cpu").devices == {}


def test_instance_starts_after_its_neighbours_on_devices() -> None:
    made = plan("""
engine_args: {gpu_memory_utilization: 0.3, kv_cache_memory_bytes: 1}
instances:
  encode: {count: 2, devices: [0, 1]}
  prefill_decode: {count: 2, tensor_parallel_size: 2, devices: [0, 1, 1, 0]}
""")
    decoders = ("prefill_decode-0", "prefill_decode-1")
    assert after(made) == {
        "prefill_decode-1": decoders[:1],
        "encode-0": decoders,
        "encode-1": decoders,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "engine_args: {kv_cache_memory_bytes: 1}\n"
            f"instances: {{encode: {{devices: [0], env: {SHARE}}},"
            " prefill_decode: {devices: [0]}}",
            ["want more memory than it has", "to 1.84 (prefill_decode-0 0.92, encode-0 0.92)"],
        ),
        (
            ONE_DEVICE.replace(", kv_cache_memory_bytes: 1024", ""),
            [
                "when prefill_decode-0 is started again it takes what encode-0 need",
                "set kv_cache_memory_bytes in instances.prefill_decode.engine_args",
            ],
        ),
    ],
)
def test_memory_that_is_not_divided_well_is_warned_of(text: str, said: list[str]) -> None:
    (warning,) = plan(text).warnings
    assert warning.startswith("device 0: ") and all(each in warning for each in said)


def test_instances_that_compute_in_turns_are_warned_of() -> None:
    (warning,) = plan(ONE_DEVICE.replace(SHARE, "{}")).warnings
    assert warning.startswith(
        "device 0: prefill_decode-0 and encode-0 compute in turns and without priorities, "
    )
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in instances.*.env" in warning
    assert "nvidia-cuda-mps-control -d" in warning
    (warning,) = plan(ONE_DEVICE.replace(SHARE, "{}"), "npu").warnings
    assert "EPD_COMPUTE_SHARE" in warning


def test_pair_on_one_device_is_refused_if_its_library_refuses() -> None:
    text = f"{ONE_DEVICE}\ntransfer: {{path: collective}}"
    with pytest.raises(ConfigError, match=r"prefill_decode-0 and encode-0 are on device 0: nccl"):
        plan(text)
    assert shared(plan(text, "npu")) == ["0"]
    apart = text.replace("devices: [0]", "devices: [1]", 1)
    assert shared(plan(apart)) == []


@pytest.mark.parametrize(
    ("roles", "refused"),
    [(("encode_prefill_decode", "prefill_decode"), True), (("encode_prefill", "decode"), False)],
)
def test_only_instances_between_which_items_go_make_a_group(
    roles: tuple[str, ...], refused: bool
) -> None:
    each = "{devices: [0], engine_args: {gpu_memory_utilization: 0.3}}"
    text = "\n".join(("instances:", *(f"  {role}: {each}" for role in roles)))
    text += "\ntransfer: {path: collective}"
    if refused:
        with pytest.raises(ConfigError, match="makes no group of ranks on one device"):
            plan(text)
    else:
        assert shared(plan(text)) == ["0"]


def test_plan_for_people_shows_the_order_of_starts_on_a_device() -> None:
    made = plan(ONE_DEVICE)
    assert made.devices == {"0": ("prefill_decode-0", "encode-0")}
    text = plan_table(made)
    starts = [line.split()[-2:] for line in text.splitlines() if line.startswith("encode-0 ")]
    assert starts == [["after", "prefill_decode-0"]]

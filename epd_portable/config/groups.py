"""The instances of the topology file, by role, and their engine arguments."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from epd_portable.config.instance import PlatformName
from epd_portable.config.quantities import Section, Size
from epd_portable.config.roles import ROLES, Role, group_of

LAUNCHER_OWNED_ARGS = {
    "host": "write launch.host, the address of this machine that instances listen on",
    "port": "ports of instances are chosen by the launcher; the public one is front.port",
    "model": "write the model at the top of the file",
    "served_model_name": "write served_model_name at the top of the file",
    "tensor_parallel_size": "write tensor_parallel_size next to count in instances",
    "ec_transfer_config": "the launcher writes it; its settings are under transfer",
    "pipeline_parallel_size": "this version does not support pipeline parallelism",
    "prefill_context_parallel_size": "this version does not support it",
    "data_parallel_size": "raise count in instances instead",
    "config": "write the arguments into this file, where they are checked",
}
"""Engine arguments that the launcher writes itself or refuses, and what to do instead."""


def _check_engine_arg_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        wanted = re.sub(r"[^a-z0-9]+", "_", name.lower().strip("-"))
        raise ValueError(f"write {wanted}: names of engine arguments have underscores, no dashes")
    owned = "data_parallel_size" if name.startswith("data_parallel_") else name
    if remedy := LAUNCHER_OWNED_ARGS.get(owned):
        raise ValueError(f"{name} cannot be set here: {remedy}")
    return name


def _device(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


EngineArgs = dict[Annotated[str, AfterValidator(_check_engine_arg_name)], JsonValue]
Device = Annotated[str, BeforeValidator(_device), Field(pattern=r"^[A-Za-z0-9_./:-]+$")]
Weight = Annotated[float, Field(gt=0, le=1000)]
Labels = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=256)]
    ],
    Field(max_length=64),
]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class InstanceGroup(Section):
    """All instances of one role; ``docs/keys.md`` is generated from the docstrings."""

    count: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of instances, 0 to 1024."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Devices of each instance, on CPU groups of cores. 1 for `encode`."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """vLLM arguments of this role, laid over the common ones."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of this role, laid over the common ones."""
    cores: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """CPU: cores of the whole role, divided among its ranks, as `[0, 1]`. None: the cores of the
    launcher are divided evenly. With fewer cores than ranks, no rank is bound."""
    devices: Annotated[list[Device], Field(min_length=1)] | None = None
    """Device indices or UUIDs of the whole role, `tensor_parallel_size` for each instance. None: a
    device for each rank. A device listed twice is
    [shared](configuration.md#one-device-for-several-instances)."""
    weight: Weight = 1.0
    """Share of the load, relative to other instances of the role. More than 0, at most 1000."""
    labels: Labels = Field(default_factory=dict)
    """Labels for the filters of `front.choice`, as `llm-d.ai/encoder-type: vision`."""


class EncodeGroup(InstanceGroup):
    """All encode instances."""

    # What an encoder of ten items a second works off within `transfer.wait_timeout_s`: what waits
    # longer is encoded elsewhere anyway.
    max_queued_items: Annotated[int, Field(ge=1)] = 256
    """Items queued or in work at one instance. Further items go to another encode engine or are
    encoded where they are needed. Without local encoding the request gets 429."""
    host_cache_bytes: Annotated[Size, Field(ge=0)] = 256 << 20
    """Host memory for copies of encoder outputs behind the encoder cache of one instance. `0`:
    none."""
    platform: PlatformName | None = None
    """Platform of encode instances, see [Encode on other
    silicon](remote-encoder.md#other-silicon). None: that of the topology."""
    environment: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the Python environment of encode instances, relative to where the launcher is
    started. None: that of the launcher."""


class PrefillDecodeGroup(InstanceGroup):
    """All prefill-decode instances; with ``encoder`` they can encode items by themselves."""

    encoder: bool = True
    """Hold the vision tower, for local encoding. `false` saves its memory and needs vLLM 0.31.
    Requests then get 503 when no encode engine can encode an item."""


class Instances(Section):
    """The instances of the topology, by role.

    Without any it is one encode and one prefill-decode instance; with one of these two named the
    other is one instance, unless a third role is named.
    """

    encode: EncodeGroup = EncodeGroup()
    prefill: InstanceGroup = InstanceGroup(count=0)
    decode: InstanceGroup = InstanceGroup(count=0)
    encode_prefill: InstanceGroup = InstanceGroup(count=0)
    prefill_decode: PrefillDecodeGroup = PrefillDecodeGroup()
    encode_prefill_decode: InstanceGroup = InstanceGroup(count=0)

    @model_validator(mode="before")
    @classmethod
    def _others_are_named(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.keys() & _BEYOND_DEFAULT:
            return {"encode": {"count": 0}, "prefill_decode": {"count": 0}, **data}
        return data

    @field_validator("encode")
    @classmethod
    def _encoders_are_not_split(cls, group: EncodeGroup) -> EncodeGroup:
        if group.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size of an encode instance must be 1, got "
                f"{group.tensor_parallel_size}: raise its count instead"
            )
        return group

    @model_validator(mode="after")
    def _roles_go_together(self) -> Instances:
        split = self.prefill.count + self.decode.count
        others = split + self.encode_prefill.count + self.encode_prefill_decode.count
        if not self.prefill_decode.encoder and others:
            raise ValueError(
                "prefill_decode.encoder is false: that goes with encode and prefill_decode "
                "instances alone, all others encode by themselves"
            )
        return self

    def of(self, role: Role) -> InstanceGroup:
        """Return the instances of a role."""
        group: InstanceGroup = getattr(self, group_of(role))
        return group

    @property
    def counts(self) -> dict[Role, int]:
        """Return the number of instances of each role."""
        return {role: self.of(role).count for role in ROLES}


_BEYOND_DEFAULT = frozenset(map(group_of, ROLES)) - {"encode", "prefill_decode"}
"""Groups that a topology has only if its file names one."""

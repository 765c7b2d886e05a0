"""The topology file: every key that a user may write, its default and its limits.

``load.py`` reads files into these models; nothing here opens a file or knows a device.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
)

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

LAUNCHER_OWNED_ARGS = {
    "host": "instances listen on the loopback address only",
    "port": "ports of instances are chosen by the launcher; the public one is router.port",
    "model": "write the model at the top of the file",
    "served_model_name": "write served_model_name at the top of the file",
    "tensor_parallel_size": "write tensor_parallel_size beside count in instances",
    "ec_transfer_config": "the launcher writes it; its settings are under transfer",
    "pipeline_parallel_size": "this version does not support pipeline parallelism",
    "data_parallel_size": "raise count in instances instead",
}
"""Engine arguments that the launcher writes itself, and what to do instead."""


def parse_size(value: Any) -> Any:
    """Turn ``"512MiB"`` into bytes; leave everything else to the type check.

    Raises:
        ValueError: The text is not a number with a binary unit.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes or a unit, as in 512MiB or 1GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _check_engine_arg_name(name: str) -> str:
    if reason := LAUNCHER_OWNED_ARGS.get(name.replace("-", "_")):
        raise ValueError(f"{name} cannot be set here: {reason}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        wanted = re.sub(r"[^a-z0-9]+", "_", name.lower().strip("-"))
        raise ValueError(f"write {wanted}: names of engine arguments have underscores, no dashes")
    return name


def _device(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
EngineArgs = dict[Annotated[str, AfterValidator(_check_engine_arg_name)], JsonValue]
Device = Annotated[str, BeforeValidator(_device), Field(pattern=r"^[A-Za-z0-9_./:-]+$")]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InstanceGroup(_Section):
    """All instances of one role.

    Attributes:
        count: How many.
        tensor_parallel_size: Devices (on CPU: groups of cores) of each instance.
        engine_args: vLLM arguments of this role, laid over the common ones.
        env: Environment variables of this role.
        cores: CPU cores of the whole group, divided among its instances; only where instances
            are bound to cores. Left out, the launcher divides those that are allowed.
        devices: Device indices or UUIDs of the whole group, ``tensor_parallel_size`` for each
            instance in turn. Left out, the launcher gives every instance devices of its own; a
            list may name a device that another group has too.
    """

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    engine_args: EngineArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    cores: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    devices: Annotated[list[Device], Field(min_length=1)] | None = None


class Instances(_Section):
    """The instances of the topology, by role."""

    encode: InstanceGroup = InstanceGroup()
    prefill_decode: InstanceGroup = InstanceGroup()

    @field_validator("encode")
    @classmethod
    def _encoders_are_not_split(cls, group: InstanceGroup) -> InstanceGroup:
        if group.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size of an encode instance must be 1, got "
                f"{group.tensor_parallel_size}: raise its count instead"
            )
        return group


class Transfer(_Section):
    """How encoder outputs travel.

    Attributes:
        path: One transfer path for every pair, or ``auto`` for the best that both ends have.
        pool_bytes: Receive pool of each prefill-decode instance.
        wait_timeout_s: Longest wait of a request for one item.
        lease_s: Longest time from a grant to the end of its write.
    """

    path: Literal["auto", "shm", "tcp"] = "auto"
    pool_bytes: Annotated[Size, Field(ge=4 << 10)] = 1 << 30
    wait_timeout_s: Seconds = 30.0
    lease_s: Seconds = 10.0


class Router(_Section):
    """The public HTTP address and its limits.

    Attributes:
        host: Address to listen on.
        port: Port to listen on.
        max_body_bytes: Larger request bodies are refused with 413.
        max_media_items: Requests with more images are refused with 400.
        encode_timeout_s: Longest time one encode job may take.
        idle_timeout_s: Longest silence of a prefill-decode instance before a request is given up.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Annotated[Size, Field(ge=1024)] = 64 << 20
    max_media_items: Annotated[int, Field(ge=1)] = 64
    encode_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 600.0


class Restart(_Section):
    """What happens when a process dies while the topology serves.

    Attributes:
        first_delay_s: Pause before the first restart; it doubles with every further death.
        max_delay_s: Longest pause.
        healthy_after_s: Healthy for this long, an instance has its earlier deaths forgiven.
    """

    first_delay_s: Seconds = 1.0
    max_delay_s: Seconds = 30.0
    healthy_after_s: Seconds = 60.0


class Launch(_Section):
    """How the launcher starts and stops processes.

    Attributes:
        startup_timeout_s: Every process must be healthy within this time of its start.
        stop_grace_s: Time between asking processes to end and killing them.
        restart: Back-off of restarts.
        warm_up: Send every instance its first requests before calling the topology ready.
    """

    warm_up: bool = True
    startup_timeout_s: Seconds = 600.0
    stop_grace_s: Seconds = 15.0
    restart: Restart = Restart()


class Topology(_Section):
    """A whole topology file, with the overlay of one platform already laid over it.

    Attributes:
        model: Hugging Face id, folder, or ``demo`` for the bundled model.
        served_model_name: Name that clients use; by default the id, or the folder's last part.
        instances: Engine instances by role.
        transfer: How encoder outputs travel.
        router: Public HTTP address.
        launch: Start, restart and stop.
        engine_args: vLLM arguments of every instance.
        env: Environment variables of every instance.
    """

    model: Annotated[str, Field(min_length=1)]
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    instances: Instances = Instances()
    transfer: Transfer = Transfer()
    router: Router = Router()
    launch: Launch = Launch()
    engine_args: EngineArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)

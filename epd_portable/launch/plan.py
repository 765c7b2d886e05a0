"""Which processes a topology is made of, decided without starting any.

Pure: devices, cores and free ports come in as arguments, so one file plans alike on every machine.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.schema import InstanceGroup, Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.assign import Cores, assign_cores, assign_devices
from epd_portable.launch.engine import Seat, engine_argv, engine_env
from epd_portable.launch.model import ModelSource
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.router.settings import InstanceSettings, Role, RouterSettings

ROLES: dict[str, Role] = {"encode": "encode", "prefill_decode": "prefill-decode"}
"""The groups of a topology file, in the order in which they get devices, and their roles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a plan may use.

    Attributes:
        devices: Device indices or UUIDs; ``None`` when nobody asked the machine.
        cores: CPU cores that this process may use.
    """

    devices: tuple[str, ...] | None
    cores: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """One process to start.

    Attributes:
        name: For example ``encode-0`` or ``router``.
        role: ``encode``, ``prefill-decode`` or ``router``.
        argv: Command line.
        env: Variables beyond the launcher's own environment.
        url: Base address; ``GET url/health`` answers 200 once it is ready.
        ports: Every port it listens on, by purpose.
        devices: One device per rank.
        cores: The CPU cores of each rank.
        shm_name: Its file in ``/dev/shm``, removed before each start; empty for none.
    """

    name: str
    role: Role | Literal["router"]
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    ports: dict[str, int]
    devices: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    shm_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole topology, ready to start.

    Attributes:
        run_id: Hexadecimal; part of every shared name of this run.
        platform: Platform of all instances.
        model: Name that clients use.
        url: Base address for OpenAI clients.
        processes: Instances first, the router last.
        warnings: What the user should know before starting.
    """

    run_id: str
    platform: str
    model: str
    url: str
    processes: tuple[ProcessSpec, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)


def new_run_id() -> str:
    """Return eight random hexadecimal digits."""
    return secrets.token_hex(4)


def shm_prefix(run_id: str) -> str:
    """Return what every ``/dev/shm`` file of a run starts with."""
    return f"epd-{run_id}-"


def make_plan(
    topology: Topology,
    *,
    model: ModelSource,
    traits: PlatformTraits,
    machine: Machine,
    run_id: str,
    free_port: Callable[[], int],
    temp_dir: str,
) -> Plan:
    """Decide processes, command lines, devices, cores and ports.

    Args:
        topology: Checked configuration of the chosen platform.
        model: Where ``topology.model`` points.
        traits: The chosen platform.
        machine: Devices and cores to share out.
        run_id: See ``new_run_id``.
        free_port: Hands out one loopback port after another.
        temp_dir: Folder for the engines' own sockets and temporary files.

    Raises:
        ConfigError: The topology does not fit the platform or the machine.
    """
    seats, warnings = _seats(topology, traits, machine, free_port)
    specs: list[ProcessSpec] = []
    backends: list[InstanceSettings] = []
    for group_name, role in ROLES.items():
        for index, seat in enumerate(seats[group_name]):
            name = f"{group_name}-{index}"
            ports = {"http": seat.port}
            if role == "prefill-decode":
                ports |= {"control": free_port(), "data": free_port()}
            instance = _instance(topology, traits, name, ports, run_id)
            shared: dict[str, Any] = {"model": model, "traits": traits, "instance": instance}
            url = f"http://127.0.0.1:{seat.port}"
            backends.append(
                InstanceSettings(name=name, role=role, url=url, control=instance.control_address)
            )
            specs.append(
                ProcessSpec(
                    name=name,
                    role=role,
                    argv=engine_argv(topology, group_name, port=seat.port, **shared),
                    env=engine_env(topology, group_name, seat=seat, temp_dir=temp_dir, **shared),
                    url=url,
                    ports=ports,
                    devices=seat.devices,
                    cores=seat.cores,
                    shm_name=instance.pool,
                )
            )
    specs.append(_router(topology, model, backends))
    return Plan(
        run_id=run_id,
        platform=traits.name,
        model=model.served_name,
        url=f"{_base_url(topology.router.host, topology.router.port)}/v1",
        processes=tuple(specs),
        warnings=tuple(warnings),
    )


def _seats(
    topology: Topology,
    traits: PlatformTraits,
    machine: Machine,
    free_port: Callable[[], int],
) -> tuple[dict[str, list[Seat]], Sequence[str]]:
    groups: dict[str, InstanceGroup] = {name: getattr(topology.instances, name) for name in ROLES}
    numbered = traits.visible_devices_env is not None
    refused = "cores" if numbered else "devices"
    for name, group in groups.items():
        if getattr(group, refused) is not None:
            raise ConfigError(
                f"instances.{name}.{refused}: platform {traits.name} has no use for it; move it "
                "under platform.<name> of the platform that it is meant for"
            )
    if numbered:
        by_device = assign_devices(groups, machine.devices)
        return {
            name: [Seat(port=free_port(), devices=devices) for devices in instances]
            for name, instances in by_device.devices.items()
        }, by_device.warnings
    by_core = assign_cores(groups, machine.cores)
    return {
        name: [Seat(port=free_port(), cores=cores) for cores in instances]
        for name, instances in by_core.cores.items()
    }, by_core.warnings


def _instance(
    topology: Topology, traits: PlatformTraits, name: str, ports: dict[str, int], run_id: str
) -> InstanceConfig:
    transfer = topology.transfer
    receives = "control" in ports
    return InstanceConfig(
        instance=name,
        platform=traits.name,
        control_address=f"tcp://127.0.0.1:{ports['control']}" if receives else "",
        data_address=f"tcp://127.0.0.1:{ports['data']}" if receives else "",
        pool=f"{shm_prefix(run_id)}{name}" if receives else "",
        pool_bytes=transfer.pool_bytes if receives else 0,
        path=transfer.path,
        wait_timeout_s=transfer.wait_timeout_s,
        lease_s=transfer.lease_s,
    )


def _router(
    topology: Topology, model: ModelSource, backends: Sequence[InstanceSettings]
) -> ProcessSpec:
    router = topology.router
    settings = RouterSettings(
        host=router.host,
        port=router.port,
        model=model.served_name,
        instances=tuple(backends),
        encode_timeout_s=router.encode_timeout_s,
        idle_timeout_s=router.idle_timeout_s,
        wait_timeout_s=topology.transfer.wait_timeout_s,
        max_body_bytes=router.max_body_bytes,
        max_media_items=router.max_media_items,
    )
    return ProcessSpec(
        name="router",
        role="router",
        argv=(
            sys.executable,
            "-m",
            "epd_portable.router",
            "--settings",
            settings.model_dump_json(),
        ),
        env={"EPD_INSTANCE": "router"},
        url=_base_url(router.host, router.port),
        ports={"http": router.port},
    )


def _base_url(host: str, port: int) -> str:
    """Return an address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"

"""Which processes a topology is made of, decided without starting any.

Pure: devices, cores and free ports come in as arguments, so one file plans alike on every machine.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from epd_portable.config.choice import with_file
from epd_portable.config.hardware import HardwareProfile
from epd_portable.config.instance import InstanceConfig
from epd_portable.config.roles import (
    ENCODES,
    SENDS_KV,
    TAKES_KV,
    Role,
)
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import Engine
from epd_portable.launch.plan.front import (
    answering,
    check_engine_args,
    core_argv,
    front_argv,
    hub_address,
    remote_argv,
)
from epd_portable.launch.plan.kv import KVConnector, kv_connector
from epd_portable.launch.plan.model import ModelSource
from epd_portable.launch.plan.placement import (
    Cores,
    InstancePlacement,
    Placements,
    cores_of,
    place_instances,
)
from epd_portable.launch.plan.sharing import (
    check_sharing,
    sharing_warnings,
    starts_after,
    used_devices,
)
from epd_portable.media.addresses import in_url
from epd_portable.placement.profiles.policy import Policy
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer.curve import is_off_host
from epd_portable.transfer.registry import offered

QUEUED_BODIES = 8
"""Of the largest size that the front lets through, that an encode instance queues."""
_NAMES = ("EPD_INSTANCE", "OTEL_SERVICE_NAME")
"""Variables that hold the name of a process."""
SMALLEST_POOL_BYTES = 4 << 10
"""Receive pool of an instance that gets no items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a plan may use.

    Attributes:
        devices: Device indices or UUIDs; ``None`` when they are not known.
        cores: CPU cores that this process may use.
        has_compiler: Whether engines find what they compile kernels with, where they need it.
    """

    devices: tuple[str, ...] | None
    cores: tuple[int, ...]
    has_compiler: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """One process to start; where it runs is as in `InstancePlacement`.

    Attributes:
        name: For example ``encode-0`` or ``front``.
        env: Variables beyond the launcher's own environment.
        url: Base address; ``GET url/health`` answers 200 once it is ready.
        ports: Every port it listens on, by purpose.
        shm_name: Its file in ``/dev/shm``, removed before each start; empty for none.
        tls_cert_file: The certificate that it shows, if it speaks HTTPS.
        after: Instances on its devices that must be up before it is started.
    """

    name: str
    role: Role | Literal["front"]
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    ports: dict[str, int]
    devices: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    api_cores: Cores = ()
    shm_name: str = ""
    tls_cert_file: str = ""
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole topology, ready to start.

    Attributes:
        run_id: Hexadecimal; part of every shared name of this run.
        url: Base address for OpenAI clients.
        processes: Instances first, the front last, if there is one.
        joins: Base addresses of fronts on other machines that instances join.
        members: What these fronts are told of each instance.
        devices: Those that have instances, with their names in the order of their starts; none on
            platforms that have cores only.
        hardware: Profile and device that it is planned for; empty for this machine.
        kv: What brings KV from prefill to decode instances.
        store: Where encoder outputs are kept; empty for nowhere.
    """

    run_id: str
    platform: str
    model: str
    url: str
    processes: tuple[ProcessSpec, ...]
    warnings: tuple[str, ...]
    joins: tuple[str, ...] = ()
    members: tuple[dict[str, Any], ...] = ()
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hardware: str = ""
    kv: KVConnector | None = None
    store: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        kv = {"name": self.kv.name, "connector": self.kv.cls} if self.kv else None
        return dataclasses.asdict(self) | {"kv": kv}


def new_run_id() -> str:
    """Return eight random hexadecimal digits."""
    return secrets.token_hex(4)


def shm_prefix(run_id: str) -> str:
    """Return what every ``/dev/shm`` file of a run starts with."""
    return f"epd-{run_id}-"


def run_secret_file(temp_dir: str) -> str:
    """Return the path of the secret that the launcher makes for a run that names none."""
    return f"{temp_dir}/secret"


def make_plan(
    topology: Topology,
    *,
    model: ModelSource,
    traits: PlatformTraits,
    machine: Machine,
    run_id: str,
    free_port: Callable[[], int],
    temp_dir: str,
    hardware: HardwareProfile | None = None,
) -> Plan:
    """Decide processes, command lines, devices, cores and ports.

    Args:
        topology: Checked configuration of the platform of ``traits``.
        model: What ``topology.model`` resolves to.
        free_port: Returns one free port of ``launch.host`` after another.
        temp_dir: Folder of the run, see `Engine.env` and `run_secret_file`.

    Raises:
        ConfigError: The topology does not fit the platform or the machine.
    """
    _check_host(topology, traits)
    check_engine_args(topology)
    store = topology.store
    kv = kv_connector(topology, traits)
    secret_file = topology.secret_file or run_secret_file(temp_dir)
    placements = place_instances(topology, traits, devices=machine.devices, cores=machine.cores)
    instances = placements.instances
    devices = used_devices(instances)
    check_sharing(topology, traits, devices)
    engines = [
        Engine(
            topology=topology,
            model=model,
            traits=traits,
            instance=_instance(topology, traits, placement, ports, run_id, secret_file),
            placement=placement,
            shares_device=any(len(devices[device]) > 1 for device in placement.devices),
            ports=ports,
            kv=kv if "kv" in ports else None,
            temp_dir=temp_dir,
            has_compiler=machine.has_compiler,
        )
        for placement, ports in _listeners(topology, instances, kv, free_port)
    ]
    after = starts_after(devices)
    processes = [_instance_process(engine, after) for engine in engines]
    warnings = [
        *placements.warnings,
        *sharing_warnings(topology, traits, devices),
        *_warnings(topology, machine, hardware),
    ]
    url = _public_url(topology)
    members: tuple[dict[str, Any], ...] = ()
    if topology.launch.join:
        url = topology.launch.join[0]
        members = tuple(_member(engine) for engine in engines)
    else:
        processes.append(_front(engines, placements))
    return Plan(
        run_id=run_id,
        platform=traits.name,
        model=model.served_name,
        url=f"{url}/v1",
        processes=tuple(processes),
        warnings=tuple(warnings),
        joins=tuple(topology.launch.join),
        members=members,
        devices={name: tuple(each.name for each in here) for name, here in devices.items()},
        hardware=f"{hardware.name}: {hardware.device}" if hardware else "",
        kv=kv,
        store=f"{store.where}, at most {store.max_bytes >> 20} MiB" if store else "",
    )


def _listeners(
    topology: Topology,
    instances: Sequence[InstancePlacement],
    kv: KVConnector | None,
    free_port: Callable[[], int],
) -> Iterator[tuple[InstancePlacement, dict[str, int]]]:
    """Yield each instance with its ports."""
    for placement in instances:
        ports = {"http": free_port(), "jobs": free_port()} if topology.launch.join else {}
        if placement.role != "encode":
            ports |= {"control": free_port(), "data": free_port()}
        if kv and placement.role in SENDS_KV | TAKES_KV:
            ranks = topology.instances.of(placement.role).tensor_parallel_size
            ports |= kv.ports(ranks, free_port)
        yield placement, ports


def _instance_process(engine: Engine, after: Mapping[str, Sequence[str]]) -> ProcessSpec:
    topology, placement = engine.topology, engine.placement
    has_page = "http" in engine.ports
    if has_page:
        argv = remote_argv(engine)
        url = _base_url(topology.launch.host, engine.ports["http"])
    else:
        argv = core_argv(engine)
        url = f"{_public_url(topology)}/epd/instances/{placement.name}"
    return ProcessSpec(
        name=placement.name,
        role=engine.role,
        argv=argv,
        env=engine.env(),
        url=url,
        ports=dict(engine.ports),
        devices=placement.devices,
        cores=placement.cores,
        shm_name=engine.instance.pool,
        tls_cert_file="" if has_page else topology.front.tls_cert_file or "",
        after=tuple(after.get(placement.name, ())),
    )


def _member(engine: Engine) -> dict[str, Any]:
    """Return what fronts on other machines are told of an engine."""
    return {
        "name": engine.instance.instance,
        "role": engine.role,
        "url": hub_address(engine),
        "control": engine.instance.control_address,
        "weight": engine.group.weight,
        "labels": dict(engine.group.labels),
    }


def _check_host(topology: Topology, traits: PlatformTraits) -> None:
    host, transfer = topology.launch.host, topology.transfer
    if not is_off_host(host):
        for url in topology.launch.join:
            if is_off_host(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"launch.join {url} is on another host, which does not reach launch.host "
                    f"{host}; set launch.host to this machine's address in its network"
                )
        return
    if topology.secret_file is None:
        raise ConfigError(
            f"launch.host {host} is not the loopback address: set secret_file, which the other "
            "hosts must hold too (epd-launch secret FILE makes one)"
        )
    offered(transfer.path, traits.name, plain=transfer.trusted_network)


def _warnings(topology: Topology, machine: Machine, hardware: HardwareProfile | None) -> list[str]:
    found = []
    if topology.store is not None and topology.secret_file is None:
        found.append(
            "store: only holders of the same secret can use its entries, and the launcher makes "
            "one for this run only; set secret_file (epd-launch secret FILE makes one), or nothing "
            "of the store outlives the run"
        )
    if hardware is not None:
        avoid = hardware.ports_to_avoid
        if topology.front.port in avoid:
            found.append(
                f"front.port {topology.front.port}: on {hardware.name} other software takes "
                f"ports {avoid[0]} to {avoid[-1]}; choose one outside them"
            )
    return found


def _instance(
    topology: Topology,
    traits: PlatformTraits,
    placement: InstancePlacement,
    ports: Mapping[str, int],
    run_id: str,
    secret_file: str,
) -> InstanceConfig:
    transfer, host, role = topology.transfer, topology.launch.host, placement.role
    settings: dict[str, Any] = {}
    if role in ENCODES or topology.launch.join:
        settings["max_queued_items"] = topology.instances.encode.max_queued_items
        settings["max_queued_bytes"] = QUEUED_BODIES * topology.front.max_body_bytes
    if role == "encode":
        settings["host_cache_bytes"] = topology.instances.encode.host_cache_bytes
    else:
        settings |= {
            "control_address": f"tcp://{host}:{ports['control']}",
            "data_address": f"tcp://{host}:{ports['data']}",
            "pool": f"{shm_prefix(run_id)}{placement.name}",
            "pool_bytes": transfer.pool_bytes if topology.gets_items(role) else SMALLEST_POOL_BYTES,
            "can_encode": topology.instances.prefill_decode.encoder,
        }
    return InstanceConfig(
        instance=placement.name,
        platform=traits.name,
        path=transfer.path,
        wait_timeout_s=transfer.wait_timeout_s,
        lease_s=transfer.lease_s,
        host=host,
        secret_file=secret_file,
        trusted_network=transfer.trusted_network,
        store=topology.store,
        media_limits=topology.front.media.limits,
        **settings,
    )


def _front(engines: Sequence[Engine], placements: Placements) -> ProcessSpec:
    answers = answering(engines)
    topology = answers.topology
    if topology.front.choice is not None:
        Policy(with_file(topology.front.choice))  # Says here what is wrong with it.
    env = answers.env()
    own = placements.rest or cores_of(placements.instances, of_encoders=True)
    steps = cores_of(placements.instances, of_encoders=False)
    return ProcessSpec(
        name="front",
        role="front",
        argv=front_argv(engines),
        env={name: "front" if name in _NAMES else value for name, value in env.items()},
        url=_public_url(topology),
        ports={"http": topology.front.port},
        # On cores that no engine has, if there are any; else where API servers may run.
        cores=(own,) if own else (),
        api_cores=steps if own and not placements.rest else (),
        tls_cert_file=topology.front.tls_cert_file or "",
    )


def _public_url(topology: Topology) -> str:
    """Return the base address of what stands in front."""
    front = topology.front
    return _base_url(front.host, front.port, tls=front.tls_cert_file is not None)


def _base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return an address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{in_url(reachable)}:{port}"

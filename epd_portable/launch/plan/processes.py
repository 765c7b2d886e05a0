"""Processes of a topology, decided without starting any, and the text that shows them.

Pure: devices, cores and free ports are arguments, so one file gives one plan on every machine.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from epd_portable.config.choice import with_file
from epd_portable.config.hardware import HardwareProfile
from epd_portable.config.roles import ENCODES, SENDS_KV, TAKES_KV, Role
from epd_portable.config.schema import Topology
from epd_portable.encode.two_levels import FILLED
from epd_portable.launch.plan.engine import (
    CPU_KV_GIB,
    Engine,
    Site,
    answering,
    as_member,
    engine_argv,
    front_argv,
)
from epd_portable.launch.plan.kv import KVConnector, kv_connector
from epd_portable.launch.plan.placement import Cores, InstancePlacement
from epd_portable.media.addresses import in_url
from epd_portable.placement.profiles.policy import Policy

_NAMES = ("EPD_INSTANCE", "OTEL_SERVICE_NAME")
"""Variables that hold the name of a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """A process to start; where it runs is as in `InstancePlacement`.

    Attributes:
        name: For example ``encode-0`` or ``front``.
        env: Variables beyond the launcher's own environment.
        url: Base address; ``GET url/health`` returns 200 once it is ready.
        ports: Every port it listens on, by purpose.
        shm_name: Its file in ``/dev/shm``, removed before each start; empty for none.
        tls_cert_file: The certificate that it shows, if it speaks HTTPS.
        after: Instances on its devices that must be up before it is started.
        apart: Platform and interpreter, where they are not those of the others.
    """

    name: str
    role: Role | Literal["front"]
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    ports: dict[str, int]
    devices: tuple[str, ...] = ()
    cores: tuple[Cores, ...] = ()
    shm_name: str = ""
    tls_cert_file: str = ""
    after: tuple[str, ...] = ()
    apart: str = ""

    def public(self) -> dict[str, Any]:
        """Return its public description, for users."""
        return {"name": self.name, "role": self.role, "url": self.url, "ports": self.ports}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole topology, ready to start.

    Attributes:
        run_id: Hexadecimal; part of every shared name of this run.
        url: Base address for OpenAI clients.
        processes: Instances first, the front last, if there is one.
        joins: Base addresses of fronts on other machines that instances join.
        members: Description of each instance that these fronts receive.
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


def make_plan(
    site: Site,
    encode: Site,
    *,
    free_port: Callable[[], int],
    hardware: HardwareProfile | None = None,
) -> Plan:
    """Decide processes, command lines and ports.

    Args:
        site: Site of the front, and of all engines but encode engines.
        encode: Site of encode engines: another one if their platform or environment is another.
        free_port: Returns one free port of ``launch.host`` after another.

    Raises:
        ConfigError: Settings of KV, or of the choice of engines, do not fit.
    """
    topology = site.topology
    store, joins = topology.store, tuple(topology.launch.join)
    kv = kv_connector(topology, site.traits)
    devices = site.placed.by_device
    warnings = [*encode.placed.warnings, *site.placed.warnings]
    if store is not None and topology.secret_file is None:
        warnings.append(
            "store: only holders of the same secret can use its entries, and the launcher makes "
            "one for this run only; set secret_file (epd-launch secret FILE makes one), or nothing "
            "of the store outlives the run"
        )

    def engine(placement: InstancePlacement) -> Engine:
        own = encode if placement.role == "encode" else site
        ports: dict[str, int] = {}
        if joins or own is not site:
            ports |= {"http": free_port(), "jobs": free_port()}
        if placement.role != "encode":
            ports |= {"control": free_port(), "data": free_port()}
        own_kv = kv if placement.role in SENDS_KV | TAKES_KV else None
        if own_kv:
            ranks = topology.instances.of(placement.role).tensor_parallel_size
            ports |= own_kv.ports(ranks, free_port)
        return Engine(site=own, placement=placement, ports=ports, kv=own_kv)

    placements = [each for each in encode.placed.instances if each.role == "encode"]
    placements += [each for each in site.placed.instances if each.role != "encode"]
    engines = [engine(each) for each in placements]
    processes = list(map(_engine_process, engines))
    if not joins:
        if topology.front.choice is not None:
            Policy(with_file(topology.front.choice))  # An invalid file is reported here.
        own_engines = [each for each in engines if each.site is site]
        env = answering(own_engines).env()
        rest = site.placed.rest
        processes.append(
            ProcessSpec(
                name="front",
                role="front",
                argv=front_argv(own_engines),
                env={name: "front" if name in _NAMES else value for name, value in env.items()},
                url=_front_url(topology),
                ports={"http": topology.front.port},
                cores=(rest,) if rest else (),
                tls_cert_file=topology.front.tls_cert_file or "",
            )
        )
    return Plan(
        run_id=site.run_id,
        platform=site.traits.name,
        model=site.model.served_name,
        url=f"{joins[0] if joins else _front_url(topology)}/v1",
        processes=tuple(processes),
        warnings=tuple(dict.fromkeys(warnings)),
        joins=joins,
        members=tuple(as_member(each) for each in engines if "jobs" in each.ports),
        devices={name: tuple(each.name for each in here) for name, here in devices.items()},
        hardware=f"{hardware.name}: {hardware.device}" if hardware else "",
        kv=kv,
        store=f"{store.where}, at most {store.max_bytes >> 20} MiB" if store else "",
    )


def _engine_process(engine: Engine) -> ProcessSpec:
    topology, port = engine.topology, engine.ports.get("http")
    joins_own = port and not topology.launch.join
    front = f"{_front_url(topology)}/epd/instances/{engine.name}"
    return ProcessSpec(
        name=engine.name,
        role=engine.role,
        argv=engine_argv(engine),
        env=engine.env(),
        url=_base_url(topology.launch.host, port) if port else front,
        ports=dict(engine.ports),
        devices=engine.placement.devices,
        cores=engine.placement.cores,
        shm_name=engine.instance.pool,
        tls_cert_file="" if port else topology.front.tls_cert_file or "",
        after=engine.site.placed.starts_after(engine.name),
        apart=f"{engine.site.traits.name}, {engine.site.python}" if joins_own else "",
    )


def _front_url(topology: Topology) -> str:
    """Return the base address of the front."""
    front = topology.front
    return _base_url(front.host, front.port, tls=front.tls_cert_file is not None)


def _base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return an address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{in_url(reachable)}:{port}"


def plan_table(plan: Plan) -> str:
    """Return one line a process, then each process's command and environment."""
    rows = [("process", "role", "runs on", "ports", "starts")]
    rows += [
        (
            spec.name,
            spec.role,
            _place(spec),
            ports_text(spec.ports),
            f"after {', '.join(spec.after)}" if spec.after else "at once",
        )
        for spec in plan.processes
    ]
    lines = [f"platform {plan.platform}, model {plan.model}, clients use {plan.url}", ""]
    lines += columns(rows)
    if plan.joins:
        lines += ["", f"instances join {', '.join(plan.joins)}"]
    if encoders := [spec.name for spec in plan.processes if spec.role in ENCODES]:
        lines += ["", f"items are encoded by {', '.join(encoders)}"]
    if plan.kv:
        lines += ["", f"KV goes to decode instances by {plan.kv.cls}"]
    if plan.store:
        lines += ["", f"encoder outputs are kept by {plan.store}"]
    for spec in plan.processes:
        if spec.role == "encode" and (space := spec.env.get(CPU_KV_GIB)):
            cache = f"{FILLED:.0%} of {CPU_KV_GIB}={space} (GiB), for it has no KV cache"
            lines += ["", f"the encoder cache of {spec.name} takes {cache}"]
    if plan.hardware:
        lines += ["", f"planned for {plan.hardware}"]
    for spec in plan.processes:
        lines += ["", f"{spec.name}:"]
        lines += [f"  {name}={shlex.quote(value)} \\" for name, value in spec.env.items()]
        lines += [f"  {shlex.join(spec.argv)}"]
    return "\n".join(lines)


def _place(spec: ProcessSpec) -> str:
    if spec.devices:
        place = f"devices {','.join(spec.devices)}"
    elif spec.cores:
        place = f"cores {'|'.join(','.join(map(str, cores)) for cores in spec.cores)}"
    else:
        place = "any core"
    return f"{place} ({spec.apart})" if spec.apart else place


def ports_text(ports: Mapping[str, int], *, without: str = "") -> str:
    """Return ports with their purposes, but for one purpose."""
    return ", ".join(f"{purpose} {port}" for purpose, port in ports.items() if purpose != without)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line a row, with its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

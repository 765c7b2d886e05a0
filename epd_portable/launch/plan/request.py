"""Input of a command line: a file with overrides, and a platform or hardware profile."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from epd_portable import envs
from epd_portable.config.folders import expanded
from epd_portable.config.hardware import HardwareProfile, find_hardware
from epd_portable.config.load import Check, load_topology, located
from epd_portable.config.roles import ROLES, Role, group_of
from epd_portable.config.schema import AUTO, Topology
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError, EPDError, StoreError
from epd_portable.launch.plan.engine import ModelSource, resolve_model
from epd_portable.launch.plan.file_checks import engine_settings
from epd_portable.launch.plan.machine import (
    Machine,
    allowed_cores,
    assumed_machine,
    claim,
    own_address,
    port_source,
    ports_in_order,
    require_free,
    require_module,
    require_shm,
)
from epd_portable.launch.plan.processes import Plan, make_plan
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.transfer.stores.base import make_store

_ENCODE: tuple[Role, ...] = ("encode",)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A topology to plan.

    Attributes:
        hardware: The profile to check the plan against.
        overrides: What is laid over it, as ``key.subkey=value``.
    """

    traits: PlatformTraits
    hardware: HardwareProfile | None
    config: Path
    overrides: tuple[str, ...]

    @classmethod
    def from_options(
        cls,
        *,
        platform: str | None,
        config: Path,
        hardware: str | None = None,
        overrides: tuple[str, ...] = (),
        model: str | None = None,
        port: int | None = None,
        alone: Role | None = None,
    ) -> PlanRequest:
        """Return what the options of ``up``, ``engine`` and ``plan`` request.

        Args:
            alone: One engine of this role is planned, regardless of the counts, to join
                fronts elsewhere; ``None`` for as many as the counts give.

        Raises:
            ConfigError: Neither a platform nor a profile was given, they contradict each other, or
                the profile is not there or wrong.
        """
        if model is not None:
            overrides = (*overrides, f"model={json.dumps(model)}")
        if port is not None:
            overrides = (*overrides, f"front.port={port}")
        found = find_hardware(hardware, platform) if hardware else None
        platform = found.platform if found else platform
        if platform is None:
            raise ConfigError(
                "name a platform with --platform, or a hardware profile with --hardware"
            )
        if alone:
            counts = (f"instances.{group_of(role)}.count={role == alone:d}" for role in ROLES)
            overrides = (*overrides, *counts)
        return cls(traits=TRAITS[platform], hardware=found, config=config, overrides=overrides)

    def expected_machine(self, environ: Mapping[str, str]) -> Machine:
        """Return the machine of the profile, or this one; no device is touched."""
        if self.hardware:
            devices = map(str, range(self.hardware.devices_per_node))
            return Machine(devices=tuple(devices), cores=allowed_cores())
        return assumed_machine(self.traits, environ)

    def load(self, *checks: Check) -> Topology:
        """Read the file; ``launch.host: auto`` becomes the address of this machine.

        Raises:
            ConfigError: Lists every problem of the file; or a variable is wrong; or this machine
                has no address, or several.
        """
        for variable in envs.TABLE:
            variable.get()  # Children have it, too.
        topology = load_topology(
            self.config,
            self.traits.name,
            overrides=self.overrides,
            checks=(partial(engine_settings, self.traits), *checks),
        )
        if topology.launch.host != AUTO:
            return topology
        launch = topology.launch.model_copy(update={"host": own_address()})
        return topology.model_copy(update={"launch": launch})

    def plan(
        self,
        topology: Topology,
        run_id: str,
        machine: Machine,
        *,
        temp_dir: str,
        encode_machine: Machine | None = None,
        model: ModelSource | None = None,
        free: Callable[[int, str], bool] = claim,
    ) -> Plan:
        """Make the plan, for this machine where the model is left out.

        ``free`` returns whether a port of a host can be used. The machine of encode instances that
        have a platform of their own is assumed where it is left out.

        Raises:
            ConfigError: The topology does not fit; names the place of the key.
        """
        launch = topology.launch
        reserved = {topology.front.port, *(self.hardware.ports_to_avoid if self.hardware else ())}
        with self._located():
            make = partial(
                make_plan,
                model=model
                or resolve_model(topology.model, served_name=topology.served_model_name),
                run_id=run_id,
                free_port=ports_in_order(launch.first_port, reserved=reserved)
                if launch.first_port is not None
                else port_source(run_id, reserved=reserved, host=launch.host, free=free),
                temp_dir=temp_dir,
            )
        if not topology.encodes_apart:
            with self._located():
                return make(topology, traits=self.traits, machine=machine, hardware=self.hardware)
        encode = self.for_encode(topology)
        on_same = encode.traits is self.traits
        rest = tuple(role for role in ROLES if role not in _ENCODE)
        found = encode.load()
        with encode._located():
            others = make(
                found,
                traits=encode.traits,
                machine=encode_machine
                or (machine if on_same else assumed_machine(encode.traits, {})),
                roles=_ENCODE,
                planned_apart=rest if on_same else (),
                python=python_of(topology),
            )
        with self._located():
            plan = make(
                topology,
                traits=self.traits,
                machine=machine,
                hardware=self.hardware,
                roles=rest,
                planned_apart=_ENCODE if on_same else (),
            )
        return replace(
            plan,
            processes=(*others.processes, *plan.processes),
            warnings=tuple(dict.fromkeys((*others.warnings, *plan.warnings))),
            members=others.members,
        )

    def for_encode(self, topology: Topology) -> PlanRequest:
        """Return the request for encode instances of a platform or environment of their own."""
        name = topology.instances.encode.platform or self.traits.name
        return replace(self, traits=TRAITS[name], hardware=None)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        """Add the place of the key to errors."""
        try:
            yield
        except ConfigError as error:
            name = self.traits.name
            raise located(error, self.config, name, overrides=self.overrides) from error

    def plan_elsewhere(self) -> tuple[Topology, Plan]:
        """Plan a launcher of another machine, which finds the model and ports on its own.

        Raises:
            ConfigError: The file is wrong, or the topology does not fit.
        """
        topology = self.load()
        name = topology.served_model_name or topology.model
        return topology, self.plan(
            topology,
            "00000000",
            self.expected_machine({}),
            temp_dir="/tmp",
            model=ModelSource(argument=topology.model, served_name=name, is_folder=False),
            free=lambda *_: True,
        )


def python_of(topology: Topology) -> str:
    """Return the interpreter of encode instances."""
    environment = topology.instances.encode.environment
    return str(expanded(environment).absolute() / "bin/python") if environment else sys.executable


def refusals(topology: Topology, plan: Plan) -> list[EPDError]:
    """Return why this machine cannot run a plan at this moment."""
    front, kv, counts = topology.front, plan.kv, topology.instances.counts
    pools = sum(count for role, count in counts.items() if topology.gets_items(role))
    checks = [partial(require_shm, topology.transfer.pool_bytes, pools)]
    if not plan.joins:
        checks.append(partial(require_free, front.port, front.host))
    if kv:
        checks.append(partial(require_module, kv.module, needed_by=kv.cls, install=kv.install))
    found: list[EPDError] = []
    for check in checks:
        try:
            check()
        except EPDError as error:
            found.append(error)
    return found


def store_warnings(section: StoreSection | None) -> list[str]:
    """Return why a store does not respond."""
    if section is not None:
        try:
            with contextlib.closing(make_store(section)) as store:
                store.check()
        except (ConfigError, StoreError) as error:
            return [f"store: {error}"]
    return []

"""Input of a command line: a file with overrides, and a platform or hardware profile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from epd_portable import envs
from epd_portable.config.folders import expanded
from epd_portable.config.hardware import HardwareProfile, find_hardware
from epd_portable.config.load import Check, load_topology, located
from epd_portable.config.roles import ROLES, Role, group_of
from epd_portable.config.schema import AUTO, Topology
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError, EPDError, StoreError
from epd_portable.launch.plan.engine import ModelSource, Site, resolve_model
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
)
from epd_portable.launch.plan.placement import place_instances
from epd_portable.launch.plan.processes import Plan, make_plan
from epd_portable.platforms.traits import TRAITS, PlatformTraits
from epd_portable.transfer.pool import SHM_FOLDER
from epd_portable.transfer.stores.base import make_store


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
        apart = self.for_encode(topology) if topology.encodes_apart else self
        is_elsewhere = apart.traits is not self.traits
        reserved = {topology.front.port, *(self.hardware.ports_to_avoid if self.hardware else ())}
        with self._located():
            free_port = (
                ports_in_order(launch.first_port, reserved=reserved)
                if launch.first_port is not None
                else port_source(run_id, reserved=reserved, host=launch.host, free=free)
            )
            roles = [role for role in ROLES if role != "encode" or not is_elsewhere]
            site = Site(
                topology=topology,
                model=model
                or resolve_model(topology.model, served_name=topology.served_model_name),
                traits=self.traits,
                placed=place_instances(topology, self.traits, machine, roles),
                has_compiler=machine.has_compiler,
                run_id=run_id,
                temp_dir=temp_dir,
            )
        encode = site
        if is_elsewhere:
            found = apart.load()
            machine = encode_machine or assumed_machine(apart.traits, {})
            with apart._located():
                placed = place_instances(found, apart.traits, machine, ["encode"])
            encode = replace(
                site,
                topology=found,
                traits=apart.traits,
                placed=placed,
                has_compiler=machine.has_compiler,
            )
        if topology.encodes_apart:
            encode = replace(encode, python=python_of(topology))
        with self._located():
            return make_plan(site, encode, free_port=free_port, hardware=self.hardware)

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
    found: list[EPDError] = []
    counts, pool_bytes = topology.instances.counts, topology.transfer.pool_bytes
    pools = sum(count for role, count in counts.items() if topology.gets_items(role))
    free = psutil.disk_usage(str(SHM_FOLDER)).free
    if pool_bytes * pools > free:  # A full one kills writers.
        text = (
            f"transfer.pool_bytes: {pools} × {pool_bytes / 2**20:.0f} MiB do not fit into "
            f"{SHM_FOLDER} ({free / 2**20:.0f} MiB free); lower it, remove old files there, or "
            "enlarge it (docker run --shm-size)"
        )
        found.append(ConfigError(text))
    if not plan.joins:
        try:
            require_free(topology.front.port, topology.front.host)
        except EPDError as error:
            found.append(error)
    if plan.kv and importlib.util.find_spec(plan.kv.module) is None:
        text = f"{plan.kv.cls} needs the module {plan.kv.module!r}, which is not here: "
        found.append(ConfigError(text + plan.kv.install))
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

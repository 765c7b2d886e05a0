"""Launchers on the nodes of a cluster: which there are, what each needs, how full it is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from epd_portable.config.load import or_shipped
from epd_portable.config.problems import read_text
from epd_portable.config.roles import DUTIES, ROLES, Role
from epd_portable.config.schema import Topology
from epd_portable.launch.plan.ports import FIRST_PORT
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.plan.request import PlanRequest, counts_of

ELSEWHERE = "192.0.2.1"
"""Stands for the address of a node, which is not known before it is chosen."""
HEAD = MappingProxyType({"node:__internal_head__": 0.001})
"""What Ray's head node has, and no other."""
_WITHIN_A_NODE = frozenset({"auto", "ipc", "shm"})
"""Transfer paths for which an encode instance is put beside a prefill+decode instance."""
_OF_A_KIND = 0.001
"""Of a node's resource that only says of what kind its devices are."""
FOLDER = "/epd-folder"
"""Stands for the folder that a launcher's files are written to."""
_WAITS_OF_A_START = 3
"""For the fork server, processes, and routers elsewhere: each ``launch.startup_timeout_s``."""
_DRAIN_MARGIN_S = 30.0
"""What a launcher takes at a stop beside the graces of its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MostOwed:
    """Seconds of work that an instance may owe, above which an autoscaler starts another.

    Attributes:
        encode_s: One that encodes, or prefills for others.
        answer_s: One that answers.
    """

    encode_s: float = 1.0
    answer_s: float = 4.0

    def of(self, role: Role) -> float:
        """Return it of one instance."""
        return self.answer_s if DUTIES[role] == "answer" else self.encode_s

    def room_s(self, plan: Plan) -> dict[Role, float]:
        """Return it of the instances of a launcher together, by role."""
        found: dict[Role, float] = {}
        for spec in plan.processes:
            if spec.role != "router":
                found[spec.role] = found.get(spec.role, 0.0) + self.of(spec.role)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherSpec:
    """A launcher for some node of a cluster, as plain data that is sent there.

    Attributes:
        name: Its actor's.
        command: ``up`` with options, and `FOLDER` before the names of files.
        files: Texts of files that it reads, by name.
        resources: What it needs of one node, by Ray's words.
        room_s: See `MostOwed`.
        node_s: Longest wait for a node.
        start_s: Longest time that a start takes there.
        stop_s: Longest time that a stop takes.
    """

    name: str
    command: tuple[str, ...]
    files: Mapping[str, str]
    resources: Mapping[str, float]
    room_s: Mapping[Role, float]
    node_s: float
    start_s: float
    stop_s: float

    @classmethod
    def plan(
        cls,
        request: PlanRequest,
        name: str,
        *settings: str,
        secret: str = "",
        resources: Mapping[str, float] | None = None,
        most: MostOwed | None = None,
    ) -> LauncherSpec:
        """Plan a launcher.

        Args:
            settings: What this launcher has laid over it.
            secret: Of the deployment; empty where the launcher makes its own.
            resources: By default those of what it starts.

        Raises:
            ConfigError: The file is wrong, or the topology does not fit.
        """
        files = {"topology.yaml": read_text(or_shipped(request.config))}
        if secret:
            files["secret"] = secret
            settings = (*settings, f"secret_file={FOLDER}/secret")
        request = request.with_settings(*settings)
        topology, plan = request.plan_elsewhere(FIRST_PORT)
        command = ["up", "--platform", request.traits.name, "--config", f"{FOLDER}/topology.yaml"]
        for each in request.overrides:
            command += ["--set", each]
        return cls(
            name=name,
            command=tuple(command),
            files=files,
            resources=_resources(request, plan) if resources is None else resources,
            room_s=(most or MostOwed()).room_s(plan),
            node_s=topology.launch.startup_timeout_s,
            start_s=_WAITS_OF_A_START * topology.launch.startup_timeout_s,
            stop_s=topology.router.drain_s + topology.launch.stop_grace_s + _DRAIN_MARGIN_S,
        )


def _resources(request: PlanRequest, plan: Plan) -> dict[str, float]:
    """Return the devices of what a launcher starts, or a core for each instance without any."""
    instances = sum(spec.role != "router" for spec in plan.processes)
    word = request.traits.ray_resource
    found: dict[str, float] = {word: instances if word == "CPU" else len(plan.devices)}
    if request.hardware and request.hardware.accelerator_type:
        found[f"accelerator_type:{request.hardware.accelerator_type}"] = _OF_A_KIND
    return found


def spread(topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield launchers for a topology's instances, by name, with what each lays over the file.

    Pairs where a path within a node pays, else one for each instance.
    """
    counts = topology.instances.counts
    pairs = 0
    if topology.transfer.path in _WITHIN_A_NODE:
        pairs = min(counts["encode"], counts["prefill-decode"])
    parts: list[tuple[str, Mapping[Role, int]]] = [
        (f"pair-{number}", {"encode": 1, "prefill-decode": 1}) for number in range(pairs)
    ]
    for role in ROLES:
        paired = pairs if role in ("encode", "prefill-decode") else 0
        parts += [(f"{role}-{number}", {role: 1}) for number in range(paired, counts[role])]
    for name, part in parts:
        yield name, (f"launch.name={name}", *counts_of(part))


def fullness(owed_s: Mapping[str, float], most_s: Mapping[Role, float]) -> float:
    """Return how full a launcher is: 1 where one more is due. Of its roles the fuller one counts.

    Args:
        owed_s: What its instances owe, by role.
        most_s: What they may owe, see `MostOwed.room_s`.
    """
    return max((owed_s.get(role, 0.0) / most for role, most in most_s.items()), default=0.0)

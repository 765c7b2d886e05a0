"""The shapes that a deployment can have on Kubernetes, as objects by file. Pure but for the file.

``nodes``: a launcher with all stages in each Pod; a Pod serves as a plain vLLM server does.
``roles``: a Deployment for each role, and routers that its Pods join.
``disaggregatedset``: the same with one DisaggregatedSet in place of the Deployments of the roles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from epd_portable.config.load import or_shipped
from epd_portable.config.problems import read_text
from epd_portable.config.roles import DUTIES, ROLE_LABEL, ROLES, Role, group_of
from epd_portable.config.routing import PICKER_PORT
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.launchers import ELSEWHERE, MostOwed
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.plan.request import PlanRequest
from epd_portable.launch.render import objects
from epd_portable.launch.render.objects import COMPONENT, NAME, Object
from epd_portable.launch.render.pods import FILE, INSTANCE_PORT, ROUTER_PORT, SECRET_FILE, Pods

Files = dict[str, list[Object]]
"""Objects by the name of the file that they are written to."""

ROUTERS = 2
_OF_A_NODE: Role = "encode-prefill-decode"
"""What a launcher with all stages is to pickers that choose by role."""
_OWED = "epd_{front}_owed_seconds"
_FILES = ("tls_cert_file", "tls_key_file", "api_keys_file", "hop_keys_file", "access_log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """What is rendered.

    Attributes:
        name: Of the deployment, and the beginning of its objects' names.
        image: Has this package and the engine.
        request: The topology, its platform and hardware profile.
        replicas: Pods of shape ``nodes``.
        most: What instances may owe before there are more.
        gateway: Gateway that sends requests here; empty for none.
        prometheus: See `Scaling`.
        secret: The deployment's secret, to be written into a file; empty for a name of it only.
    """

    name: str
    image: str
    request: PlanRequest
    replicas: int
    most: MostOwed
    gateway: str = ""
    prometheus: str = ""
    secret: str = ""

    def files(self, shape: str) -> Files:
        """Return the objects of a shape.

        Raises:
            ConfigError: The topology does not fit the shape, the platform or the profile.
        """
        files = SHAPES[shape](self)
        if self.gateway:
            files["gateway.yaml"] = self._route(files)
        return files

    def _route(self, files: Files) -> list[Object]:
        """Return what brings requests from a Gateway: by a picker to Pods, or to routers."""
        labels: dict[str, str] = {NAME: self.name}
        found: list[Object] = []
        [backend] = (
            each
            for each in itertools.chain.from_iterable(files.values())
            if each["kind"] == "Service" and each["metadata"]["name"] == self.name
        )
        picker, pool = f"{self.name}-picker", functools.partial(objects.inference_pool, self.name)
        if "nodes.yaml" in files:
            pods = self.labels("node", _OF_A_NODE)
            found = [backend := pool(pods, ROUTER_PORT, picker=picker, serves_alone=True)]
        elif self.topology().router.gateway_networks:
            pods = self.labels("instance", self._answering())
            backend = pool(pods, INSTANCE_PORT, picker=picker, serves_alone=False)
            routers = self.labels("router")
            policy = objects.picker_policy(picker, routers, self.gateway, port=ROUTER_PORT)
            found = [backend, objects.service(picker, routers, PICKER_PORT), policy]
        route = objects.http_route(self.name, labels, self.gateway, backend, ROUTER_PORT)
        return [*found, route]

    def _answering(self) -> Role:
        """Return the role of the instances that answer, of which an InferencePool has one."""
        counts = self.topology().instances.counts
        roles = [role for role in ROLES if counts[role] and DUTIES[role] == "answer"]
        if len(roles) != 1:
            raise ConfigError(
                f"{self.request.config}: instances that answer have the roles {', '.join(roles)}, "
                "and an InferencePool has those of one; name one, or leave out router.envoy"
            )
        return roles[0]

    def topology(self) -> Topology:
        """Return the topology as a Pod with the secret reads it, and no router elsewhere."""
        return self.loaded(
            f"launch.host={ELSEWHERE}", f"secret_file={SECRET_FILE}", "router.join=[]"
        )

    def loaded(self, *settings: str) -> Topology:
        """Return the topology with these settings."""
        return self.request.with_settings(*settings).load()

    def warnings(self) -> Iterator[str]:
        """Yield what must be mounted into the Pods by whoever applies the files."""
        topology = self.topology()
        named = {f"router.{key}": getattr(topology.router, key) for key in _FILES}
        if topology.router.gateway_networks and not self.gateway:
            yield (
                "router.envoy: without --gateway every Pod may ask the picker, which "
                "tells the token of the instances; name the Gateway"
            )
        named["store.password_file"] = topology.store and topology.store.password_file
        if topology.model.startswith(("/", ".", "~")):
            named["model"] = topology.model
        for key, path in named.items():
            if path and path != "-":
                yield f"{key} {path}: the Pods have no such file; add it to the image, or a volume"

    def labels(self, component: str, role: Role | None = None) -> dict[str, str]:
        """Return the labels of objects and Pods of one part."""
        labels = {NAME: self.name, COMPONENT: component}
        return labels | ({ROLE_LABEL: role} if role else {})

    def planned(self, role: Role | None, *settings: str) -> tuple[Topology, Plan]:
        """Plan a launcher of the deployment: one instance of a role, or all that the file names."""
        request = self.request.with_settings(*settings)
        return (request.for_role(role) if role else request).plan_elsewhere(INSTANCE_PORT)

    def pods(self, topology: Topology) -> Pods:
        """Return the Pod templates of the deployment."""
        return Pods(
            name=self.name,
            image=self.image,
            platform=self.request.traits,
            topology=topology,
            text=self._text(),
            overrides=self.request.overrides,
        )

    def common(self, *, with_secret: bool) -> Files:
        """Return the topology file, and the secret if it is to be written."""
        labels = {NAME: self.name}
        topology = objects.config_map(f"{self.name}-topology", labels, {FILE: self._text()})
        files = {"topology.yaml": [topology]}
        if with_secret and self.secret:
            held = objects.secret(f"{self.name}-secret", labels, {"secret": self.secret})
            files["secret.yaml"] = [held]
        return files

    def _text(self) -> str:
        return read_text(or_shipped(self.request.config))


def _nodes(asked: Rendering) -> Files:
    """Return launchers with all stages in each Pod."""
    settings = ["router.host=0.0.0.0", f"router.port={ROUTER_PORT}", "launch.host=127.0.0.1"]
    if asked.loaded(*settings).router.join:
        raise ConfigError(
            f"{asked.request.config}: router.join is set, and in shape nodes each Pod has its own "
            "front; remove it, or render shape roles"
        )
    with_secret = asked.loaded(*settings).secret_file is not None
    if with_secret:
        settings.append(f"secret_file={SECRET_FILE}")
    topology, plan = asked.planned(None, *settings)
    labels = asked.labels("node", _OF_A_NODE)
    template = asked.pods(topology).template(
        labels, ["up"], settings, plan, port=ROUTER_PORT, with_secret=with_secret
    )
    workload = objects.deployment(asked.name, labels, template, spare=False)
    front = "front" if plan.front.startswith("engine") else "router"
    scaling = objects.Scaling(
        metric=_OWED.format(front=front),
        most_s=asked.most.room_s(plan),
        of_pods=True,
        prometheus=asked.prometheus,
    )
    return {
        **asked.common(with_secret=with_secret),
        "nodes.yaml": [
            workload,
            objects.disruption_budget(asked.name, labels),
            scaling.scaler(asked.name, labels, workload, asked.replicas),
        ],
        "service.yaml": [objects.service(asked.name, labels, ROUTER_PORT)],
        "monitoring.yaml": [objects.pod_monitor(asked.name, labels, labels)],
    }


def _roles(asked: Rendering) -> Files:
    """Return routers, and a Deployment for each role, whose Pods join them."""
    files, templates = _routers(asked), _templates(asked)
    for role, (template, least) in templates.items():
        name, labels = f"{asked.name}-{role}", asked.labels("instance", role)
        workload = objects.deployment(name, labels, template, spare=False)
        files[f"{role}.yaml"] = [workload, *_scaled(asked, name, labels, workload, role, least)]
    return files


def _disaggregated_set(asked: Rendering) -> Files:
    """Return routers, and one object whose roles join them."""
    files, templates = _routers(asked), _templates(asked)
    if len(templates) < 2:
        raise ConfigError(
            f"{asked.request.config}: instances has one role, {', '.join(templates)}, and a "
            "DisaggregatedSet has two or more; render shape roles, or name another role"
        )
    pods = {role: template for role, (template, _) in templates.items()}
    found = [objects.disaggregated_set(asked.name, asked.labels("instance"), pods)]
    for role, (_, least) in templates.items():
        name = f"{asked.name}-{role}"
        scaler = objects.role_scaler(name)
        found += _scaled(asked, name, asked.labels("instance", role), scaler, role, least)
    files["disaggregatedset.yaml"] = found
    return files


SHAPES: Mapping[str, Callable[[Rendering], Files]] = MappingProxyType(
    {"nodes": _nodes, "roles": _roles, "disaggregatedset": _disaggregated_set}
)


def _routers(asked: Rendering) -> Files:
    """Return the routers, what they share with instances, and who may reach those."""
    counts = asked.topology().instances.counts
    settings = [
        *("router.host=0.0.0.0", f"router.port={ROUTER_PORT}", "router.join=[]"),
        *("launch.host=127.0.0.1", f"secret_file={SECRET_FILE}"),
        *(f"instances.{group_of(role)}.count=0" for role in ROLES if counts[role]),
    ]
    topology, plan = asked.planned(None, *settings)
    labels, members = asked.labels("router"), asked.labels("instance")
    template = asked.pods(topology).template(
        labels, ["up"], settings, plan, port=ROUTER_PORT, with_secret=True
    )
    name = f"{asked.name}-router"
    whole = {NAME: asked.name}
    policy = objects.network_policy(
        f"{asked.name}-instance",
        members,
        whole,
        metrics_port=INSTANCE_PORT,
        gateway=asked.gateway if topology.router.gateway_networks else "",
    )
    return {
        **asked.common(with_secret=True),
        "routers.yaml": [
            objects.deployment(name, labels, template, spare=True, replicas=ROUTERS),
            objects.disruption_budget(name, labels),
            objects.service(asked.name, labels, ROUTER_PORT),
            objects.service(f"{name}-all", labels, ROUTER_PORT, headless=True),
        ],
        "network.yaml": [policy],
        "monitoring.yaml": [objects.pod_monitor(asked.name, whole, whole)],
    }


def _templates(asked: Rendering) -> dict[Role, tuple[Object, int]]:
    """Return for each role the template of its Pods, and how many the topology asks for."""
    settings = [
        f"router.join=http://{asked.name}-router-all:{ROUTER_PORT}",
        *(f"secret_file={SECRET_FILE}", f"launch.first_port={INSTANCE_PORT}"),
    ]
    topology = asked.topology()
    counts = topology.instances.counts
    if topology.router.envoy:
        settings.append("router.envoy=false")
    found = {}
    for role in ROLES:
        if counts[role]:
            topology, plan = asked.planned(role, *settings, f"launch.host={ELSEWHERE}")
            template = asked.pods(topology).template(
                asked.labels("instance", role),
                ["instance", "--role", role],
                [*settings, "launch.host=auto"],
                plan,
                port=INSTANCE_PORT,
                with_secret=True,
            )
            found[role] = template, counts[role]
    return found


def _scaled(
    asked: Rendering,
    name: str,
    labels: Mapping[str, str],
    target: Object,
    role: Role,
    least: int,
) -> list[Object]:
    """Return what keeps enough Pods of a role."""
    scaling = objects.Scaling(
        metric=_OWED.format(front="router"),
        most_s={role: asked.most.of(role)},
        prometheus=asked.prometheus,
    )
    budget = objects.disruption_budget(name, labels)
    return [budget, scaling.scaler(name, labels, target, least)]

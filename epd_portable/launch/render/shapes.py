"""The shapes that a deployment can have on Kubernetes, as objects by file. Pure but for the file.

``nodes``: a launcher with all stages in each Pod; a Pod serves as a plain vLLM server does.
``roles``: a Deployment for each role, and routers that its Pods join.
``disaggregatedset``: the same with one DisaggregatedSet in place of the Deployments of the roles.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from epd_portable.launch.run.supervisor import DRAIN_MARGIN_S

Files = dict[str, list[Object]]
"""Objects by the name of the file that they are written to."""

ROUTERS = 2
ROUTER_PORT = 8000
INSTANCE_PORT = 20000
"""The first port of an instance, of HTTP; its others follow."""
FOLDER, SECRET_FOLDER = "/etc/epd", "/etc/epd-secret"
"""Where the topology file is mounted, and the secret: no volume can be mounted within another."""
FILE = "topology.yaml"
_SECRET = f"secret_file={SECRET_FOLDER}/secret"
_OWN_ADDRESS = "launch.host=auto"
_UNROUTED_S = 5
"""How long a Pod goes on before its SIGTERM: others may not have heard yet that it ends."""
_ENDING_S = 5
"""What a launcher takes for the rest."""
_PROBE_EVERY_S = 5
_SHM_OF_ENGINES = 1 << 30
"""What engines put into ``/dev/shm`` beside the pools."""
_USER = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Of Pods; the group may read the Secret. With `_CONFINED`, Kubernetes' restricted standard."""
_CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_OF_A_NODE: Role = "encode-prefill-decode"
"""What a launcher with all stages is to pickers that choose by role."""
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
        prometheus: See `objects.autoscaler`.
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
        found: list[Object] = []
        [backend] = (
            each
            for each in itertools.chain.from_iterable(files.values())
            if each["kind"] == "Service" and each["metadata"]["name"] == self.name
        )
        picker = f"{self.name}-picker"
        if "nodes.yaml" in files:
            pods = self.labels("node", _OF_A_NODE)
            backend = objects.inference_pool(
                self.name, pods, ROUTER_PORT, picker=picker, serves_alone=True
            )
            found = [backend]
        elif self.topology().router.gateway_networks:
            pods, routers = self.labels("instance", self._answering()), self.labels("router")
            backend = objects.inference_pool(
                self.name, pods, INSTANCE_PORT, picker=picker, serves_alone=False
            )
            clients = {"ports": [{"port": ROUTER_PORT}]}
            asking = objects.from_gateway(self.gateway) | {"ports": [{"port": PICKER_PORT}]}
            found = [
                backend,
                objects.service(picker, routers, PICKER_PORT),
                objects.network_policy(picker, routers, clients, asking),
            ]
        labels = {NAME: self.name}
        return [*found, objects.http_route(self.name, labels, self.gateway, backend, ROUTER_PORT)]

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
        settings = (f"launch.host={ELSEWHERE}", _SECRET, "router.join=[]")
        return self.request.with_settings(*settings).load()

    def warnings(self) -> Iterator[str]:
        """Yield what must be mounted into the Pods before the files are applied."""
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

    def common(self, *, with_secret: bool) -> Files:
        """Return the topology file, and the secret if it is to be written."""
        labels, text = {NAME: self.name}, read_text(or_shipped(self.request.config))
        file = objects.described(
            "v1", "ConfigMap", f"{self.name}-topology", labels, data={FILE: text}
        )
        files = {"topology.yaml": [file]}
        if with_secret and self.secret:
            held = {"type": "Opaque", "stringData": {"secret": self.secret}}
            secret = objects.described("v1", "Secret", f"{self.name}-secret", labels, **held)
            files["secret.yaml"] = [secret]
        return files

    def scaled(
        self,
        target: Object,
        labels: Mapping[str, str],
        least: int,
        most_s: Mapping[Role, float],
        *,
        front: str = "router",
        of_pods: bool = False,
    ) -> list[Object]:
        """Return what keeps enough Pods of an object; arguments as of `objects.autoscaler`.

        ``front`` is who says what instances owe: the engine front, or a router.
        """
        name, metric = target["metadata"]["name"], f"epd_{front}_owed_seconds"
        scaler = objects.autoscaler(
            target,
            labels,
            least,
            metric=metric,
            most_s=most_s,
            of_pods=of_pods,
            prometheus=self.prometheus,
        )
        return [objects.disruption_budget(name, labels), scaler]

    def pods(
        self, labels: Mapping[str, str], settings: Sequence[str], role: Role | None = None
    ) -> tuple[Object, Plan]:
        """Return the template of Pods that run a launcher each, and what one of them starts.

        Args:
            settings: ``--set`` of these launchers; the secret is mounted if one names it.
            role: Of the one instance that they start; ``None`` for all that the file names.
        """
        here = [f"launch.host={ELSEWHERE}" if each == _OWN_ADDRESS else each for each in settings]
        request = self.request.with_settings(*here)
        topology, plan = (request.for_role(role) if role else request).plan_elsewhere(INSTANCE_PORT)
        platform, port = self.request.traits, INSTANCE_PORT if role else ROUTER_PORT
        args = ["instance", "--role", role] if role else ["up"]
        args += ["--platform", platform.name, "--config", f"{FOLDER}/{FILE}"]
        for each in (*self.request.overrides, *settings):
            args += ["--set", each]
        pools = sum(bool(spec.shm_name) for spec in plan.processes)
        shm_mib = math.ceil((pools * topology.transfer.pool_bytes + _SHM_OF_ENGINES) / (1 << 20))
        volumes: list[Object] = [
            {"name": "topology", "configMap": {"name": f"{self.name}-topology"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_mib}Mi"}},
            {"name": "tmp", "emptyDir": {}},
        ]
        mounts: list[Object] = [
            {"name": "topology", "mountPath": FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ]
        if _SECRET in settings:
            held = {"secretName": f"{self.name}-secret", "defaultMode": 0o400}
            volumes.append({"name": "secret", "secret": held})
            mounts.append({"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True})
        instances = sum(spec.role != "router" for spec in plan.processes)
        resources: Object = {"requests": dict(cpu=str(max(1, instances)))}
        if platform.kubernetes_resource and plan.devices:
            resources = {"limits": {platform.kubernetes_resource: str(len(plan.devices))}}
        stop_s = topology.router.drain_s + DRAIN_MARGIN_S + topology.launch.stop_grace_s
        container = {
            "name": "epd",
            "image": self.image,
            "command": ["epd-launch"],
            "args": args,
            "ports": [{"name": "http", "containerPort": port}],
            **_probes(topology, has_front=not role, has_instances=instances > 0),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNROUTED_S)]}}},
            "resources": resources,
            "securityContext": dict(_CONFINED),
            "volumeMounts": mounts,
        }
        digest = hashlib.sha256(read_text(or_shipped(self.request.config)).encode()).hexdigest()
        template = {
            "metadata": {
                "labels": dict(labels),
                # Another file is another template, so that its Pods are updated.
                "annotations": {"epd-portable/topology": digest[:16]},
            },
            "spec": {
                "automountServiceAccountToken": False,
                # Variables of Services would be taken for those of vLLM and of this package.
                "enableServiceLinks": False,
                # Processes that the launcher leaves behind are reaped by the Pod's own.
                "shareProcessNamespace": True,
                "terminationGracePeriodSeconds": math.ceil(_UNROUTED_S + stop_s + _ENDING_S),
                "securityContext": dict(_USER),
                "containers": [container],
                "volumes": volumes,
            },
        }
        return template, plan


def _probes(topology: Topology, *, has_front: bool, has_instances: bool) -> Object:
    """Return when a Pod has started and is ready; the launcher sees to the rest."""
    scheme = "HTTPS" if topology.router.tls_cert_file and has_front else "HTTP"
    healthy = {"httpGet": {"path": "/health", "port": "http", "scheme": scheme}}
    # A router alone is not healthy before instances have joined.
    started = healthy if has_instances else {"tcpSocket": {"port": "http"}}
    most = math.ceil(topology.launch.startup_timeout_s / _PROBE_EVERY_S) + 1
    times = {"periodSeconds": _PROBE_EVERY_S, "timeoutSeconds": _PROBE_EVERY_S}
    return {
        "startupProbe": {**started, **times, "failureThreshold": most},
        "readinessProbe": {**healthy, **times, "failureThreshold": 2},
    }


def _nodes(asked: Rendering) -> Files:
    """Return launchers with all stages in each Pod."""
    settings = ["router.host=0.0.0.0", f"router.port={ROUTER_PORT}", "launch.host=127.0.0.1"]
    topology = asked.request.with_settings(*settings).load()
    if topology.router.join:
        raise ConfigError(
            f"{asked.request.config}: router.join is set, and in shape nodes each Pod has its own "
            "front; remove it, or render shape roles"
        )
    if with_secret := topology.secret_file is not None:
        settings.append(_SECRET)
    labels = asked.labels("node", _OF_A_NODE)
    template, plan = asked.pods(labels, settings)
    workload = objects.deployment(asked.name, labels, template, spare=False)
    front = "front" if plan.front.startswith("engine") else "router"
    most_s = asked.most.room_s(plan)
    return {
        **asked.common(with_secret=with_secret),
        "nodes.yaml": [
            workload,
            *asked.scaled(workload, labels, asked.replicas, most_s, front=front, of_pods=True),
        ],
        "service.yaml": [objects.service(asked.name, labels, ROUTER_PORT)],
        "monitoring.yaml": [objects.pod_monitor(asked.name, labels, labels)],
    }


def _roles(asked: Rendering) -> Files:
    """Return routers, and a Deployment for each role, whose Pods join them."""
    files = _routers(asked)
    for role, (template, least) in _templates(asked).items():
        labels = asked.labels("instance", role)
        workload = objects.deployment(f"{asked.name}-{role}", labels, template, spare=False)
        scaled = asked.scaled(workload, labels, least, {role: asked.most.of(role)})
        files[f"{role}.yaml"] = [workload, *scaled]
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
        labels, api = asked.labels("instance", role), objects.DISAGGREGATED_SET
        # What the controller makes for each role.
        scaler = objects.described(api, "DisaggregatedSetRoleScaler", f"{asked.name}-{role}", {})
        found += asked.scaled(scaler, labels, least, {role: asked.most.of(role)})
    files["disaggregatedset.yaml"] = found
    return files


SHAPES: Mapping[str, Callable[[Rendering], Files]] = MappingProxyType(
    {"nodes": _nodes, "roles": _roles, "disaggregatedset": _disaggregated_set}
)


def _routers(asked: Rendering) -> Files:
    """Return the routers, what they share with instances, and who may reach those."""
    topology = asked.topology()
    counts = topology.instances.counts
    settings = [
        *("router.host=0.0.0.0", f"router.port={ROUTER_PORT}", "router.join=[]"),
        *("launch.host=127.0.0.1", _SECRET),
        *(f"instances.{group_of(role)}.count=0" for role in ROLES if counts[role]),
    ]
    name, whole, labels = f"{asked.name}-router", {NAME: asked.name}, asked.labels("router")
    template, _ = asked.pods(labels, settings)
    allowed: list[Object] = [
        {"from": [{"podSelector": {"matchLabels": whole}}]},
        objects.from_prometheus(INSTANCE_PORT),
    ]
    if asked.gateway and topology.router.gateway_networks:
        allowed.append(objects.from_gateway(asked.gateway))
    members = asked.labels("instance")
    return {
        **asked.common(with_secret=True),
        "routers.yaml": [
            objects.deployment(name, labels, template, spare=True, replicas=ROUTERS),
            objects.disruption_budget(name, labels),
            objects.service(asked.name, labels, ROUTER_PORT),
            objects.service(f"{name}-all", labels, ROUTER_PORT, headless=True),
        ],
        "network.yaml": [objects.network_policy(f"{asked.name}-instance", members, *allowed)],
        "monitoring.yaml": [objects.pod_monitor(asked.name, whole, whole)],
    }


def _templates(asked: Rendering) -> dict[Role, tuple[Object, int]]:
    """Return for each role the template of its Pods, and how many the topology asks for."""
    topology = asked.topology()
    settings = [
        f"router.join=http://{asked.name}-router-all:{ROUTER_PORT}",
        *(_SECRET, f"launch.first_port={INSTANCE_PORT}"),
        *(["router.envoy=false"] if topology.router.envoy else []),
        _OWN_ADDRESS,
    ]
    return {
        role: (asked.pods(asked.labels("instance", role), settings, role)[0], count)
        for role, count in topology.instances.counts.items()
        if count
    }

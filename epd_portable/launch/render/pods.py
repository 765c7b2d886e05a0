"""Templates of Pods: a launcher with a part of a topology in each. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from epd_portable.config.schema import Topology
from epd_portable.launch.plan.processes import Plan
from epd_portable.launch.render.objects import Object
from epd_portable.launch.run.supervisor import DRAIN_MARGIN_S
from epd_portable.platforms.traits import PlatformTraits

FOLDER, SECRET_FOLDER = "/etc/epd", "/etc/epd-secret"
"""Where the topology file is mounted, and the secret: no volume can be mounted within another."""
FILE = "topology.yaml"
SECRET_FILE = f"{SECRET_FOLDER}/secret"
ROUTER_PORT = 8000
INSTANCE_PORT = 20000
"""The first port of an instance, of HTTP; its others follow."""
_UNROUTED_S = 5
"""How long a Pod goes on before its SIGTERM: others may not have heard yet that it ends."""
_ENDING_S = 5
"""What a launcher takes for the rest."""
_PROBE_EVERY_S = 5
_SHM_OF_ENGINES = 1 << 30
"""What engines put into ``/dev/shm`` beside the pools."""


class Pods:
    """Pod templates of one topology.

    Args:
        name: Of the deployment, and the beginning of its objects' names.
        image: Has this package and the engine.
        text: The topology file, as it is mounted.
        overrides: ``--set`` of all launchers.
    """

    def __init__(
        self,
        *,
        name: str,
        image: str,
        platform: PlatformTraits,
        topology: Topology,
        text: str,
        overrides: Sequence[str],
    ) -> None:
        self._name = name
        self._image = image
        self._platform = platform
        self._topology = topology
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._overrides = overrides

    def template(
        self,
        labels: Mapping[str, str],
        command: Sequence[str],
        settings: Sequence[str],
        plan: Plan,
        *,
        port: int,
        with_secret: bool,
    ) -> Object:
        """Return the template of Pods that run one launcher.

        Args:
            command: Of ``epd-launch``, without platform, file and settings.
            settings: ``--set`` of this launcher.
            port: Answers ``/health`` with 200 when the Pod can be used.
            with_secret: Whether the deployment's secret is mounted.
        """
        args = [*command, "--platform", self._platform.name, "--config", f"{FOLDER}/{FILE}"]
        for each in (*self._overrides, *settings):
            args += ["--set", each]
        volumes: list[Object] = [
            {"name": "topology", "configMap": {"name": f"{self._name}-topology"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self._shm_size(plan)}},
        ]
        mounts: list[Object] = [
            {"name": "topology", "mountPath": FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        if with_secret:
            held = {"secretName": f"{self._name}-secret", "defaultMode": 0o400}
            volumes.append({"name": "secret", "secret": held})
            mounts.append({"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True})
        container = {
            "name": "epd",
            "image": self._image,
            "command": ["epd-launch"],
            "args": args,
            "ports": [{"name": "http", "containerPort": port}],
            **self._probes(port, is_router=all(spec.role == "router" for spec in plan.processes)),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNROUTED_S)]}}},
            "resources": self._resources(plan),
            "volumeMounts": mounts,
        }
        return {
            "metadata": {
                "labels": dict(labels),
                # Another file is another template, so that its Pods are updated.
                "annotations": {"epd-portable/topology": self._digest},
            },
            "spec": {
                "automountServiceAccountToken": False,
                # Processes that the launcher leaves behind are reaped by the Pod's own.
                "shareProcessNamespace": True,
                "terminationGracePeriodSeconds": self._grace_s(),
                "containers": [container],
                "volumes": volumes,
            },
        }

    def _probes(self, port: int, *, is_router: bool) -> Object:
        """Return when a Pod has started and is ready; the launcher sees to the rest."""
        scheme = "HTTPS" if self._topology.router.tls_cert_file and port == ROUTER_PORT else "HTTP"
        healthy = {"httpGet": {"path": "/health", "port": "http", "scheme": scheme}}
        # A router alone is not healthy before instances have joined.
        started = {"tcpSocket": {"port": "http"}} if is_router else healthy
        most = math.ceil(self._topology.launch.startup_timeout_s / _PROBE_EVERY_S) + 1
        times = {"periodSeconds": _PROBE_EVERY_S, "timeoutSeconds": _PROBE_EVERY_S}
        return {
            "startupProbe": {**started, **times, "failureThreshold": most},
            "readinessProbe": {**healthy, **times, "failureThreshold": 2},
        }

    def _resources(self, plan: Plan) -> Object:
        """Return what Pods ask for: their devices, or a core for each instance without any."""
        instances = [spec for spec in plan.processes if spec.role != "router"]
        if self._platform.kubernetes_resource and plan.devices:
            return {"limits": {self._platform.kubernetes_resource: str(len(plan.devices))}}
        return {"requests": dict(cpu=str(max(1, len(instances))))}

    def _shm_size(self, plan: Plan) -> str:
        pools = sum(bool(spec.shm_name) for spec in plan.processes)
        size = pools * self._topology.transfer.pool_bytes + _SHM_OF_ENGINES
        return f"{math.ceil(size / (1 << 20))}Mi"

    def _grace_s(self) -> int:
        router, launch = self._topology.router, self._topology.launch
        stop_s = router.drain_s + DRAIN_MARGIN_S + launch.stop_grace_s
        return math.ceil(_UNROUTED_S + stop_s + _ENDING_S)

"""Objects of Kubernetes as plain dicts: what the shapes are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd_portable.config.roles import Role
from epd_portable.config.routing import PICKER_PORT

Object = dict[str, Any]

NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
"""Labels: the deployment that an object is of, and which part of it."""
MONITORING = "monitoring"
"""Namespace that Prometheus usually runs in; its Pods may read the metrics of instances."""
GATEWAY = "gateway.networking.k8s.io/gateway-name"
"""Label of the Pods that a Gateway is made of."""
DISAGGREGATED_SET = "disaggregatedset.x-k8s.io/v1"
_MOST_REPLICAS = 4
"""What an autoscaler may start, in multiples of what the topology asks for."""
_BEHAVIOR: Object = {
    # A replica takes minutes to start: one that is ended too early is missed for as long.
    "scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]},
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
    },
}


def described(api: str, kind: str, name: str, labels: Mapping[str, str], **body: Any) -> Object:
    """Return an object with its head."""
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def deployment(
    name: str, labels: Mapping[str, str], template: Object, *, spare: bool, replicas: int = 0
) -> Object:
    """Return a Deployment.

    Args:
        labels: Its labels, and those by which it knows its Pods.
        template: Of its Pods, which have the labels, too.
        spare: Whether an update starts a Pod before it ends one. Where Pods hold devices there may
            be none for it.
        replicas: 0 where an autoscaler sets them.
    """
    update = {"maxSurge": int(spare), "maxUnavailable": int(not spare)}
    spec = {
        **({"replicas": replicas} if replicas else {}),
        "selector": {"matchLabels": dict(labels)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "template": template,
    }
    return described("apps/v1", "Deployment", name, labels, spec=spec)


def service(name: str, labels: Mapping[str, str], port: int, *, headless: bool = False) -> Object:
    """Return a Service of the Pods with these labels.

    A headless one has the addresses of all of them, also of those that are not ready: a router is
    ready when instances have joined, which look for its address.
    """
    spec: Object = {"selector": dict(labels), "ports": [{"name": "http", "port": port}]}
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return described("v1", "Service", name, labels, spec=spec)


def disruption_budget(name: str, labels: Mapping[str, str]) -> Object:
    """Return what lets one Pod at a time be evicted."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": dict(labels)}}
    return described("policy/v1", "PodDisruptionBudget", name, labels, spec=spec)


def autoscaler(
    target: Object,
    labels: Mapping[str, str],
    least: int,
    *,
    metric: str,
    most_s: Mapping[Role, float],
    of_pods: bool = False,
    prometheus: str = "",
) -> Object:
    """Return what scales an object by the seconds of work that instances owe, see docs/metrics.md.

    Args:
        target: What is scaled, or its reference; the scaler has its name.
        least: Replicas that are always there.
        metric: Gauge with the label ``role``.
        most_s: For each replica at most, by role of the instances that owe it.
        of_pods: Whether each Pod shows what its own instances owe; else it is summed over routers.
        prometheus: URL of the server that KEDA asks; empty for a HorizontalPodAutoscaler.
    """
    name = target["metadata"]["name"]
    head = {"apiVersion": target["apiVersion"], "kind": target["kind"]}
    spec: Object = {"scaleTargetRef": {**head, "name": name}}
    if not prometheus:
        source = "Pods" if of_pods else "External"
        metrics = [
            {
                "type": source,
                source.lower(): {
                    "metric": {"name": metric, "selector": {"matchLabels": {"role": role}}},
                    "target": {"type": "AverageValue", "averageValue": f"{most:g}"},
                },
            }
            for role, most in most_s.items()
        ]
        spec |= {"minReplicas": least, "maxReplicas": _MOST_REPLICAS * least}
        spec |= {"metrics": metrics, "behavior": _BEHAVIOR}
        return described("autoscaling/v2", "HorizontalPodAutoscaler", name, labels, spec=spec)
    triggers = [
        {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": prometheus,
                # The job of a PodMonitor is its namespace, a slash and its name.
                "query": f'sum({metric}{{role="{role}",job=~".+/{labels[NAME]}"}}) or vector(0)',
                "threshold": f"{most:g}",
            },
        }
        for role, most in most_s.items()
    ]
    spec |= {"minReplicaCount": least, "maxReplicaCount": _MOST_REPLICAS * least}
    spec |= {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}}}
    spec |= {"triggers": triggers}
    return described("keda.sh/v1alpha1", "ScaledObject", name, labels, spec=spec)


def network_policy(name: str, labels: Mapping[str, str], *allowed: Object) -> Object:
    """Return a policy that admits to Pods with these labels by some rules only."""
    spec = {
        "podSelector": {"matchLabels": dict(labels)},
        "policyTypes": ["Ingress"],
        "ingress": list(allowed),
    }
    return described("networking.k8s.io/v1", "NetworkPolicy", name, labels, spec=spec)


def from_prometheus(port: int) -> Object:
    """Return the rule that lets Prometheus in at a port."""
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}}
    return {"from": [where], "ports": [{"port": port}]}


def from_gateway(name: str) -> Object:
    """Return the rule that lets the Pods of a Gateway in, from whichever namespace it is in."""
    where = {"namespaceSelector": {}, "podSelector": {"matchLabels": {GATEWAY: name}}}
    return {"from": [where]}


def pod_monitor(name: str, labels: Mapping[str, str], selected: Mapping[str, str]) -> Object:
    """Return what lets Prometheus' operator scrape the port ``http`` of Pods."""
    # The router's metrics name instances, which are not the Pod that is scraped.
    endpoint = {"port": "http", "path": "/metrics", "honorLabels": True}
    spec = {"selector": {"matchLabels": dict(selected)}, "podMetricsEndpoints": [endpoint]}
    return described("monitoring.coreos.com/v1", "PodMonitor", name, labels, spec=spec)


def disaggregated_set(
    name: str, labels: Mapping[str, str], templates: Mapping[Role, Object]
) -> Object:
    """Return LeaderWorkerSet's object of several roles, by the templates of their Pods.

    How many there are of a role is written by its autoscaler alone.
    """
    update = {"maxSurge": 0, "maxUnavailable": 1}
    listed = [
        {
            "name": role,
            "scaling": {"mode": "External"},
            "spec": {
                "rolloutStrategy": {"rollingUpdateConfiguration": update},
                "leaderWorkerTemplate": {"size": 1, "workerTemplate": template},
            },
        }
        for role, template in templates.items()
    ]
    return described(DISAGGREGATED_SET, "DisaggregatedSet", name, labels, spec={"roles": listed})


def inference_pool(
    name: str, labels: Mapping[str, str], port: int, *, picker: str, serves_alone: bool
) -> Object:
    """Return what lets a gateway send requests to Pods that an endpoint picker chooses.

    Args:
        labels: Its labels, and those of the Pods.
        picker: Service of the picker.
        serves_alone: Whether the Pods answer requests without what the picker adds: the gateway
            then chooses by itself while there is no picker.
    """
    spec = {
        "selector": {"matchLabels": dict(labels)},
        "targetPorts": [{"number": port}],
        "endpointPickerRef": {
            "name": picker,
            "port": {"number": PICKER_PORT},
            "failureMode": "FailOpen" if serves_alone else "FailClose",
        },
    }
    api = "inference.networking.k8s.io/v1"
    return described(api, "InferencePool", name, labels, spec=spec)


def http_route(
    name: str, labels: Mapping[str, str], gateway: str, backend: Object, port: int
) -> Object:
    """Return what lets a Gateway send requests to a Service or an InferencePool."""
    group = backend["apiVersion"].rpartition("/")[0]
    to: Object = {"kind": backend["kind"], "name": backend["metadata"]["name"]}
    to |= {"group": group} if group else {"port": port}
    spec = {"parentRefs": [{"name": gateway}], "rules": [{"backendRefs": [to]}]}
    return described("gateway.networking.k8s.io/v1", "HTTPRoute", name, labels, spec=spec)

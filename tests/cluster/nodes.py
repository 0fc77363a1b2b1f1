"""Stand-in nodes as GKE would register them: labels, capacity, taints, address of their logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.cluster.api import Json
from tests.cluster.containers import now

POOL = "cloud.google.com/gke-nodepool"
TPU = "google.com/tpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What nodes of one pool have in common."""

    pool: str
    labels: Mapping[str, str]
    capacity: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]


def tpu_node(pool: str, *, accelerator: str, topology: str, chips: int, labels: Mapping[str, str]) -> Node:
    return Node(
        pool=pool,
        labels={
            POOL: pool,
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": topology,
            **labels,
        },
        capacity={"cpu": "208", "memory": "448Gi", "pods": "110", TPU: str(chips)},
        taints=({"key": TPU, "value": "present", "effect": "NoSchedule"},),
    )


def cpu_node(pool: str, *, labels: Mapping[str, str], pods: int) -> Node:
    capacity = {"cpu": "208", "memory": "448Gi", "pods": str(pods)}
    return Node(pool=pool, labels={POOL: pool, **labels}, capacity=capacity, taints=())


def node_body(name: str, node: Node, *, port: int) -> Json:
    """The node, ready, whose logs are served at a port of loopback."""
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}
    times = {"lastHeartbeatTime": now()[:19] + "Z", "lastTransitionTime": now()[:19] + "Z"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **node.labels}},
        "spec": {"taints": [dict(taint) for taint in node.taints]},
        "status": {
            "capacity": dict(node.capacity),
            "allocatable": dict(node.capacity),
            "conditions": [ready | times],
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        },
    }

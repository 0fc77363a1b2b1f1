"""Queues of a test under the real Kueue."""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.api import Json
from tests.cluster.cluster import Cluster

GROUP = "/apis/kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


def make_queue(
    cluster: Cluster,
    name: str,
    *,
    quota: Mapping[str, str],
    node_labels: Mapping[str, str] | None = None,
    preempt_lower: bool = False,
) -> None:
    """A LocalQueue in the namespace with a ClusterQueue and a flavor of its own.

    ``quota`` names all resources that pods request, as in ``{"google.com/tpu": "8", "cpu": "64"}``: Kueue
    0.17 never admits a workload that requests another one. ``pods`` counts only where it is named.
    """
    api, whole = cluster.api, f"{cluster.namespace}-{name}"
    flavor = {
        "metadata": {"name": whole},
        "spec": {"nodeLabels": dict(node_labels or {})},
    }
    group = {
        "coveredResources": list(quota),
        "flavors": [
            {
                "name": whole,
                "resources": [{"name": key, "nominalQuota": value} for key, value in quota.items()],
            }
        ],
    }
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority" if preempt_lower else "Never"},
    }
    api.create(f"{GROUP}/resourceflavors", _typed("ResourceFlavor", flavor))
    api.create(f"{GROUP}/clusterqueues", _typed("ClusterQueue", {"metadata": {"name": whole}, "spec": spec}))
    local = {"metadata": {"name": name}, "spec": {"clusterQueue": whole}}
    api.create(f"{GROUP}/namespaces/{cluster.namespace}/localqueues", _typed("LocalQueue", local))


def make_priority(cluster: Cluster, value: int) -> str:
    """A WorkloadPriorityClass; gives its name."""
    name = f"{cluster.namespace}-{value}"
    body = {"metadata": {"name": name}, "value": value}
    cluster.api.create(f"{GROUP}/workloadpriorityclasses", _typed("WorkloadPriorityClass", body))
    return name


def workloads(cluster: Cluster) -> list[Json]:
    """Kueue's own view of what is queued and admitted in the namespace."""
    found: list[Json] = cluster.api.get(f"{GROUP}/namespaces/{cluster.namespace}/workloads")["items"]
    return found


def _typed(kind: str, body: Mapping[str, object]) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, **body}

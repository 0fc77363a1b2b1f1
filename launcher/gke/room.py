"""How many slices of a run would find nodes now, its own counted in. Pure.

Nodes that a pool could still scale up to are not seen: only the GKE API could tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launcher.gke.doctor_checks import quantity
from launcher.gke.doctor_checks_nodes import Hosts, chips, obstacle
from launcher.gke.objects import Object, items, label, mapping, name, text
from launcher.gke.observe import JOBSET_NAME
from launcher.gke.podspec import NODE_POOL, TPU


def room(nodes: Sequence[Object], pods: Sequence[Object], hosts: Hosts, *, run: str, namespace: str) -> int:
    """Slices that fit.

    Args:
      nodes: of the cluster.
      pods: that are bound to nodes and have not ended, of all namespaces as far as they may be seen.
      hosts: what the run's pods ask of their nodes.
      run: name of its JobSet, whose pods would make room.
      namespace: of that.
    """
    others = [pod for pod in pods if not _is_own(pod, run, namespace)]
    usable = [
        node
        for node in nodes
        if all(label(node, key) == value for key, value in hosts.labels.items())
        and not obstacle(node, hosts.tolerations)
    ]
    if not hosts.is_tpu:
        return _places(usable, others) // hosts.hosts_per_slice
    taken = {text(pod, "spec", "nodeName") for pod in others if _takes_chips(pod)}
    free = [node for node in usable if chips(node) == hosts.chips_per_host and name(node) not in taken]
    if hosts.hosts_per_slice == 1:
        return len(free)
    # A slice of several hosts is one node pool, all of it.
    pools = Counter(label(node, NODE_POOL) for node in free)
    return sum(count >= hosts.hosts_per_slice for count in pools.values())


def _places(nodes: Sequence[Object], others: Sequence[Object]) -> int:
    """Pods that nodes without chips can still take: hosts of a rehearsal ask for nothing else."""
    used = Counter(text(pod, "spec", "nodeName") for pod in others)
    allowed = ((name(node), quantity(mapping(node, "status", "allocatable").get("pods"))) for node in nodes)
    return sum(max(0, int(number or 0) - used[node]) for node, number in allowed)


def _is_own(pod: Object, run: str, namespace: str) -> bool:
    return label(pod, JOBSET_NAME) == run and text(pod, "metadata", "namespace") == namespace


def _takes_chips(pod: Object) -> bool:
    return any(TPU in mapping(each, "resources", "requests") for each in items(pod, "spec", "containers"))

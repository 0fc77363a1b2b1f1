"""Checks of the nodes that are there: hardware, chips, whole slices, taints. Pure.

A node pool may scale up from none, and only the GKE API could tell; so nodes that are not there are a
warning with what to look at, and nodes that are there and cannot fit are a failure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.gke.doctor_checks import (
    FoundAll,
    Result,
    Unseen,
    failed,
    listed,
    ok,
    quantity,
    taint_text,
    tolerates,
    unknown,
    warning,
)
from launcher.gke.objects import Object, is_deleting, is_true, items, label, mapping, name, text
from launcher.gke.podspec import NODE_POOL, QUEUED, TPU
from recipes.kubernetes_names import ACCELERATOR, FLEX_START, SPOT, TOPOLOGY

_CAPACITY_TAINTS = (SPOT, FLEX_START, QUEUED)
_TERMINATING = "cloud.google.com/impending-node-termination"
_SEEN_OTHERWISE = ("node.kubernetes.io/unschedulable", "node.kubernetes.io/not-ready")
"""Taints of what is looked at by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """What the pods of a run ask of their nodes."""

    labels: Mapping[str, str]
    tolerations: Sequence[Object]
    chips_per_host: int
    """0 on CPU nodes."""
    hosts_per_slice: int
    num_slices: int
    machine_type: str

    @property
    def is_tpu(self) -> bool:
        return self.chips_per_host > 0

    @property
    def shape(self) -> str:
        return f"{self.labels.get(ACCELERATOR, '')} {self.labels.get(TOPOLOGY, '')}".strip() or "CPU"


def check_nodes(nodes: FoundAll, hosts: Hosts) -> Sequence[Result]:
    """Whether the slices can start on the nodes that are up; whether others' pods hold them is not seen."""
    if isinstance(nodes, Unseen):
        return [unknown("nodes", nodes.reason)]
    fitting = [node for node in nodes if _has(node, hosts.labels)]
    if not fitting:
        return [_none_found(nodes, hosts)]
    if not hosts.is_tpu:
        return [_check_cpu(fitting, hosts)]
    return [ok("nodes", f"{len(fitting)} of {hosts.shape} are up"), *_check_tpu(fitting, hosts)]


def _has(node: Object, labels: Mapping[str, str]) -> bool:
    return all(label(node, key) == value for key, value in labels.items())


def _none_found(nodes: Sequence[Object], hosts: Hosts) -> Result:
    """Says how near the cluster comes, and what would have to be there."""
    hardware = {key: value for key, value in hosts.labels.items() if key in (ACCELERATOR, TOPOLOGY)}
    similar = [node for node in nodes if _has(node, hardware)] if hardware else nodes
    others = {key: value for key, value in hosts.labels.items() if key not in hardware}
    if similar and others:
        wanted = listed([f"{key}={value}" for key, value in others.items()])
        message = f"{len(similar)} of {hosts.shape} are up, but none with {wanted}"
    else:
        message = f"none of {hosts.shape} is up; {_alternatives(nodes, hosts)}"
    pool = f"{hosts.machine_type}, {listed([f'{key}={value}' for key, value in hosts.labels.items()])}"
    look = "`gcloud container node-pools list`"
    fix = f"change the recipe, unless a node pool of {pool} scales up from none ({look})"
    return warning("nodes", message, fix)


def _alternatives(nodes: Sequence[Object], hosts: Hosts) -> str:
    """What the cluster does have, the same accelerator first."""
    if not hosts.is_tpu:
        return f"the cluster has {len(nodes)} others"
    shapes = Counter((label(node, ACCELERATOR), label(node, TOPOLOGY)) for node in nodes)
    own = hosts.labels.get(ACCELERATOR)
    ordered = sorted(shapes, key=lambda shape: (shape[0] != own, shape))
    if not ordered:
        return "the cluster has no TPU node at all"
    return "the cluster has " + listed([f"{' '.join(shape)} ({shapes[shape]} nodes)" for shape in ordered])


def _check_cpu(fitting: Sequence[Object], hosts: Hosts) -> Result:
    usable = [node for node in fitting if not obstacle(node, hosts.tolerations)]
    if not usable:
        why = obstacle(fitting[0], hosts.tolerations)
        return warning(
            "nodes", f"{name(fitting[0])} {why}; no other fits", "wait, or change target.node_selector"
        )
    return ok("nodes", f"{len(usable)} can take hosts")


def _check_tpu(fitting: Sequence[Object], hosts: Hosts) -> Sequence[Result]:
    """``fitting``: nodes with all the labels."""
    alike = [node for node in fitting if chips(node) == hosts.chips_per_host]
    if not alike:
        counts = sorted({chips(node) for node in fitting})
        there = f"the nodes of {hosts.shape} have {' or '.join(map(str, counts))} chips"
        fix = f"set hardware.chips_per_host={counts[-1]}, or have a pool of {hosts.machine_type} made"
        if counts == [0]:
            fix = "look at the TPU device plugin on those nodes, or tell an administrator"
        return [failed("chips per host", f"{there}, the recipe means {hosts.chips_per_host}", fix)]
    found = [ok("chips per host", f"{hosts.chips_per_host}, as the recipe means")]
    if barred := _barred(alike, hosts):
        return [*found, barred]
    return [*found, _check_slices(alike, hosts)]


def _barred(nodes: Sequence[Object], hosts: Hosts) -> Result | None:
    """The taint that every node has and the pods do not tolerate."""
    taints = [{taint_text(taint): taint for taint in _barring(node, hosts.tolerations)} for node in nodes]
    shared = set.intersection(*map(set, taints))
    for shown in sorted(shared):
        key = text(taints[0][shown], "key")
        message = f"every node of {hosts.shape} has the taint {shown}, which the pods do not tolerate"
        if key in _CAPACITY_TAINTS:
            capacity = "spot" if key == SPOT else "flex_start"
            fix = f"set target.capacity={capacity}, unless another pool scales up from none"
            return warning("taints", message, fix)
        return failed("taints", message, "have the taint removed, or use other nodes")
    return None


def _barring(node: Object, tolerations: Sequence[Object]) -> Sequence[Object]:
    return [
        taint
        for taint in items(node, "spec", "taints")
        if text(taint, "effect") in ("NoSchedule", "NoExecute")
        and text(taint, "key") not in _SEEN_OTHERWISE
        and not tolerates(tolerations, taint)
    ]


def obstacle(node: Object, tolerations: Sequence[Object]) -> str:
    """Why a node takes no pod of the run, as a clause; empty when it does."""
    if is_deleting(node):
        return "is being deleted"
    if mapping(node, "spec").get("unschedulable") is True:
        return "is cordoned"
    if not is_true(node, "Ready"):
        return "is not ready"
    for taint in _barring(node, tolerations):
        if text(taint, "key") == _TERMINATING:
            return "is about to be terminated"
        return f"has the taint {taint_text(taint)}"
    return ""


def _check_slices(nodes: Sequence[Object], hosts: Hosts) -> Result:
    """A slice of several hosts is one node pool, all of it; otherwise every node is a slice."""
    pools: dict[str, list[Object]] = defaultdict(list)
    for node in nodes:
        pools[label(node, NODE_POOL) or "(no pool)"].append(node)
    usable = {
        pool: sum(not obstacle(node, hosts.tolerations) for node in members)
        for pool, members in pools.items()
    }
    if hosts.hosts_per_slice == 1:
        whole = sum(usable.values())
        lacking = [node for node in nodes if obstacle(node, hosts.tolerations)]
    else:
        whole = sum(count >= hosts.hosts_per_slice for count in usable.values())
        broken = [pool for pool, count in usable.items() if count < hosts.hosts_per_slice]
        lacking = [node for pool in broken for node in pools[pool] if obstacle(node, hosts.tolerations)]
    counted = f"{whole} of the {hosts.num_slices} slices can start on the nodes that are up"
    if whole >= hosts.num_slices:
        return ok("whole slices", f"{whole} are up, {hosts.num_slices} are wanted")
    why = [f"{name(node)} {obstacle(node, hosts.tolerations)}" for node in lacking]
    if hosts.hosts_per_slice > 1:
        short = [pool for pool in pools if len(pools[pool]) < hosts.hosts_per_slice]
        why += [f"pool {pool} has {len(pools[pool])} of {hosts.hosts_per_slice} hosts" for pool in short]
    reason = f"; {listed(why)}" if why else ""
    fix = "unless more pools scale up, use fewer slices, or wait: the run would be pending"
    return warning("whole slices", f"{counted}{reason}", fix)


def chips(node: Object) -> int:
    return int(quantity(mapping(node, "status", "allocatable").get(TPU)) or 0)

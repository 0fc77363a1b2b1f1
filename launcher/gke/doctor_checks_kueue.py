"""Checks of Kueue: the queue, what stands behind it, and whether the run could ever be admitted. Pure.

A flavor takes pods as Kueue's own flavor assigner decides (kueue.sigs.k8s.io/docs/concepts/resource_flavor):
of the pods' node selector only keys count that some flavor of the resource group has, and taints of the
flavor must be tolerated by the pods or by the flavor itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.gke.doctor_checks import (
    Found,
    FoundAll,
    PodSet,
    Result,
    Unseen,
    failed,
    listed,
    ok,
    quantity,
    selects,
    taint_text,
    tolerates,
    unknown,
    warning,
)
from launcher.gke.objects import Object, condition, dig, is_true, items, mapping, name, text

ADMINISTRATOR = "tell the administrator of the queues"
_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavors:
    """A ClusterQueue with the ResourceFlavors that it names."""

    queue: Object
    flavors: Mapping[str, Found]


def check_kueue(group: Found) -> Result:
    """``group``: what the API server says of kueue.x-k8s.io; None when it does not have it."""
    if isinstance(group, Unseen):
        return unknown("kueue", group.reason)
    if group is None:
        fix = "set target.queue=null, or have Kueue installed (k8s/install/kueue)"
        return failed("kueue", "is not installed in this cluster", fix)
    return ok("kueue", f"serves {listed([text(each, 'version') for each in items(group, 'versions')])}")


def check_local_queue(queue: str, found: Found, others: FoundAll) -> Result:
    check = "queue"
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        there = [] if isinstance(others, Unseen) else sorted(name(each) for each in others)
        has = f"; it has {listed(there)}" if there else ""
        message = f"there is no LocalQueue {queue} in the namespace{has}"
        return failed(check, message, "correct target.queue, or have it made (k8s/base/queue)")
    if reason := _inactive(found):
        return failed(check, f"LocalQueue {queue} takes nothing: {reason}", ADMINISTRATOR)
    return ok(check, f"{queue} belongs to ClusterQueue {text(found, 'spec', 'clusterQueue')}")


def check_cluster_queue(queue: str, found: Found) -> Result:
    check = "cluster queue"
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        return failed(check, f"there is no ClusterQueue {queue}", ADMINISTRATOR)
    if reason := _inactive(found):
        return failed(check, f"{queue} admits nothing: {reason}", ADMINISTRATOR)
    return ok(check, f"{queue} is active")


def _inactive(found: Object) -> str:
    """Why a queue does not work; empty when it does, or Kueue has not looked at it yet."""
    if (policy := text(found, "spec", "stopPolicy")) not in ("", "None"):
        return f"its stopPolicy is {policy}"
    active = condition(found, "Active")
    return "" if not active or is_true(found, "Active") else text(active, "message") or "it is not active"


def check_admits_namespace(queue: Object, namespace: Found) -> Result:
    """Kueue leaves the runs of a namespace that the ClusterQueue does not select waiting for ever."""
    check, selector = "queue namespace", dig(queue, "spec", "namespaceSelector")
    if selector == {}:
        return ok(check, f"{name(queue)} takes every namespace")
    if not isinstance(namespace, Mapping):
        reason = namespace.reason if isinstance(namespace, Unseen) else "there is no such namespace"
        return unknown(check, reason)
    if isinstance(selector, Mapping) and selects(selector, namespace):
        return ok(check, f"{name(queue)} takes namespace {name(namespace)}")
    labels = listed([f"{key}={value}" for key, value in mapping(selector, "matchLabels").items()])
    message = f"{name(queue)} does not take namespace {name(namespace)}" + (
        f": it has no {labels}" if labels else ""
    )
    return failed(check, message, "have the namespace labelled so, or use a namespace that it takes")


def check_quota(behind: Flavors, sets: Sequence[PodSet]) -> Sequence[Result]:
    """Whether each set of pods fits a flavor, and its quota: at all, and now."""
    return [
        result
        for pods in sets
        for resource in sorted(pods.requests)
        if pods.total(resource) > 0
        for result in _check_resource(behind, pods, resource)
    ]


def _check_resource(behind: Flavors, pods: PodSet, resource: str) -> Iterator[Result]:
    check, queue = f"quota {resource}", name(behind.queue)
    group = next(
        (each for each in _groups(behind.queue) if resource in (each.get("coveredResources") or ())), None
    )
    if group is None:
        yield failed(
            check, f"{queue} does not cover {resource}: the run would never be admitted", ADMINISTRATOR
        )
        return
    usable, reasons = list[str](), list[str]()
    for flavor in _flavor_names(group):
        found = behind.flavors.get(flavor)
        if isinstance(found, Unseen):
            yield unknown(check, found.reason)
            return
        reason = "does not exist" if found is None else mismatch(found, pods, _label_keys(behind, group))
        if reason:
            reasons.append(f"{flavor} {reason}")
        else:
            usable.append(flavor)
    if usable:
        yield _check_amount(behind.queue, group, usable, pods.total(resource), resource)
    else:
        fix = f"change hardware or target.capacity to what {queue} has, or have a flavor added"
        yield failed(check, f"no flavor of {queue} takes these pods: {listed(reasons)}", fix)


def mismatch(flavor: Object, pods: PodSet, keys: frozenset[str]) -> str:
    """Why a flavor does not take these pods, as a clause; empty when it does."""
    labels = mapping(flavor, "spec", "nodeLabels")
    for key, value in pods.node_selector.items():
        if key in keys and labels.get(key) != value:
            return (
                f"is for {key}={labels[key]}, not {value}" if key in labels else f"is not for {key}={value}"
            )
    tolerations = [*pods.tolerations, *items(flavor, "spec", "tolerations")]
    for taint in items(flavor, "spec", "nodeTaints"):
        if text(taint, "effect") in _EFFECTS and not tolerates(tolerations, taint):
            return f"has the taint {taint_text(taint)}"
    return ""


def _label_keys(behind: Flavors, group: Object) -> frozenset[str]:
    found = (behind.flavors.get(flavor) for flavor in _flavor_names(group))
    return frozenset(key for each in found for key in mapping(each, "spec", "nodeLabels"))


def _check_amount(queue: Object, group: Object, usable: Sequence[str], asked: float, resource: str) -> Result:
    """A set of pods is admitted on one flavor, so quotas of several do not add up."""
    check = f"quota {resource}"
    nominal = {flavor: _nominal(group, flavor, resource) for flavor in usable}
    best = max(nominal, key=lambda flavor: nominal[flavor])
    cohort = text(queue, "spec", "cohortName") or text(queue, "spec", "cohort")
    if asked > nominal[best]:
        message = (
            f"{name(queue)} has {nominal[best]:g} {resource} of flavor {best}, the run asks for {asked:g}"
        )
        if cohort:
            return warning(
                check, f"{message}: it has to borrow in cohort {cohort}", "see what the cohort has idle"
            )
        return failed(check, message, "use fewer chips, another queue, or have nominalQuota raised")
    free = {flavor: nominal[flavor] - _used(queue, flavor, resource) for flavor in usable}
    freest = max(free, key=lambda flavor: free[flavor])
    if asked > free[freest]:
        used = nominal[freest] - free[freest]
        taken = f"{used:g} of {nominal[freest]:g} {resource} of flavor {freest} are in use"
        message = f"{taken}, the run asks for {asked:g}"
        return warning(check, message, "it would wait; `muster ls --cluster` shows what runs")
    return ok(check, f"{free[freest]:g} of flavor {freest} are free, the run asks for {asked:g}")


def _groups(queue: Object) -> Sequence[Object]:
    return items(queue, "spec", "resourceGroups")


def flavor_names(queue: Object) -> Sequence[str]:
    """All ResourceFlavors that a ClusterQueue names."""
    return list(dict.fromkeys(flavor for group in _groups(queue) for flavor in _flavor_names(group)))


def _flavor_names(group: Object) -> Sequence[str]:
    return [text(flavor, "name") for flavor in items(group, "flavors")]


def _nominal(group: Object, flavor: str, resource: str) -> float:
    found = (each for each in items(group, "flavors") if text(each, "name") == flavor)
    return _amount(next(found, {}), resource, "nominalQuota")


def _used(queue: Object, flavor: str, resource: str) -> float:
    found = (each for each in items(queue, "status", "flavorsUsage") if text(each, "name") == flavor)
    return _amount(next(found, {}), resource, "total")


def _amount(flavor: Object, resource: str, key: str) -> float:
    found = (each for each in items(flavor, "resources") if text(each, "name") == resource)
    return quantity(next(found, {}).get(key)) or 0.0


def check_priority(priority: str, found: Found) -> Result:
    check = "priority class"
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        fix = "correct target.priority_class, or have it made (k8s/base/kueue)"
        return failed(check, f"there is no WorkloadPriorityClass {priority}", fix)
    return ok(check, f"{priority} exists")


def check_topology(
    behind: Flavors, sets: Sequence[PodSet], topologies: Mapping[str, Found], level: str
) -> Result:
    """For target.placement=topology.

    Args:
      behind: the queue.
      sets: of the run.
      topologies: by name, those of the flavors.
      level: node label that a slice is held together by; empty when each host is a slice.
    """
    check = "topology"
    flavors = [found for found in behind.flavors.values() if isinstance(found, Mapping)]
    keys = frozenset(key for each in flavors for key in mapping(each, "spec", "nodeLabels"))
    usable = [each for each in flavors if any(not mismatch(each, pods, keys) for pods in sets)]
    named = {text(each, "spec", "topologyName") for each in usable} - {""}
    fix = "set target.placement=exclusive, or have it added (k8s/components/topology-aware)"
    if not named:
        if any(isinstance(found, Unseen) for found in behind.flavors.values()):
            return unknown(check, "the flavors of the queue could not be read")
        return failed(check, "no flavor for these pods has a topologyName", fix)
    for topology in sorted(named):
        found = topologies.get(topology)
        if isinstance(found, Unseen):
            return unknown(check, found.reason)
        levels = [text(each, "nodeLabel") for each in items(found, "spec", "levels")]
        if found is not None and (not level or level in levels):
            return ok(check, f"{topology} has the levels {listed(levels)}")
    return failed(check, f"{listed(sorted(named))} does not exist or has no level {level}".rstrip(), fix)

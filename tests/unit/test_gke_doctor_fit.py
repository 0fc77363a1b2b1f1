"""The doctor's checks of nodes and of Kueue: whether a run fits what is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from launcher.gke.doctor_checks import Found, FoundAll, Level, PodSet, Result, Unseen, pod_sets
from launcher.gke.doctor_checks_kueue import (
    Flavors,
    check_admits_namespace,
    check_cluster_queue,
    check_kueue,
    check_local_queue,
    check_priority,
    check_quota,
    check_topology,
    flavor_names,
)
from launcher.gke.doctor_checks_nodes import Hosts, check_nodes
from launcher.gke.podspec import NODE_POOL
from recipes.kubernetes_names import ACCELERATOR, SPOT, TOPOLOGY
from tests.unit.manifest_support import golden
from tests.unit.test_gke_doctor import FAILED, NOT_ALLOWED, OK, UNKNOWN, WARNING, named, said

TPU = "google.com/tpu"
TPU_TAINT = {"key": TPU, "value": "present", "effect": "NoSchedule"}
SPOT_TAINT = {"key": SPOT, "value": "true", "effect": "NoSchedule"}
ENDING_TAINT = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
OTHER_TAINT = {"key": "team", "value": "red", "effect": "NoSchedule"}
V5P = {ACCELERATOR: "tpu-v5p-slice", TOPOLOGY: "2x2x2"}
V6E = {ACCELERATOR: "tpu-v6e-slice", TOPOLOGY: "4x4"}
HOSTS = Hosts(
    labels=V6E,
    tolerations=[{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}],
    chips_per_host=4,
    hosts_per_slice=4,
    num_slices=2,
    machine_type="ct6e-standard-4t",
)
SINGLE = dataclasses.replace(HOSTS, labels={**V6E, TOPOLOGY: "2x2"}, hosts_per_slice=1)
ON_SPOT = dataclasses.replace(
    HOSTS,
    labels={**V6E, SPOT: "true"},
    tolerations=[*HOSTS.tolerations, {"key": SPOT, "operator": "Equal", "value": "true"}],
)
CPU_HOSTS = dataclasses.replace(HOSTS, labels={}, tolerations=[], chips_per_host=0)


def node(
    pool: str,
    number: int = 0,
    *,
    labels: Mapping[str, str] = V6E,
    chips: int = 4,
    taints: Sequence[Mapping[str, str]] = (TPU_TAINT,),
    ready: str = "True",
    cordoned: bool = False,
) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{pool}-{number}", "labels": {NODE_POOL: pool, **labels}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {
            "allocatable": {TPU: str(chips)} if chips else {},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pool(name: str, size: int = 4, **rest: Any) -> list[dict[str, Any]]:
    return [node(name, number, **rest) for number in range(size)]


def worst(results: Sequence[Result]) -> Result:
    order = [FAILED, WARNING, UNKNOWN, OK]
    return min(results, key=lambda result: order.index(result.level))


TWO = [*pool("a"), *pool("b")]
SPOTTY: dict[str, Any] = {"labels": {**V6E, SPOT: "true"}, "taints": [TPU_TAINT, SPOT_TAINT]}


@pytest.mark.parametrize(
    ("nodes", "hosts", "level", "words"),
    [
        (TWO, HOSTS, OK, "8 of tpu-v6e-slice 4x4 are up"),
        ([*TWO, *pool("c", 3)], HOSTS, OK, "2 are up, 2 are wanted"),
        (pool("a"), HOSTS, WARNING, "1 of the 2 slices can start on the nodes that are up /"),
        ([*pool("a"), *pool("b", 3)], HOSTS, WARNING, "1 of the 2 slices"),
        ([*pool("a"), *pool("b", 3)], HOSTS, WARNING, "pool b has 3 of 4 hosts"),
        ([*pool("a"), *pool("b", 3), node("b", 3, cordoned=True)], HOSTS, WARNING, "b-3 is cordoned"),
        ([*pool("a"), *pool("b", 3), node("b", 3, ready="Unknown")], HOSTS, WARNING, "b-3 is not ready"),
        (
            [*pool("a"), *pool("b", 3), node("b", 3, taints=[{**OTHER_TAINT, "effect": "PreferNoSchedule"}])],
            HOSTS,
            OK,
            "8",
        ),
        (
            [*pool("a"), *pool("b", 3), node("b", 3, taints=[TPU_TAINT, OTHER_TAINT])],
            HOSTS,
            WARNING,
            "b-3 has the taint team=red:NoSchedule",
        ),
        (
            [
                *pool("a"),
                *pool("b", 3),
                node("b", 3, taints=[ENDING_TAINT]),
            ],
            HOSTS,
            WARNING,
            "b-3 is about to be terminated",
        ),
        (pool("a", taints=[TPU_TAINT, OTHER_TAINT]), HOSTS, FAILED, "every node of tpu-v6e-slice 4x4 has"),
        (pool("a", **SPOTTY), HOSTS, WARNING, "target.capacity=spot"),
        ([*pool("a", **SPOTTY), *pool("b", **SPOTTY)], ON_SPOT, OK, "8"),
        (TWO, ON_SPOT, WARNING, f"8 of tpu-v6e-slice 4x4 are up, but none with {SPOT}=true"),
        (pool("a", chips=8), HOSTS, FAILED, "set hardware.chips_per_host=8"),
        ([*pool("a", chips=8), *pool("b"), *pool("c")], HOSTS, OK, "4"),
        (pool("a", chips=0), HOSTS, FAILED, "TPU device plugin"),
        ([], HOSTS, WARNING, "no TPU node at all"),
        (pool("a", labels={**V6E, TOPOLOGY: "8x8"}), HOSTS, WARNING, "has tpu-v6e-slice 8x8 (4 nodes)"),
        (
            [*pool("a", labels=V5P), *pool("b", labels={**V6E, TOPOLOGY: "2x2"})],
            HOSTS,
            WARNING,
            "has tpu-v6e-slice 2x2 (4 nodes), tpu-v5p-slice 2x2x2 (4 nodes) / change the recipe, unless a"
            " node pool of ct6e-standard-4t",
        ),
        (pool("a", 2, labels=SINGLE.labels), SINGLE, OK, "2"),
        (
            [node("a", labels=SINGLE.labels), node("a", 1, labels=SINGLE.labels, cordoned=True)],
            SINGLE,
            WARNING,
            "1 of the 2 slices can start on the nodes that are up; a-1 is cordoned",
        ),
        (NOT_ALLOWED, HOSTS, UNKNOWN, "jane may not"),
        (pool("a", 1, labels={}, taints=(), chips=0), CPU_HOSTS, OK, "1 can take hosts"),
        (pool("a", 1, labels={}, chips=0), CPU_HOSTS, WARNING, "a-0 has the taint google.com/tpu"),
        ([], CPU_HOSTS, WARNING, "0 others"),
    ],
)  # fmt: skip
def test_nodes(nodes: FoundAll, hosts: Hosts, level: Level, words: str) -> None:
    results = check_nodes(nodes, hosts)
    found = worst(results)
    said(
        next((result for result in results if words in f"{result.message} / {result.fix}"), found),
        level,
        words,
    )
    assert found.level is level


# Kueue


@pytest.mark.parametrize(
    ("group", "level", "words"),
    [
        ({"versions": [{"version": "v1beta2"}, {"version": "v1beta1"}]}, OK, "v1beta2, v1beta1"),
        (None, FAILED, "target.queue=null"),
        (NOT_ALLOWED, UNKNOWN, "jane may not"),
    ],
)
def test_kueue(group: Found, level: Level, words: str) -> None:
    said(check_kueue(group), level, words)


INACTIVE = {"conditions": [{"type": "Active", "status": "False", "message": "FlavorNotFound"}]}
ACTIVE = {"conditions": [{"type": "Active", "status": "True", "message": "Can admit"}]}


@pytest.mark.parametrize(
    ("found", "others", "level", "words"),
    [
        (named("tpu", spec={"clusterQueue": "cq"}, status=ACTIVE), [], OK, "belongs to ClusterQueue cq"),
        (named("tpu", spec={"clusterQueue": "cq"}), [], OK, "belongs"),
        (None, [named("b"), named("a")], FAILED, "it has a, b"),
        (None, Unseen(reason="x"), FAILED, "in the namespace /"),
        (named("tpu", status=INACTIVE), [], FAILED, "takes nothing: FlavorNotFound"),
        (named("tpu", spec={"stopPolicy": "HoldAndDrain"}), [], FAILED, "stopPolicy is HoldAndDrain"),
        (NOT_ALLOWED, [], UNKNOWN, "jane may not"),
    ],
)
def test_local_queue(found: Found, others: FoundAll, level: Level, words: str) -> None:
    said(check_local_queue("tpu", found, others), level, words)


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (named("cq", spec={"stopPolicy": "None"}, status=ACTIVE), OK, "cq is active"),
        (named("cq", status=INACTIVE), FAILED, "admits nothing: FlavorNotFound"),
        (None, FAILED, "there is no ClusterQueue cq"),
        (NOT_ALLOWED, UNKNOWN, "jane may not"),
    ],
)
def test_cluster_queue(found: Found, level: Level, words: str) -> None:
    said(check_cluster_queue("cq", found), level, words)


TEAM = {"metadata": {"name": "team", "labels": {"part-of": "muster"}}}


@pytest.mark.parametrize(
    ("spec", "namespace", "level", "words"),
    [
        ({"namespaceSelector": {}}, NOT_ALLOWED, OK, "every namespace"),
        ({"namespaceSelector": {"matchLabels": {"part-of": "muster"}}}, TEAM, OK, "takes namespace team"),
        (
            {"namespaceSelector": {"matchLabels": {"part-of": "other"}}},
            TEAM,
            FAILED,
            "it has no part-of=other",
        ),
        ({}, TEAM, FAILED, "does not take namespace team"),
        ({"namespaceSelector": {"matchLabels": {"a": "b"}}}, NOT_ALLOWED, UNKNOWN, "jane may not"),
        ({"namespaceSelector": {"matchLabels": {"a": "b"}}}, None, UNKNOWN, "no such namespace"),
    ],
)
def test_admits_namespace(spec: Mapping[str, Any], namespace: Found, level: Level, words: str) -> None:
    said(check_admits_namespace(named("cq", spec=spec), namespace), level, words)


@pytest.mark.parametrize(("found", "level"), [(named("high"), OK), (None, FAILED), (NOT_ALLOWED, UNKNOWN)])
def test_priority(found: Found, level: Level) -> None:
    assert check_priority("high", found).level is level


def flavor(name: str, labels: Mapping[str, str], **spec: Any) -> dict[str, Any]:
    return named(name, spec={"nodeLabels": dict(labels), **spec})


def queue(
    *quotas: tuple[str, str],
    covered: Sequence[str] = (TPU,),
    used: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A ClusterQueue with flavors and their quotas."""
    flavors = [
        {"name": each, "resources": [{"name": resource, "nominalQuota": amount} for resource in covered]}
        for each, amount in quotas
    ]
    usage = [
        {"name": each, "resources": [{"name": TPU, "total": amount}]} for each, amount in (used or {}).items()
    ]
    group = {"coveredResources": list(covered), "flavors": flavors}
    return named("cq", spec={"resourceGroups": [group], **spec}, status={"flavorsUsage": usage})


SPOT_FLAVOR = flavor("spot", {ACCELERATOR: "tpu-v6e-slice", SPOT: "true"}, nodeTaints=[SPOT_TAINT])
OWN_FLAVOR = flavor("own", {ACCELERATOR: "tpu-v6e-slice"})
V5P_FLAVOR = flavor("v5p", {ACCELERATOR: "tpu-v5p-slice"})
SHAPED = flavor("shaped", {ACCELERATOR: "tpu-v6e-slice", TOPOLOGY: "4x4"})
FLAVORS: Mapping[str, Found] = {
    each["metadata"]["name"]: each for each in (SPOT_FLAVOR, OWN_FLAVOR, V5P_FLAVOR, SHAPED)
}


def on_demand(sets: Sequence[PodSet]) -> list[PodSet]:
    """The same without Spot."""
    return [
        dataclasses.replace(
            each,
            node_selector={key: value for key, value in each.node_selector.items() if key != SPOT},
            tolerations=[found for found in each.tolerations if found.get("key") != SPOT],
        )
        for each in sets
    ]


def as_it_is(sets: Sequence[PodSet]) -> list[PodSet]:
    return list(sets)


@pytest.mark.parametrize(
    ("found", "change", "level", "words"),
    [
        (queue(("spot", "512")), as_it_is, OK, "512 of flavor spot are free, the run asks for 512"),
        (queue(("own", "1024"), ("spot", "512")), as_it_is, OK, "flavor spot"),
        (queue(("own", "1024"), ("spot", "0")), as_it_is, FAILED, "has 0 google.com/tpu of flavor spot"),
        (queue(("own", "512"), ("spot", "0")), on_demand, OK, "flavor own"),
        (
            queue(("spot", "512")),
            on_demand,
            FAILED,
            "spot has the taint cloud.google.com/gke-spot=true:NoSchedule",
        ),
        (queue(("own", "511")), on_demand, FAILED, "511 google.com/tpu of flavor own, the run asks for 512"),
        (queue(("own", "256"), ("shaped", "256")), on_demand, FAILED, "own is not for"),
        (queue(("shaped", "1k")), on_demand, FAILED, f"shaped is for {TOPOLOGY}=4x4, not 16x16"),
        (queue(("v5p", "1k")), on_demand, FAILED, "v5p is for"),
        (queue(("own", "8"), cohortName="all"), on_demand, WARNING, "borrow in cohort all"),
        (queue(("own", "8"), cohort="all"), on_demand, WARNING, "borrow in cohort all"),
        (queue(("own", "1k"), used={"own": "600"}), on_demand, WARNING, "600 of 1000"),
        (queue(("own", "1k"), covered=["cpu"]), on_demand, FAILED, "does not cover google.com/tpu"),
        (queue(("lost", "1k")), on_demand, FAILED, "lost does not exist"),
        (queue(("unread", "1k")), on_demand, UNKNOWN, "jane may not"),
    ],
)
def test_quota(
    found: dict[str, Any], change: Callable[[Sequence[PodSet]], list[PodSet]], level: Level, words: str
) -> None:
    behind = Flavors(queue=found, flavors={**FLAVORS, "unread": NOT_ALLOWED})
    sets = change(pod_sets(golden("spot-two-slices")))
    [result] = check_quota(behind, sets)
    said(result, level, words)


def test_quota_is_asked_for_every_resource_of_every_set() -> None:
    behind = Flavors(queue=queue(("own", "100k"), covered=[TPU, "cpu"]), flavors=FLAVORS)
    results = check_quota(behind, on_demand(pod_sets(golden("pathways"))))
    assert "quota memory" in {result.check for result in results if result.level is FAILED}


def test_flavor_names() -> None:
    assert flavor_names(queue(("own", "1"), ("spot", "2"))) == ["own", "spot"]


LEVELS = {"spec": {"levels": [{"nodeLabel": NODE_POOL}, {"nodeLabel": "kubernetes.io/hostname"}]}}


@pytest.mark.parametrize(
    ("topology_name", "topologies", "level", "expected", "words"),
    [
        ("tas", {"tas": LEVELS}, NODE_POOL, OK, "tas has the levels cloud.google.com/gke-nodepool"),
        ("tas", {"tas": {"spec": {"levels": []}}}, "", OK, "tas"),
        (
            "tas",
            {"tas": {"spec": {"levels": []}}},
            NODE_POOL,
            FAILED,
            "no level cloud.google.com/gke-nodepool",
        ),
        ("tas", {"tas": None}, NODE_POOL, FAILED, "does not exist"),
        ("tas", {"tas": NOT_ALLOWED}, NODE_POOL, UNKNOWN, "jane may not"),
        ("", {}, NODE_POOL, FAILED, "has a topologyName"),
    ],
)
def test_topology(
    topology_name: str, topologies: Mapping[str, Found], level: str, expected: Level, words: str
) -> None:
    own = flavor("own", {ACCELERATOR: "tpu-v6e-slice"}, topologyName=topology_name)
    behind = Flavors(queue=queue(("own", "1k")), flavors={"own": own})
    said(
        check_topology(behind, on_demand(pod_sets(golden("spot-two-slices"))), topologies, level),
        expected,
        words,
    )


def test_topology_of_flavors_that_may_not_be_read() -> None:
    behind = Flavors(queue=queue(("own", "1k")), flavors={"own": NOT_ALLOWED})
    said(check_topology(behind, pod_sets(golden("spot-two-slices")), {}, ""), UNKNOWN, "could not be read")

"""How many slices would find nodes: a table over nodes and pods as the API gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from launcher.gke.doctor_checks_nodes import Hosts
from launcher.gke.objects import Object
from launcher.gke.podspec import NODE_POOL, TPU
from launcher.gke.room import room

KIND = "cloud.google.com/gke-tpu-accelerator"
TAINT = {"key": TPU, "value": "present", "effect": "NoSchedule"}


def hosts(*, chips: int = 4, hosts_per_slice: int = 1) -> Hosts:
    return Hosts(
        labels={KIND: "v5e"} if chips else {},
        tolerations=[{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}],
        chips_per_host=chips,
        hosts_per_slice=hosts_per_slice,
        num_slices=2,
        machine_type="",
    )


def node(name: str, *, pool: str = "a", chips: int = 4, ready: str = "True", **more: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {KIND: more.pop("kind", "v5e"), NODE_POOL: pool}},
        "spec": {"taints": [TAINT, *more.pop("taints", [])], **more},
        "status": {
            "allocatable": {TPU: str(chips), "pods": "3"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod(where: str, *, run: str = "other", namespace: str = "ns", chips: int = 4) -> Object:
    requests = {TPU: str(chips)} if chips else {"cpu": "1"}
    return {
        "metadata": {"labels": {"jobset.sigs.k8s.io/jobset-name": run}, "namespace": namespace},
        "spec": {"nodeName": where, "containers": [{"resources": {"requests": requests}}]},
    }


TWO = [node("n1"), node("n2")]
POOLS = [node("a1"), node("a2"), node("b1", pool="b"), node("b2", pool="b")]
ONE, PAIR, PLAIN = hosts(), hosts(hosts_per_slice=2), hosts(chips=0)
SPOT = {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("nodes", "pods", "wanted", "expected"),
    [
        pytest.param([], [], ONE, 0, id="no nodes"),
        pytest.param(TWO, [], ONE, 2, id="two free nodes"),
        pytest.param(TWO, [pod("n1")], ONE, 1, id="one is taken by another run"),
        pytest.param(TWO, [pod("n1", run="run")], ONE, 2, id="our own pods make room"),
        pytest.param(TWO, [pod("n1", run="run", namespace="b")], ONE, 1, id="a namesake does not"),
        pytest.param(TWO, [pod("n1", chips=0)], ONE, 2, id="pods without chips take none"),
        pytest.param([node("n1", ready="Unknown"), TWO[1]], [], ONE, 1, id="one is not ready"),
        pytest.param([node("n1", unschedulable=True), TWO[1]], [], ONE, 1, id="one is cordoned"),
        pytest.param([node("n1", taints=[SPOT]), TWO[1]], [], ONE, 1, id="one has a taint"),
        pytest.param([node("n1", kind="v6e"), TWO[1]], [], ONE, 1, id="one is of another kind"),
        pytest.param([node("n1", chips=1), TWO[1]], [], ONE, 1, id="one has fewer chips"),
        pytest.param(POOLS, [], PAIR, 2, id="two whole pools"),
        pytest.param(POOLS, [pod("a1")], PAIR, 1, id="a pool that is taken in part"),
        pytest.param(POOLS[1:], [], PAIR, 1, id="a pool that lacks a node"),
        pytest.param([POOLS[0], POOLS[2]], [], PAIR, 0, id="halves of two pools are no slice"),
        pytest.param(TWO, [], PLAIN, 6, id="plain nodes: as many as pods are allowed"),
        pytest.param(TWO, [pod("n1", chips=0)] * 4, PLAIN, 3, id="plain nodes: less those that are there"),
        pytest.param([node("n1", ready="False"), TWO[1]], [], PLAIN, 3, id="plain nodes: only ready ones"),
    ],
)
def test_room(nodes: Sequence[Object], pods: Sequence[Object], wanted: Hosts, expected: int) -> None:
    assert room(nodes, pods, wanted, run="run", namespace="ns") == expected

"""Every state of a queued resource and of a node, known and unknown, as the supervisor sees it."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud import tpu_v2

from launcher.supervise.observation import Fault, Phase
from launcher.supervise.records import Trouble
from launcher.tpu import names
from launcher.tpu.machines import Node, Queued, machines, orphan

ZONE = "projects/p/locations/us-east5-b"
LABELS = {names.PROVISION: "3", names.ORDER: "o1"}
OF_QUEUED = {
    "STATE_UNSPECIFIED": Phase.UNKNOWN,
    "CREATING": Phase.WAITING,
    "ACCEPTED": Phase.WAITING,
    "WAITING_FOR_RESOURCES": Phase.WAITING,
    "PROVISIONING": Phase.STARTING,
    "FAILED": Phase.LOST,
    "DELETING": Phase.DELETING,
    "SUSPENDING": Phase.LEAVING,
    "SUSPENDED": Phase.LOST,
    "STATE_99": Phase.UNKNOWN,
}
OF_NODE = {
    "STATE_UNSPECIFIED": Phase.UNKNOWN,
    "CREATING": Phase.STARTING,
    "STARTING": Phase.STARTING,
    "READY": Phase.UP,
    "RESTARTING": Phase.DEGRADED,
    "REIMAGING": Phase.DEGRADED,
    "REPAIRING": Phase.DEGRADED,
    "HIDING": Phase.DEGRADED,
    "HIDDEN": Phase.DEGRADED,
    "UNHIDING": Phase.DEGRADED,
    "DELETING": Phase.LOST,
    "STOPPING": Phase.LOST,
    "STOPPED": Phase.LOST,
    "PREEMPTED": Phase.LOST,
    "TERMINATED": Phase.LOST,
    "UNKNOWN": Phase.UNKNOWN,
    "STATE_99": Phase.UNKNOWN,
}
OF_HEALTH = {
    "HEALTH_UNSPECIFIED": Phase.UP,
    "HEALTHY": Phase.UP,
    "TIMEOUT": Phase.DEGRADED,
    "UNHEALTHY_TENSORFLOW": Phase.DEGRADED,
    "UNHEALTHY_MAINTENANCE": Phase.DEGRADED,
    "STATE_99": Phase.DEGRADED,
}


def node(number: int = 0, state: str = "READY", health: str = "HEALTHY") -> Node:
    return Node(
        name=f"{ZONE}/nodes/run-{number}",
        state=state,
        health=health,
        owner=f"{ZONE}/queuedResources/run",
        labels=LABELS,
        created_s=5.0,
    )


def queued(state: str = "ACTIVE", *nodes: Node, **changes: Any) -> Queued:
    values: dict[str, Any] = {
        "name": f"{ZONE}/queuedResources/run",
        "state": state,
        "num_slices": 2,
        "capacity": "spot",
        "labels": LABELS,
        "created_s": 4.0,
        "nodes": nodes,
    }
    return Queued(**(values | changes))


def words(enum: Any) -> set[str]:
    return {each.name for each in enum}


def test_the_tables_name_every_state_of_the_api() -> None:
    known = words(tpu_v2.QueuedResourceState.State)
    assert known - {"ACTIVE"} == OF_QUEUED.keys() - {"STATE_99"}
    assert words(tpu_v2.Node.State) == OF_NODE.keys() - {"STATE_99"}
    assert words(tpu_v2.Node.Health) == OF_HEALTH.keys() - {"STATE_99"}


@pytest.mark.parametrize("of_node", OF_NODE)
@pytest.mark.parametrize(("state", "phase"), OF_QUEUED.items())
def test_the_queued_resource_decides_unless_active(state: str, phase: Phase, of_node: str) -> None:
    found = machines(queued(state, node(0, of_node), node(1)))
    assert found.phase is phase
    assert found.state == state


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(("state", "phase"), OF_NODE.items())
def test_nodes_decide_while_active(state: str, phase: Phase, position: int) -> None:
    """The queued resource of a preempted node may stay ACTIVE."""
    found = machines(queued("ACTIVE", node(position, state), node(1 - position)))
    assert found.phase is phase
    assert found.state == ("ACTIVE" if state == "READY" else f"ACTIVE; node run-{position} {state}")


@pytest.mark.parametrize(("health", "phase"), OF_HEALTH.items())
def test_health_decides_of_nodes_that_are_ready(health: str, phase: Phase) -> None:
    assert machines(queued("ACTIVE", node(0), node(1, health=health))).phase is phase
    assert machines(queued("ACTIVE", node(0), node(1, "PREEMPTED", health))).phase is Phase.LOST


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        (("PREEMPTED", "STATE_99"), Phase.LOST),
        (("STATE_99", "REPAIRING"), Phase.UNKNOWN),
        (("REPAIRING", "CREATING"), Phase.DEGRADED),
        (("CREATING", "READY"), Phase.STARTING),
        (("READY",), Phase.LOST),
        ((), Phase.DEGRADED),
    ],
)
def test_the_worst_node_decides_and_a_missing_one_is_lost(states: tuple[str, ...], phase: Phase) -> None:
    nodes = [node(number, state) for number, state in enumerate(states)]
    assert machines(queued("ACTIVE", *nodes)).phase is phase


def test_why_they_were_lost() -> None:
    own = Fault(trouble=Trouble.QUOTA, code="RESOURCE_EXHAUSTED", message="limit")
    assert machines(queued("FAILED", fault=own)).fault == own
    for state in ("SUSPENDING", "SUSPENDED"):
        fault = machines(queued(state)).fault
        assert fault is not None
        assert (fault.trouble, fault.code) == (Trouble.PREEMPTED, state)
    assert machines(queued("ACTIVE", node(0), node(1))).fault is None


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("", 0), ("-1", 0), ("x", 0), ("\u0663", 0)])
def test_what_labels_say(text: str, number: int) -> None:
    found = machines(queued("ACCEPTED", labels={names.PROVISION: text, names.PROBE: "true"}))
    assert (found.provision, found.order, found.is_probe) == (number, "", True)
    assert (found.name, found.place, found.created_s) == ("run", ZONE, 4.0)


@pytest.mark.parametrize(("state", "phase"), [("DELETING", Phase.DELETING), ("READY", Phase.LOST)])
def test_a_node_without_a_queued_resource(state: str, phase: Phase) -> None:
    found = orphan(node(1, state))
    assert (found.phase, found.name, found.place, found.provision) == (phase, "run-1", ZONE, 3)

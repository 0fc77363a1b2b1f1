"""A queued resource and its nodes -> what they are to the supervisor. Pure; states in the service's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.supervise.observation import Fault, Machines, Phase
from launcher.supervise.records import Trouble
from launcher.tpu import names

_QUEUED = {
    "CREATING": Phase.WAITING,
    "ACCEPTED": Phase.WAITING,
    "WAITING_FOR_RESOURCES": Phase.WAITING,
    "PROVISIONING": Phase.STARTING,
    "FAILED": Phase.LOST,
    "DELETING": Phase.DELETING,
    "SUSPENDING": Phase.LEAVING,
    "SUSPENDED": Phase.LOST,
}
"""All but ACTIVE, whose nodes decide; any other word is UNKNOWN."""
_NODE = {
    "CREATING": Phase.STARTING,
    "STARTING": Phase.STARTING,
    "READY": Phase.UP,
    "RESTARTING": Phase.DEGRADED,
    "REIMAGING": Phase.DEGRADED,
    "REPAIRING": Phase.DEGRADED,
    "DELETING": Phase.LOST,
    "STOPPING": Phase.LOST,
    "STOPPED": Phase.LOST,
    "PREEMPTED": Phase.LOST,
    "TERMINATED": Phase.LOST,
    "HIDING": Phase.DEGRADED,
    "HIDDEN": Phase.DEGRADED,
    "UNHIDING": Phase.DEGRADED,
}
_HEALTHY = ("HEALTHY", "HEALTH_UNSPECIFIED")
_WORST_FIRST = (Phase.LOST, Phase.UNKNOWN, Phase.DEGRADED, Phase.STARTING, Phase.UP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One slice, as the service lists it."""

    name: str
    """In full: ``projects/P/locations/ZONE/nodes/ID``."""
    state: str
    health: str
    owner: str
    """Its queued resource, in full; empty for none."""
    labels: Mapping[str, str]
    created_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """One queued resource, as the service lists it."""

    name: str
    """In full: ``projects/P/locations/ZONE/queuedResources/ID``."""
    state: str
    num_slices: int
    capacity: str
    labels: Mapping[str, str]
    """Of its nodes."""
    created_s: float
    fault: Fault | None = None
    nodes: Sequence[Node] = field(default=())


def machines(queued: Queued, words: str = "") -> Machines:
    """What a queued resource is to the supervisor.

    Args:
      queued: with its nodes.
      words: what its hosts say of themselves.
    """
    phase = _phase(queued)
    fault = queued.fault
    if fault is None and queued.state in ("SUSPENDED", "SUSPENDING"):
        fault = Fault(trouble=Trouble.PREEMPTED, code=queued.state, message="the service took them away")
    return Machines(
        name=queued.name.rpartition("/")[2],
        place=names.place_of(queued.name),
        provision=names.provision_of(queued.labels),
        order=queued.labels.get(names.ORDER, ""),
        num_slices=queued.num_slices,
        capacity=queued.capacity,
        is_probe=queued.labels.get(names.PROBE) == "true",
        phase=phase,
        state=_words(queued),
        created_s=queued.created_s,
        fault=fault if phase in (Phase.LOST, Phase.LEAVING) else None,
        words=words,
    )


def orphan(node: Node) -> Machines:
    """A node with our labels whose queued resource is gone: of no use, and costing money."""
    return Machines(
        name=node.name.rpartition("/")[2],
        place=names.place_of(node.name),
        provision=names.provision_of(node.labels),
        order=node.labels.get(names.ORDER, ""),
        num_slices=1,
        capacity="",
        is_probe=node.labels.get(names.PROBE) == "true",
        phase=Phase.DELETING if node.state == "DELETING" else Phase.LOST,
        state=f"node {node.state} without a queued resource",
        created_s=node.created_s,
    )


def _phase(queued: Queued) -> Phase:
    if queued.state != "ACTIVE":
        return _QUEUED.get(queued.state, Phase.UNKNOWN)
    if len(queued.nodes) < queued.num_slices:
        # Before they are listed, or after they were taken away: the time tells.
        return Phase.LOST if queued.nodes else Phase.DEGRADED
    phases = {_node_phase(node) for node in queued.nodes}
    return next(phase for phase in _WORST_FIRST if phase in phases)


def _node_phase(node: Node) -> Phase:
    phase = _NODE.get(node.state, Phase.UNKNOWN)
    return Phase.DEGRADED if phase is Phase.UP and node.health not in _HEALTHY else phase


def _words(queued: Queued) -> str:
    odd = [node for node in queued.nodes if _node_phase(node) is not Phase.UP]
    if queued.state != "ACTIVE" or not odd:
        return queued.state
    listed = ", ".join(
        f"node {node.name.rpartition('/')[2]} {node.state}"
        + ("" if node.health in _HEALTHY else f" ({node.health})")
        for node in odd[:3]
    )
    return f"{queued.state}; {listed}{' ...' if len(odd) > 3 else ''}"

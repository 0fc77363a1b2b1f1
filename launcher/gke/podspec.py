"""The pod of one host: where it may run, what it is given, what it may do.

No privilege, no node's network and no token of the cluster unless the recipe asks for it. Nodes are chosen
by the labels and taints that GKE gives to TPU nodes.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.gke import names
from launcher.gke.env import TERMINATION_LOG, VOLUME, Object, host_env
from launcher.plan import Plan
from recipes.contract import COORDINATOR_PORT, GANG_PORT, MEGASCALE_PORT
from recipes.hardware import CPU
from recipes.kubernetes_names import FLEX_START, RESERVATION, SPOT
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig

COMMAND = ("python", "-P", "-m", "launcher.pod")
TPU = "google.com/tpu"
"""Resource, and key of the taint of every TPU node."""
QUEUED = "cloud.google.com/gke-queued"
"""Taint of node pools with queued provisioning (cluster-toolkit, examples of DWS flex-start)."""
NODE_POOL = "cloud.google.com/gke-nodepool"
"""A slice of several hosts is one node pool."""

_TPU_RUNTIME_PORT, _TPU_METRICS_PORT = 8471, 8431


def pod_spec(recipe: Recipe, plan: Plan, bundle: str | None) -> Object:
    """The PodSpec of every host of every slice."""
    env = host_env(recipe, plan, bundle)
    return {
        **pod_basics(recipe.target),
        **placement(recipe, plan),
        "containers": [trainer_container(recipe.target, env, ports(plan), chips(plan))],
        "volumes": volumes(),
    }


def pod_basics(target: TargetConfig) -> Object:
    """What every pod of a run has, wherever it runs."""
    account = {} if target.service_account is None else {"serviceAccountName": target.service_account}
    # On the node's network ClusterFirst would not resolve the names of peers.
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if target.host_network else {}
    return {
        # Demanded by podFailurePolicy; JobSet's own default is OnFailure.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(target.grace_period_s),
        # Workload Identity comes from the metadata server, not from a token in the pod.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **account,
        **network,
    }


def placement(recipe: Recipe, plan: Plan) -> Object:
    """Node selector and tolerations of a host with this hardware."""
    return {
        **_present("nodeSelector", node_selector(recipe.target, plan)),
        **_present("tolerations", tolerations(recipe)),
    }


def node_selector(target: TargetConfig, plan: Plan) -> dict[str, str]:
    """Labels of the nodes: hardware and capacity, and the user's own beside them.

    GKE labels the nodes of a reservation's pool with its name; Autopilot and node auto-provisioning read
    the selector (docs.cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations).
    """
    capacity: dict[str, str] = {}
    if target.capacity == "reserved" and target.reservation is not None:
        capacity[RESERVATION] = target.reservation
    if target.capacity == "flex_start":
        capacity[FLEX_START] = "true"
    return dict(sorted(target.node_selector.items())) | dict(plan.hardware.node_labels) | capacity


def tolerations(recipe: Recipe) -> list[Object]:
    """The taints that this hardware and capacity come with, by name.

    Never a bare ``Exists``: it would also tolerate cloud.google.com/impending-node-termination.
    """
    if recipe.hardware.generation == CPU:
        found: list[Object] = []
    else:
        found = [{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}]
    by_capacity = {"spot": [SPOT], "flex_start": [FLEX_START, QUEUED]}
    for key in by_capacity.get(recipe.target.capacity, []):
        found.append({"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return found


def trainer_container(
    target: TargetConfig, env: list[Object], open_ports: list[Object], resources: Object
) -> Object:
    """The container that runs the agent."""
    return {
        "name": names.CONTAINER,
        "image": target.image or "",
        "imagePullPolicy": "IfNotPresent",
        "command": list(COMMAND),
        "env": env,
        "ports": open_ports,
        **_present("resources", resources),
        "securityContext": security_context(target),
        "terminationMessagePath": TERMINATION_LOG,
        # An image that cannot even start the agent writes no last words: its log is shown instead.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "muster", "mountPath": VOLUME},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def security_context(target: TargetConfig) -> Object:
    """TPUs need no privilege and none of the default capabilities (GKE 1.28 and later).

    The user of the image is kept: the devices belong to root. The seccomp profile is the cluster's: the
    runtime's default forbids binding memory to NUMA nodes.
    """
    if target.privileged:
        return {"privileged": True}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def volumes() -> list[Object]:
    """Scratch space on disk, and shared memory beyond the 64 MiB of container runtimes."""
    return [
        {"name": "muster", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def chips(plan: Plan) -> Object:
    """All chips of the host, as GKE demands (a pod cannot take a part of them); nothing on CPU."""
    if plan.hardware.generation == CPU:
        return {}
    count = str(plan.hardware.chips_per_host)
    return {"requests": {TPU: count}, "limits": {TPU: count}}


def ports(plan: Plan) -> list[Object]:
    """What pods listen on; documentation, except on the node's network, where it keeps ports apart."""
    is_tpu, several = plan.hardware.generation != CPU, plan.hardware.num_slices > 1
    found = {"coordinator": COORDINATOR_PORT, "gang": GANG_PORT}
    if is_tpu:
        found |= {"tpu-runtime": _TPU_RUNTIME_PORT, "tpu-metrics": _TPU_METRICS_PORT}
    if is_tpu and several:
        found["megascale"] = MEGASCALE_PORT
    return [port(name, number) for name, number in found.items()]


def port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _present(name: str, value: Any) -> Object:
    return {name: value} if value else {}

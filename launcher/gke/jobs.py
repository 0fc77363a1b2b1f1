"""Jobs of a JobSet: how pods are placed, and what follows when one fails.

The order of the rules is the policy (read in, and run against, sigs.k8s.io/jobset v0.11.1
pkg/controllers/failure_policy.go and k8s.io/kubernetes v1.34.3 pkg/controller/job/pod_failure_policy.go):
JobSet takes the first of its rules that fits any failed Job, so `preempted` comes before what its peers
died of; a Job takes the first of its rules that fits a pod, so a disrupted pod is disrupted whatever its
exit code is.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gke import names
from launcher.gke.env import Object
from launcher.gke.podspec import NODE_POOL, pod_spec
from launcher.plan import Plan
from recipes.contract import ExitCode
from recipes.hardware import CPU
from recipes.schema import Recipe

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
PODSET = "kueue.x-k8s.io/podset"
USERS_FAULT = (int(ExitCode.EXPERIMENT_FAILED), int(ExitCode.BAD_INPUT))

_BY_POLICY = "PodFailurePolicy"
_DISRUPTED = "has condition DisruptionTarget matching"


def labels(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """Of the JobSet, its Jobs and pods; the user's never replace ours."""
    return dict(sorted(recipe.target.labels.items())) | {
        names.MANAGED_BY: names.OWNER,
        names.RUN: plan.run_name,
        names.FINGERPRINT: plan.fingerprint[: names.DIGEST_CHARS],
    }


def slice_job(recipe: Recipe, plan: Plan, bundle: str | None, message_patterns: bool) -> Object:
    """All slices: one Job each, one pod for each host."""
    hardware, own = plan.hardware, labels(recipe, plan)
    return replicated_job(
        names.SLICE_JOB,
        replicas=hardware.num_slices,
        pods=hardware.hosts_per_slice,
        failure=pod_failure_policy(message_patterns),
        pod=pod_template(own, topology_annotations(recipe, plan), pod_spec(recipe, plan, bundle)),
        labels=own,
    )


def replicated_job(
    name: str,
    *,
    replicas: int,
    pods: int,
    failure: Object | None,
    pod: Object,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
    backoff_limit: int = 0,
) -> Object:
    """One replicated Job of ``pods`` numbered pods that run and end together."""
    metadata = {"labels": dict(labels), **({"annotations": dict(annotations)} if annotations else {})}
    return {
        "name": name,
        "replicas": replicas,
        "template": {
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "parallelism": pods,
                "completions": pods,
                "backoffLimit": backoff_limit,
                # A pod that is only going away is no failure yet: the rules see its last state.
                "podReplacementPolicy": "Failed",
                **({"podFailurePolicy": failure} if failure is not None else {}),
                "template": pod,
            },
        },
    }


def pod_template(labels: Mapping[str, str], annotations: Mapping[str, str], spec: Object) -> Object:
    metadata = {"labels": dict(labels), **({"annotations": dict(annotations)} if annotations else {})}
    return {"metadata": metadata, "spec": spec}


def is_exclusive(recipe: Recipe, plan: Plan) -> bool:
    """Whether each slice gets a node pool of its own.

    Nodes of a single-host pool are slices by themselves, each taken whole by its chips, and CPU nodes
    are not connected at all: there a pool for each slice would only be waste.
    """
    hardware = plan.hardware
    wanted = recipe.target.placement == "exclusive"
    return wanted and hardware.generation != CPU and hardware.hosts_per_slice > 1


def topology_annotations(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """What Kueue's topology-aware scheduling reads: each slice within one node pool.

    kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling; needs a Topology with the level
    cloud.google.com/gke-nodepool.
    """
    if recipe.target.placement != "topology":
        return {}
    hardware = plan.hardware
    if hardware.generation == CPU or hardware.hosts_per_slice == 1:
        return {f"{PODSET}-unconstrained-topology": "true"}
    if hardware.num_slices == 1:
        return {f"{PODSET}-required-topology": NODE_POOL}
    return {
        f"{PODSET}-slice-required-topology": NODE_POOL,
        f"{PODSET}-slice-size": str(hardware.hosts_per_slice),
    }


def failure_policy(max_restarts: int, message_patterns: bool) -> Object:
    """What a failed Job does to the JobSet.

    Without message patterns only the user's errors are told from the rest, and preemptions count.
    """
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": [_BY_POLICY],
        "onJobFailureMessagePatterns": [_DISRUPTED, _exit_code(int(ExitCode.PREEMPTED))],
    }
    users_error: Object = {"name": "userError", "action": "FailJobSet", "onJobFailureReasons": [_BY_POLICY]}
    if message_patterns:
        users_error["onJobFailureMessagePatterns"] = [_exit_code(*USERS_FAULT)]
    infrastructure = {"name": "infra", "action": "RestartJobSet"}
    return {
        "maxRestarts": max_restarts,
        # The old pods must be gone before new ones ask for the same chips and ports.
        "restartStrategy": "BlockingRecreate",
        "rules": [*([preempted] if message_patterns else []), users_error, infrastructure],
    }


def pod_failure_policy(message_patterns: bool, container: str = names.CONTAINER) -> Object:
    """Which ends of a pod are told to JobSet by name; all others fail the Job as BackoffLimitExceeded."""
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    users_error = _fail_on(container, USERS_FAULT)
    if not message_patterns:
        return {"rules": [users_error]}
    return {"rules": [disrupted, users_error, _fail_on(container, (int(ExitCode.PREEMPTED),))]}


def _fail_on(container: str, codes: tuple[int, ...]) -> Object:
    on = {"containerName": container, "operator": "In", "values": list(codes)}
    return {"action": "FailJob", "onExitCodes": on}


def _exit_code(*codes: int) -> str:
    choice = "|".join(map(str, codes))
    return f"exit code {f'({choice})' if len(codes) > 1 else choice} matching"

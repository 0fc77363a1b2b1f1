"""Rules of the Job of a JobSet, and whether its pods, chips and nodes fit together.

k8s.io/kubernetes v1.34.3 pkg/apis/batch/validation/validation.go; the rest is what is accepted and then
never runs: chips that no machine has, slices that libtpu would not find, topologies that do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.gke import syntax
from launcher.gke.jobs import PODSET
from launcher.gke.podspec import TPU
from launcher.gke.validate_pod import pod_problems
from launcher.gke.validating import Found, JobShape, finding, label_problems, listed, mapped, whole
from recipes.hardware import generations, host_shapes
from recipes.kubernetes_names import ACCELERATOR, SPOT, TOPOLOGY

_MAX_INDEXED_PODS = 100_000
_MAX_RULES, _MAX_CODES, _MAX_CONDITIONS = 20, 255, 20
_ACTIONS = ("FailJob", "Ignore", "Count")
_TOPOLOGY_REQUESTS = ("required", "preferred", "unconstrained")


def job_problems(job: JobShape) -> Found:
    """Everything that is wrong with one replicated Job, its pods included."""
    for rule in (_numbers, _labels, _pod_failure_policy, _chips, _megascale, _taints, _kueue, pod_problems):
        yield from rule(job)


def _numbers(job: JobShape) -> Found:
    spec, key = job.spec, f"{job.path}.template.spec"
    if spec.get("completionMode", "Indexed") != "Indexed":
        value = spec["completionMode"]
        yield finding(f"{key}.completionMode", value, "gives pods no index", "use Indexed")
    if spec.get("parallelism") != spec.get("completions"):
        value = f"{spec.get('parallelism')} of {spec.get('completions')}"
        reason = "pods at a time: hosts that start later would be waited for in vain"
        yield finding(f"{key}.parallelism", value, reason, "use as many as completions")
    if not 1 <= job.pods <= _MAX_INDEXED_PODS:
        reason = f"is not a number of pods from 1 to {_MAX_INDEXED_PODS}"
        yield finding("hardware.topology", job.pods, reason, "use a smaller slice")
    backoff = spec.get("backoffLimit", 6)
    if not 0 <= whole(backoff, -1) <= syntax.MAX_INT32:
        yield finding(f"{key}.backoffLimit", backoff, "is not a whole number from 0", "use 0")


def _labels(job: JobShape) -> Found:
    yield from label_problems(mapped(job.template.get("metadata")).get("labels"), f"{job.path}.labels")


def _pod_failure_policy(job: JobShape) -> Found:
    if "podFailurePolicy" not in job.spec:
        return
    key = f"{job.path}.template.spec.podFailurePolicy"
    if job.pod.get("restartPolicy") != "Never":
        value = job.pod.get("restartPolicy")
        reason = "excludes podFailurePolicy (JobSet's default is OnFailure)"
        yield finding(f"{job.pod_path}.restartPolicy", value, reason, "use Never")
    if job.spec.get("podReplacementPolicy", "Failed") != "Failed":
        value = job.spec["podReplacementPolicy"]
        yield finding(f"{key}.podReplacementPolicy", value, "excludes podFailurePolicy", "use Failed")
    rules = listed(mapped(job.spec["podFailurePolicy"]).get("rules"))
    if len(rules) > _MAX_RULES:
        yield finding(key, len(rules), f"has more than {_MAX_RULES} rules", "use fewer")
    for index, rule in enumerate(rules):
        yield from _pod_rule(mapped(rule), f"{key}.rules[{index}]", job)


def _pod_rule(rule: Mapping[str, Any], key: str, job: JobShape) -> Found:
    if rule.get("action") not in _ACTIONS:
        fix = f"use {', '.join(_ACTIONS)}"
        yield finding(f"{key}.action", rule.get("action"), "is no action without backoffLimitPerIndex", fix)
    codes, conditions = rule.get("onExitCodes"), listed(rule.get("onPodConditions"))
    if (codes is None) == (not conditions):
        yield finding(key, None, "has not exactly one of onExitCodes and onPodConditions", "give one")
    if codes is not None:
        yield from _exit_codes(mapped(codes), f"{key}.onExitCodes", job)
    if len(conditions) > _MAX_CONDITIONS:
        yield finding(key, len(conditions), f"has more than {_MAX_CONDITIONS} conditions", "use fewer")
    for condition in map(mapped, conditions):
        kind, status = str(condition.get("type", "")), condition.get("status", "True")
        if reason := syntax.qualified_name(kind):
            yield finding(f"{key}.onPodConditions", kind, reason, "use DisruptionTarget")
        if status not in ("True", "False", "Unknown"):
            reason = "is no status (texts, not true and false)"
            yield finding(f"{key}.onPodConditions", status, reason, 'use "True"')


def _exit_codes(requirement: Mapping[str, Any], key: str, job: JobShape) -> Found:
    values, operator = listed(requirement.get("values")), requirement.get("operator")
    container = requirement.get("containerName")
    if container is not None and container not in [item.get("name") for item in job.containers]:
        yield finding(f"{key}.containerName", container, "is no container of the pod", "name one of them")
    if operator not in ("In", "NotIn"):
        yield finding(f"{key}.operator", operator, "is no operator", "use In or NotIn")
    if not 1 <= len(values) <= _MAX_CODES:
        yield finding(f"{key}.values", len(values), f"is not from 1 to {_MAX_CODES} codes", "list the codes")
    numbers = [whole(value, -1) for value in values]
    if numbers != sorted(set(numbers)):
        yield finding(f"{key}.values", values, "is not ascending without repetitions", "sort them")
    lowest = 1 if operator == "In" else 0
    if any(not lowest <= number <= 255 for number in numbers):
        yield finding(
            f"{key}.values", values, f"is not from {lowest} to 255", "use what a process can end with"
        )


def _chips(job: JobShape) -> Found:
    """Requests against the machine, and machines against the topology."""
    selector, requested = mapped(job.pod.get("nodeSelector")), _requested(job)
    accelerator, topology = selector.get(ACCELERATOR), selector.get(TOPOLOGY)
    key = "hardware.topology"
    if (accelerator is None) != (requested is None) or (accelerator is None) != (topology is None):
        value = f"{accelerator} {topology}, {requested} chips"
        reason = "accelerator, topology and chips do not come together: GKE would not give the pod its chips"
        yield finding(key, value, reason, f"select {ACCELERATOR}, {TOPOLOGY} and request {TPU}")
        return
    if requested is None:
        return
    chip = next((one for one in generations().values() if one.gke_accelerator == accelerator), None)
    sides = tuple(int(side) for side in str(topology).split("x") if side.isdecimal())
    hosts = host_shapes(chip, sides) if chip is not None else ()
    if chip is None or not hosts:
        yield finding(key, f"{accelerator} {topology}", "no machine of GKE has it", "see `muster hardware`")
        return
    machines = [host.chips_per_host for host in hosts]
    if requested not in machines:
        reason = (
            f"chips a pod, but the machines of {chip.name} {topology} have {machines}: it would stay pending"
        )
        yield finding("hardware.chips_per_host", requested, reason, f"use {machines[0]}")
    if math.prod(sides) != job.pods * requested:
        reason = (
            f"has {math.prod(sides)} chips, and {job.pods} pods of {requested} have {job.pods * requested}"
        )
        yield finding(key, topology, reason, "use as many pods as the slice has hosts")


def _requested(job: JobShape) -> int | None:
    """Chips of one pod; None when it asks for none."""
    amounts = [mapped(mapped(item.get("resources")).get("limits")).get(TPU) for item in job.containers]
    counts = [syntax.quantity(amount) for amount in amounts if amount is not None]
    return int(sum(count for count in counts if count is not None)) if counts else None


def _megascale(job: JobShape) -> Found:
    """On one slice the variables make JAX wait for others; without them several slices never meet."""
    entries = [mapped(entry) for item in job.containers for entry in listed(item.get("env"))]
    has = any(str(entry.get("name", "")).startswith("MEGASCALE_") for entry in entries)
    wanted = _requested(job) is not None and job.replicas > 1
    if has != wanted:
        reason = f"{'has' if has else 'lacks'} MEGASCALE_ variables with {job.replicas} slices of TPUs"
        fix = "leave MEGASCALE_ variables out of target.env" if has else "set them from JobSet's labels"
        yield finding("target.env" if has else job.path, None, reason, fix)


def _taints(job: JobShape) -> Found:
    """Taints that the selected nodes are known to have; GKE adds the TPU one by itself, others do not."""
    tolerated = [mapped(entry).get("key") for entry in listed(job.pod.get("tolerations"))]
    selector = mapped(job.pod.get("nodeSelector"))
    needed = [key for key in (SPOT,) if selector.get(key) == "true"]
    needed += [TPU] if _requested(job) is not None else []
    for key in needed:
        if key not in tolerated:
            reason = f"does not tolerate {key}, a taint of the nodes that it selects"
            yield finding(f"{job.pod_path}.tolerations", None, reason, f"tolerate {key}")


def _kueue(job: JobShape) -> Found:
    """Kueue's webhook (pkg/controller/jobframework/tas_validation.go)."""
    annotations = mapped(mapped(job.template.get("metadata")).get("annotations"))
    key = f"{job.path}.annotations"
    kinds = [kind for kind in _TOPOLOGY_REQUESTS if f"{PODSET}-{kind}-topology" in annotations]
    if len(kinds) > 1:
        yield finding(key, kinds, "are more than one topology request", "use one")
    level = annotations.get(f"{PODSET}-slice-required-topology")
    size = annotations.get(f"{PODSET}-slice-size")
    if (level is None) != (size is None):
        yield finding(key, size, "a slice needs a level and a size", "give both or none")
    if size is not None and not (str(size).isdecimal() and 1 <= int(size) <= job.replicas * job.pods):
        yield finding(key, size, "is not from 1 to the number of pods", "use the hosts of a slice")

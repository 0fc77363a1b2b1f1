"""Offline: what the API server, JobSet's webhook or the Job controller would refuse, or never run.

JobSet checks nothing of the Jobs and pods that it makes: a JobSet whose pods are refused is accepted and
waits for ever. So the rules of Jobs (`validate_job.py`) and of pods (`validate_pod.py`) are checked too.
Sources: sigs.k8s.io/jobset v0.11.1 pkg/webhooks/jobset_webhook.go and its CRD, k8s.io/kubernetes v1.34.3
pkg/apis/{batch,core}/validation/validation.go. tests/cluster runs them against the real ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from launcher.gke import names, syntax
from launcher.gke.validate_job import job_problems
from launcher.gke.validating import (
    Found,
    JobShape,
    finding,
    job_shapes,
    label_problems,
    listed,
    mapped,
    whole,
)
from recipes.errors import Problem

MAX_BYTES = 2**20
"""Of the whole object: etcd takes 1.5 MiB, and the API server adds its own record of who set what."""
_MAX_ANNOTATION_BYTES = 256 * 1024
_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_STRATEGIES = ("Recreate", "BlockingRecreate")
"""InPlaceRestart is behind a feature gate."""
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?", re.ASCII)
_MAX_DEPENDENCIES = 5
_IMMUTABLE = (
    "network",
    "successPolicy",
    "failurePolicy",
    "startupPolicy",
    "replicatedJobs",
    "managedBy",
    "volumeClaimPolicies",
)
_MUTABLE_WHILE_SUSPENDED = ("metadata", "nodeSelector", "tolerations", "schedulingGates")
"""Of a pod template: what Kueue writes when it admits a JobSet."""


def problems(manifest: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with a JobSet; empty when it can run."""
    what = (manifest.get("apiVersion"), manifest.get("kind"))
    if what != (f"{names.GROUP}/{names.VERSION}", "JobSet"):
        fix = f"use {names.GROUP}/{names.VERSION} JobSet"
        return [finding("kind", "/".join(map(str, what)), "is no JobSet", fix)]
    rules = (_size, _metadata, _network, _ttl, _jobs, _coordinator, _order, _success, _failure)
    found = [problem for rule in rules for problem in rule(manifest)]
    return found + [problem for job in job_shapes(manifest) for problem in job_problems(job)]


def immutable_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Paths that ``new`` sets otherwise and that JobSet refuses to change on ``old``.

    What only ``old`` has is a default of the server's. The rest (suspend, ttl, labels) may change.
    """
    before, after = mapped(old.get("spec")), mapped(new.get("spec"))
    skipped = _MUTABLE_WHILE_SUSPENDED if before.get("suspend") is True else ()
    return [
        path
        for name in _IMMUTABLE
        if name in after
        for path in _differences(before.get(name), after[name], f"spec.{name}", skipped)
    ]


def _differences(old: object, new: object, path: str, skipped: tuple[str, ...]) -> list[str]:
    in_pod_template = path.endswith(("template.spec.template", "template.spec.template.spec"))
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        keys = [key for key in new if not (in_pod_template and key in skipped)]
        return [
            found for key in keys for found in _differences(old.get(key), new[key], f"{path}.{key}", skipped)
        ]
    if isinstance(new, list) and isinstance(old, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [found for i, (a, b) in pairs for found in _differences(a, b, f"{path}[{i}]", skipped)]
    return [] if old == new else [path]


def _size(manifest: Mapping[str, Any]) -> Found:
    size_bytes = len(json.dumps(manifest, default=str))
    if size_bytes > MAX_BYTES:
        reason = f"the JobSet has {size_bytes} bytes, more than {MAX_BYTES}"
        yield finding("target.env", None, reason, "put large values into files that the trainer reads")


def _metadata(manifest: Mapping[str, Any]) -> Found:
    metadata = mapped(manifest.get("metadata"))
    name, namespace = str(metadata.get("name", "")), str(metadata.get("namespace", ""))
    if reason := syntax.dns1035_label(name):
        yield finding("run.name", name, reason, "use a shorter name of a-z, 0-9 and hyphens")
    if reason := syntax.dns1123_label(namespace):
        yield finding("target.namespace", namespace, reason, "give the name of a namespace")
    yield from label_problems(metadata.get("labels"), "metadata.labels")
    yield from _annotations(metadata.get("annotations"), "metadata.annotations")


def _annotations(annotations: object, path: str) -> Found:
    size_bytes = 0
    for key, value in mapped(annotations).items():
        where = "run.root" if key == names.RUN_DIR else f"{path}.{key}"
        if reason := syntax.annotation_key(key):
            yield finding(where, key, reason, "use letters, digits, '-', '_', '.'")
        if not isinstance(value, str):
            yield finding(where, value, "is no text", "write it in quotes")
        size_bytes += len(str(key)) + len(str(value))
    if size_bytes > _MAX_ANNOTATION_BYTES:
        reason = f"has {size_bytes} bytes, more than {_MAX_ANNOTATION_BYTES}"
        yield finding(path, None, reason, "shorten them")


def _network(manifest: Mapping[str, Any]) -> Found:
    network = mapped(mapped(manifest.get("spec")).get("network"))
    subdomain = network.get("subdomain")
    if subdomain is not None and (reason := syntax.dns1035_label(str(subdomain))):
        yield finding("spec.network.subdomain", subdomain, reason, "use a host name")
    if network.get("enableDNSHostnames") is False:
        reason = "leaves pods without names, and they would never meet"
        yield finding("spec.network.enableDNSHostnames", False, reason, "use true")
    if network.get("publishNotReadyAddresses") is False:
        # The names appear once a pod is ready; trainers wait for names before they are.
        yield finding("spec.network.publishNotReadyAddresses", False, "delays the names of pods", "use true")


def _ttl(manifest: Mapping[str, Any]) -> Found:
    ttl = mapped(manifest.get("spec")).get("ttlSecondsAfterFinished", 0)
    if not 0 <= whole(ttl, -1) <= syntax.MAX_INT32:
        reason = f"is not a whole number from 0 to {syntax.MAX_INT32}"
        yield finding("target.ttl_s", ttl, reason, "give seconds, for example 604800")


def _jobs(manifest: Mapping[str, Any]) -> Found:
    shapes = job_shapes(manifest)
    name = str(mapped(manifest.get("metadata")).get("name", ""))
    if not shapes:
        yield finding(
            "spec.replicatedJobs", None, "is empty: there is nothing to run", "add a replicated Job"
        )
    for repeated in _repeated([shape.name for shape in shapes]):
        yield finding("spec.replicatedJobs", repeated, "is there twice", "give each its own name")
    for shape in shapes:
        yield from _generated_names(name, shape)
        if shape.replicas < 1:
            yield finding("multislice.num_slices", shape.replicas, "is below 1: nothing would run", "use 1")
        if shape.replicas * shape.pods > syntax.MAX_INT32:
            reason = f"makes {shape.replicas * shape.pods} pods, more than {syntax.MAX_INT32}"
            yield finding("multislice.num_slices", shape.replicas, reason, "use fewer slices")


def _generated_names(name: str, shape: JobShape) -> Found:
    """Of the longest Job and pod; the server adds a hyphen and 5 characters to a pod's."""
    job = f"{name}-{shape.name}-{shape.replicas - 1}"
    pod = f"{job}-{shape.pods - 1}-abcde"
    for kind, text in (("Job", job), ("pod", pod)):
        if reason := syntax.dns1035_label(text):
            fix = f"use a run name of at most {63 - len(pod) + len(name)} characters"
            yield finding("run.name", name, f"the name of its {kind} {text} {reason}", fix)
            return


def _coordinator(manifest: Mapping[str, Any]) -> Found:
    spec = mapped(manifest.get("spec"))
    if "coordinator" not in spec:
        return
    coordinator = mapped(spec["coordinator"])
    name, key = coordinator.get("replicatedJob"), "spec.coordinator"
    shape = next((shape for shape in job_shapes(manifest) if shape.name == name), None)
    if shape is None:
        yield finding(key, name, "is not a replicated Job of this JobSet", "name one of them")
        return
    job, pod = whole(coordinator.get("jobIndex"), 0), whole(coordinator.get("podIndex"), 0)
    if not 0 <= job < shape.replicas or not 0 <= pod < shape.pods or "completions" not in shape.spec:
        yield finding(key, f"{name} {job} {pod}", "is no pod of that Job", "use 0 and 0, and completions")
    metadata = mapped(manifest.get("metadata"))
    subdomain = mapped(spec.get("network")).get("subdomain") or metadata.get("name")
    label = f"{metadata.get('name')}-{name}-{job}-{pod}.{subdomain}"
    if reason := syntax.label_value(label):
        fix = "use a shorter run name or subdomain"
        yield finding("run.name", metadata.get("name"), f"the coordinator's label {label} {reason}", fix)


def _order(manifest: Mapping[str, Any]) -> Found:
    """Of starting: dependsOn, or one Job after another."""
    spec = mapped(manifest.get("spec"))
    in_order = mapped(spec.get("startupPolicy")).get("startupPolicyOrder") == "InOrder"
    earlier: list[str] = []
    for index, item in enumerate(listed(spec.get("replicatedJobs"))):
        job, key = mapped(item), f"spec.replicatedJobs[{index}].dependsOn"
        needed = [mapped(dependency) for dependency in listed(job.get("dependsOn"))]
        if needed and in_order:
            yield finding(key, None, "excludes startupPolicyOrder InOrder", "use one of them")
        if len(needed) > _MAX_DEPENDENCIES:
            yield finding(key, len(needed), f"has more than {_MAX_DEPENDENCIES}", "depend on fewer Jobs")
        for dependency in needed:
            # JobSet accepts a Job that waits for itself.
            if dependency.get("name") not in earlier:
                yield finding(key, dependency.get("name"), "is no earlier Job", "name one that comes before")
            if dependency.get("status") not in ("Ready", "Complete"):
                yield finding(key, dependency.get("status"), "is no state", "use Ready or Complete")
        earlier.append(str(job.get("name", "")))


def _success(manifest: Mapping[str, Any]) -> Found:
    spec = mapped(manifest.get("spec"))
    if "successPolicy" not in spec:
        return
    policy, key = mapped(spec["successPolicy"]), "spec.successPolicy"
    if policy.get("operator") not in ("All", "Any"):
        yield finding(key, policy.get("operator"), "is no operator", "use All or Any")
    yield from _targets(policy, key, manifest)


def _targets(rule: Mapping[str, Any], key: str, manifest: Mapping[str, Any]) -> Found:
    known = [shape.name for shape in job_shapes(manifest)]
    for name in listed(rule.get("targetReplicatedJobs")):
        if name not in known:
            yield finding(key, name, "is not a replicated Job of this JobSet", f"use {' or '.join(known)}")


def _failure(manifest: Mapping[str, Any]) -> Found:
    policy, key = mapped(mapped(manifest.get("spec")).get("failurePolicy")), "spec.failurePolicy"
    restarts = policy.get("maxRestarts", 0)
    if not 0 <= whole(restarts, -1) <= syntax.MAX_INT32:
        reason = f"is not a whole number from 0 to {syntax.MAX_INT32}"
        yield finding("run.max_restarts", restarts, reason, "give a number, for example 3")
    if policy.get("restartStrategy", "Recreate") not in _STRATEGIES:
        value, fix = policy["restartStrategy"], f"use {' or '.join(_STRATEGIES)}"
        yield finding(f"{key}.restartStrategy", value, "is no strategy of every JobSet", fix)
    rules = [mapped(rule) for rule in listed(policy.get("rules"))]
    for repeated in _repeated([str(rule.get("name")) for rule in rules]):
        yield finding(f"{key}.rules", repeated, "is there twice", "give each rule its own name")
    for index, rule in enumerate(rules):
        yield from _failure_rule(rule, f"{key}.rules[{index}]", manifest)


def _failure_rule(rule: Mapping[str, Any], key: str, manifest: Mapping[str, Any]) -> Found:
    if _RULE_NAME.fullmatch(str(rule.get("name", ""))) is None:
        reason = "is not a rule's name (1 to 128 of letters, digits, '_', ',' and ':', from a letter on)"
        yield finding(f"{key}.name", rule.get("name"), reason, "rename it")
    if rule.get("action") not in _ACTIONS:
        yield finding(f"{key}.action", rule.get("action"), "is no action", f"use {', '.join(_ACTIONS)}")
    for reason_name in listed(rule.get("onJobFailureReasons")):
        if reason_name not in _REASONS:
            fix = f"use {', '.join(_REASONS)}"
            yield finding(f"{key}.onJobFailureReasons", reason_name, "is no reason of a failed Job", fix)
    for text in listed(rule.get("onJobFailureMessagePatterns")):
        if reason := syntax.pattern(str(text)):
            yield finding(f"{key}.onJobFailureMessagePatterns", text, reason, "use what RE2 knows")
    yield from _targets(rule, f"{key}.targetReplicatedJobs", manifest)


def _repeated(found: list[str]) -> list[str]:
    return [name for name, count in Counter(found).items() if count > 1]

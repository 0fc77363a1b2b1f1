"""Plan -> JobSet, as an object. Pure: the same recipe, plan and code give the same bytes.

A slice is one Job of the JobSet, a host one pod of it. `jobs.py` says what restarts what and what counts,
`podspec.py` what a pod is, `pathways.py` how a single controller is laid out.

    muster plan RECIPE --manifest
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from launcher.gke import names, pathways
from launcher.gke.canonical import canonical_yaml
from launcher.gke.env import Object
from launcher.gke.jobs import EXCLUSIVE, failure_policy, is_exclusive, labels, slice_job
from launcher.gke.podspec import NODE_POOL
from launcher.plan import Plan
from recipes.schema import Recipe

PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"


def manifest(
    recipe: Recipe, plan: Plan, *, bundle: str | None, message_patterns: bool = True
) -> dict[str, Any]:
    """The JobSet of a run on GKE.

    Args:
      recipe: with ``target.kind=gke``.
      plan: of this recipe.
      bundle: ``sha256:<hex>`` of the code; None when the image has it.
      message_patterns: False for a JobSet before 0.10, which counts preemptions as restarts.
    """
    found: Object = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "JobSet",
        "metadata": _metadata(recipe, plan),
        "spec": _spec(recipe, plan, bundle, message_patterns),
    }
    found["metadata"]["labels"][names.SPEC] = spec_digest(found)
    return found


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Exactly what is applied, and what ``muster plan --manifest`` prints."""
    return canonical_yaml(manifest)


def spec_digest(manifest: Mapping[str, Any]) -> str:
    """First characters of the sha256 of the manifest without the label that holds it."""
    metadata = manifest["metadata"]
    others = {key: value for key, value in metadata["labels"].items() if key != names.SPEC}
    bare = {**manifest, "metadata": {**metadata, "labels": others}}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()[: names.DIGEST_CHARS]


def _metadata(recipe: Recipe, plan: Plan) -> Object:
    target = recipe.target
    found = labels(recipe, plan)
    if target.queue is not None:
        found[names.QUEUE] = target.queue
        if target.priority_class is not None:
            found[PRIORITY_CLASS] = target.priority_class
    annotations = {names.RUN_DIR: plan.run_dir}
    if target.controller == "multi" and is_exclusive(recipe, plan):
        annotations[EXCLUSIVE] = NODE_POOL
    return {
        "name": plan.run_name,
        "namespace": target.namespace,
        "labels": found,
        "annotations": annotations,
    }


def _spec(recipe: Recipe, plan: Plan, bundle: str | None, message_patterns: bool) -> Object:
    target = recipe.target
    is_single = target.controller == "pathways"
    if is_single:
        jobs = pathways.jobs(recipe, plan, bundle, message_patterns)
    else:
        jobs = [slice_job(recipe, plan, bundle, message_patterns)]
    return {
        "coordinator": {"replicatedJob": jobs[0]["name"], "jobIndex": 0, "podIndex": 0},
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": names.subdomain(target.namespace, plan.run_name),
        },
        # Pathways' workers serve until they are told to stop: only the head can complete.
        **({"successPolicy": pathways.success_policy()} if is_single else {}),
        "failurePolicy": failure_policy(recipe.run.max_restarts, message_patterns),
        "ttlSecondsAfterFinished": target.ttl_s,
        "replicatedJobs": jobs,
    }

"""What a check of `muster doctor` says, and the checks of the cluster itself and of one namespace. Pure.

Every check is a function from what was observed to results; `doctor.py` observes. What could not be
observed is :class:`Unseen`, never an exception, and gives ``unknown`` with the reason. The table is
tests/unit/test_gke_doctor.py.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.gke.objects import Object, Resource, annotation, is_deleting, items, label, mapping, name, text
from launcher.gke.podspec import TPU

WORKLOAD_IDENTITY = "iam.gke.io/gcp-service-account"
CLOCK_WARNING_S = 10.0
"""Leases and heartbeats are compared with this machine's clock."""
CLOCK_FAILED_S = 300.0
"""Tokens that seem to come from another time are refused."""
SHOWN = 6
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+)(?:[eE]([+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE])?)")
_BINARY = {unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {
    unit: 10.0**power for unit, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
}


class Level(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One check."""

    check: str
    level: Level
    message: str
    fix: str = ""
    """What to do, as an imperative clause; always there when it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unseen:
    """What could not be read, and why."""

    reason: str


type Found = Object | Unseen | None
"""An object, its absence, or neither is known."""
type FoundAll = Sequence[Object] | Unseen


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """One thing that the user must be allowed to do in the namespace."""

    verb: str
    resource: Resource
    subresource: str = ""

    @property
    def kind(self) -> str:
        kind = f"{self.resource.plural}.{self.resource.group}".rstrip(".")
        return f"{kind}/{self.subresource}".rstrip("/")


def ok(check: str, message: str) -> Result:
    return Result(check=check, level=Level.OK, message=message)


def warning(check: str, message: str, fix: str = "") -> Result:
    return Result(check=check, level=Level.WARNING, message=message, fix=fix)


def failed(check: str, message: str, fix: str) -> Result:
    return Result(check=check, level=Level.FAILED, message=message, fix=fix)


def unknown(check: str, message: str, fix: str = "") -> Result:
    return Result(check=check, level=Level.UNKNOWN, message=message, fix=fix)


def check_version(context: str, version: Object | Unseen) -> Result:
    if isinstance(version, Unseen):
        return unknown("cluster", f"{context} answers; its version: {version.reason}")
    return ok("cluster", f"{context}: Kubernetes {text(version, 'gitVersion') or 'of an unknown version'}")


def check_clock(skew_s: float | None) -> Result:
    """``skew_s``: how far this machine's clock is ahead of the API server's."""
    if skew_s is None:
        return unknown("clock", "the API server did not say what time it is")
    apart = (
        f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the cluster's"
    )
    fix = "set this machine's clock, for example with `timedatectl set-ntp true`"
    if abs(skew_s) > CLOCK_FAILED_S:
        return failed("clock", f"{apart}: credentials are refused so far apart", fix)
    if abs(skew_s) > CLOCK_WARNING_S:
        return warning("clock", f"{apart}: who holds a run is told by time", fix)
    return ok("clock", f"within {CLOCK_WARNING_S:.0f} s of the cluster's")


def check_permissions(check: str, allowed: Mapping[Permission, bool | Unseen], *, needed_for: str) -> Result:
    """``needed_for``: what does not work without; empty when nothing at all works."""
    denied = [permission for permission, may in allowed.items() if may is False]
    unseen = [may for may in allowed.values() if isinstance(may, Unseen)]
    if denied:
        message = f"you may not {_permitted(denied)}"
        fix = "have an administrator bind you to the Role of k8s/base/rbac"
        return warning(check, f"{message}: {needed_for}", fix) if needed_for else failed(check, message, fix)
    if unseen:
        return unknown(check, unseen[0].reason)
    return ok(check, f"you may {_permitted([*allowed])}")


def _permitted(permissions: Sequence[Permission]) -> str:
    kinds = dict.fromkeys(each.kind for each in permissions)
    verbs = {kind: [each.verb for each in permissions if each.kind == kind] for kind in kinds}
    return "; ".join(f"{', '.join(verbs[kind])} {kind}" for kind in kinds)


def check_namespace(namespace: str, found: Found, default_account: Found) -> Result:
    """Where namespaces may not be read, the account that every namespace has tells as much."""
    fix = f"set target.namespace to one that exists, or have {namespace} made"
    seen = default_account if isinstance(found, Unseen) else found
    if isinstance(seen, Unseen):
        return unknown("namespace", found.reason if isinstance(found, Unseen) else seen.reason)
    if seen is None:
        return failed("namespace", f"there is no namespace {namespace}", fix)
    if seen is found and is_deleting(seen):
        return failed("namespace", f"{namespace} is being deleted", fix)
    return ok("namespace", f"{namespace} exists")


def check_account(account: str | None, found: Found, root: str) -> Result:
    """The service account of the pods, which the bucket's owner lets in."""
    check, shown = "service account", account or "default"
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        fix = "correct target.service_account, or have it made (k8s/base/serviceaccount)"
        return failed(check, f"there is no service account {shown}", fix)
    if google := annotation(found, WORKLOAD_IDENTITY):
        return ok(check, f"{shown} acts as {google}")
    missing = f"{shown} has no annotation {WORKLOAD_IDENTITY}"
    if not root.startswith("gs://"):
        return ok(check, f"{shown} exists")
    if account is None:
        fix = "set target.service_account to one that may write to the bucket"
        return warning(check, f"{missing}, and target.service_account is not set", fix)
    return unknown(
        check,
        f"{missing}: only the bucket knows whether it lets this account in by itself",
        "where it does not, grant roles/storage.objectUser to the account's principal:// (docs/gke.md)",
    )


def check_secrets(
    secrets: Mapping[str, str], keys: Mapping[str, frozenset[str] | Unseen | None]
) -> Sequence[Result]:
    """``secrets``: variable -> SECRET/KEY; ``keys``: names of the keys of each secret, never their values."""
    return [
        _check_secret(variable, *place.partition("/")[::2], keys)
        for variable, place in sorted(secrets.items())
    ]


def _check_secret(
    variable: str, secret: str, key: str, keys: Mapping[str, frozenset[str] | Unseen | None]
) -> Result:
    check, found = f"secret {secret}/{key}", keys.get(secret)
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        fix = f"correct target.secrets.{variable}, or have the Secret made"
        return failed(check, f"there is no Secret {secret}", fix)
    if key not in found:
        has = f"it has {listed(sorted(found))}" if found else "it is empty"
        return failed(check, f"Secret {secret} has no key {key}", f"correct target.secrets.{variable}: {has}")
    return ok(check, f"exists, for {variable}")


def check_quotas(quotas: FoundAll, needs: Mapping[str, float], namespace: str) -> Sequence[Result]:
    """ResourceQuotas of the namespace: they refuse pods one by one, long after the JobSet was accepted."""
    if isinstance(quotas, Unseen):
        return [unknown("resource quota", quotas.reason)]
    found = [result for quota in quotas for result in _check_quota(quota, needs, namespace)]
    return found or [ok("resource quota", "leaves room" if quotas else "none in the namespace")]


def _check_quota(quota: Object, needs: Mapping[str, float], namespace: str) -> Sequence[Result]:
    check, found = f"resource quota {name(quota)}", list[Result]()
    scoped = bool(quota.get("spec", {}).get("scopes") or mapping(quota, "spec", "scopeSelector"))
    hard, used = (
        mapping(quota, "status", "hard") or mapping(quota, "spec", "hard"),
        mapping(quota, "status", "used"),
    )
    for resource, limit in hard.items():
        most, need = quantity(limit), needs.get(resource, 0.0)
        taken = quantity(used.get(resource)) or 0.0
        if resource in _DEMANDED and need == 0:
            message = (
                f"counts {resource}: pods that ask for none are refused, unless a LimitRange sets a default"
            )
            found.append(warning(check, message, "have a LimitRange made, or run in another namespace"))
        elif most is None or need == 0 or taken + need <= most:
            continue
        elif need > most and not scoped:
            message = f"allows {most:g} {resource} in {namespace}, the run needs {need:g}"
            found.append(
                failed(check, message, "have it raised, use fewer chips, or another target.namespace")
            )
        else:
            message = f"{taken:g} of {most:g} {resource} are in use, the run needs {need:g}"
            found.append(warning(check, message, "`muster ls --cluster` shows what runs; else wait"))
    return found


_DEMANDED = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
"""A quota on these makes the API server demand them of every container."""


def check_image(images: Mapping[str, str | None]) -> Sequence[Result]:
    """``images`` by key of the recipe. A tag may be another image at the next restart."""
    return [
        ok(f"image {key}", "is by digest")
        if image is not None and _DIGEST.fullmatch(image)
        else failed(
            f"image {key}", f"{image or 'none'} is not by digest", f"set {key}=REPOSITORY@sha256:... "
        )
        for key, image in images.items()
    ]


# What more than one file of checks uses


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSet:
    """Pods of one replicated Job: alike in what they ask for and where they may run."""

    job: str
    jobs: int
    pods: int
    """Of all its Jobs."""
    requests: Mapping[str, float]
    """Of one pod."""
    node_selector: Mapping[str, str]
    tolerations: Sequence[Object]

    def total(self, resource: str) -> float:
        return self.pods * self.requests.get(resource, 0.0)


def pod_sets(manifest: Object) -> Sequence[PodSet]:
    found = []
    for job in items(manifest, "spec", "replicatedJobs"):
        spec = mapping(job, "template", "spec", "template", "spec")
        jobs = int(job.get("replicas", 1))
        found.append(
            PodSet(
                job=text(job, "name"),
                jobs=jobs,
                pods=jobs * int(mapping(job, "template", "spec").get("parallelism", 1)),
                requests=_pod_requests(spec),
                node_selector=mapping(spec, "nodeSelector"),
                tolerations=items(spec, "tolerations"),
            )
        )
    return found


def needs(manifest: Object) -> Mapping[str, float]:
    """What ResourceQuotas may count."""
    sets = pod_sets(manifest)
    found = {
        "pods": float(sum(each.pods for each in sets)),
        "count/jobs.batch": float(sum(each.jobs for each in sets)),
        "count/jobsets.jobset.x-k8s.io": 1.0,
    }
    found["count/pods"] = found["pods"]
    for resource in {resource for each in sets for resource in each.requests}:
        total = sum(each.total(resource) for each in sets)
        found[f"requests.{resource}"] = total
        if resource != TPU:
            found[resource] = total
    return found


def _pod_requests(spec: Object) -> Mapping[str, float]:
    """Sidecars count beside the containers; other init containers run before them."""
    init = items(spec, "initContainers")
    sidecars = [each for each in init if each.get("restartPolicy") == "Always"]
    running = _sum([*items(spec, "containers"), *sidecars])
    for each in init:
        for resource, amount in _sum([each]).items():
            running[resource] = max(running.get(resource, 0.0), amount)
    return running


def _sum(containers: Sequence[Object]) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in containers:
        asked = {**mapping(container, "resources", "limits"), **mapping(container, "resources", "requests")}
        for resource, amount in asked.items():
            total[resource] = total.get(resource, 0.0) + (quantity(amount) or 0.0)
    return total


def tolerates(tolerations: Sequence[Object], taint: Object) -> bool:
    """As the scheduler and Kueue see it."""
    return any(
        text(each, "effect") in ("", text(taint, "effect"))
        and text(each, "key") in ("", text(taint, "key"))
        and (text(each, "operator") == "Exists" or text(each, "value") == text(taint, "value"))
        for each in tolerations
    )


def taint_text(taint: Object) -> str:
    value = f"={text(taint, 'value')}" if text(taint, "value") else ""
    return f"{text(taint, 'key')}{value}:{text(taint, 'effect')}"


def selects(selector: Object, found: Object) -> bool:
    """Whether a label selector takes an object; an empty one takes all."""
    same = all(label(found, key) == value for key, value in mapping(selector, "matchLabels").items())
    return same and all(_expressed(each, found) for each in items(selector, "matchExpressions"))


def _expressed(expression: Object, found: Object) -> bool:
    labels, key = mapping(found, "metadata", "labels"), text(expression, "key")
    values = expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def quantity(value: object) -> float | None:
    """A Kubernetes quantity as a number; None when it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, exponent, unit = match.groups()
    factor = 10.0 ** int(exponent) if exponent else (_BINARY | _DECIMAL).get(unit, 1.0)
    return float(number) * factor


def listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more

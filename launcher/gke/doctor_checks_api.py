"""Checks of what the cluster serves: JobSet, its version and fields, and whether it takes the manifest. Pure.

The fields come from the API server's OpenAPI document, which every user may read; it has the same schema
as the CustomResourceDefinition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.gke import names
from launcher.gke.doctor_checks import Found, Level, Result, Unseen, failed, listed, ok, unknown, warning
from launcher.gke.objects import Object, dig, items, mapping, number, text

INSTALL = "have JobSet installed (k8s/install/jobset)"
PATTERNS = "onJobFailureMessagePatterns"
CONTROLLER_NAMESPACE, CONTROLLER = "jobset-system", "jobset-controller-manager"
"""As upstream's manifests name them."""


def check_jobset(group: Found) -> Result:
    """``group``: what the API server says of jobset.x-k8s.io; None when it does not have it."""
    if isinstance(group, Unseen):
        return unknown("jobset", group.reason)
    if group is None:
        return failed("jobset", "is not installed in this cluster", INSTALL)
    served = [text(version, "version") for version in items(group, "versions")]
    if names.VERSION not in served:
        return failed("jobset", f"serves {listed(served)}, not {names.VERSION}", INSTALL)
    return ok("jobset", f"serves {names.VERSION}")


def check_fields(manifest: Object, document: Found) -> Result:
    """Whether the installed JobSet has every field of the manifest."""
    check = "jobset fields"
    schema = jobset_schema(document) if not isinstance(document, Unseen) else {}
    if not schema:
        return unknown(
            check, document.reason if isinstance(document, Unseen) else "JobSet's schema is not published"
        )
    body = {key: value for key, value in manifest.items() if key != "metadata"}
    missing = list(dict.fromkeys(missing_fields(body, schema)))
    others = [path for path in missing if not path.endswith(PATTERNS)]
    if others:
        return failed(
            check, f"the installed JobSet has no {listed(others)}", "have a newer JobSet installed: 0.11"
        )
    if missing:
        message = (
            f"the installed JobSet is older than 0.10 (no {PATTERNS}): preemptions will count as restarts"
        )
        return warning(check, message, "have a newer JobSet installed, or raise run.max_restarts")
    return ok(check, "has all that the manifest uses")


def jobset_schema(document: object) -> Object:
    """JobSet's schema in the OpenAPI document of its group; empty when it is not there."""
    for schema in mapping(document, "components", "schemas").values():
        kinds = items(schema, "x-kubernetes-group-version-kind")
        if any(text(kind, "kind") == "JobSet" for kind in kinds):
            return mapping(schema)
    return {}


def missing_fields(value: object, schema: object, path: str = "") -> Iterator[str]:
    """Paths in ``value`` that a structural schema does not have."""
    if isinstance(value, Mapping):
        if dig(schema, "x-kubernetes-preserve-unknown-fields") is True:
            return
        properties, others = mapping(schema, "properties"), dig(schema, "additionalProperties")
        for key, inner in value.items():
            where = f"{path}.{key}".lstrip(".")
            if key in properties:
                yield from missing_fields(inner, properties[key], where)
            elif isinstance(others, Mapping):
                yield from missing_fields(inner, others, where)
            elif others is not True:
                yield where
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from missing_fields(inner, dig(schema, "items"), f"{path}[]")


def check_controller(found: Found) -> Result:
    """JobSet's controller, which restarts runs and whose webhooks let JobSets in."""
    check = "jobset controller"
    if isinstance(found, Unseen):
        return unknown(check, found.reason)
    if found is None:
        return unknown(
            check, f"there is no Deployment {CONTROLLER_NAMESPACE}/{CONTROLLER}; it may have another name"
        )
    image = next((text(each, "image") for each in items(found, "spec", "template", "spec", "containers")), "")
    tag = image.rpartition("/")[2] or "of an unknown image"
    if number(found, "status", "readyReplicas") < 1:
        fix = f"look at its pods with `kubectl -n {CONTROLLER_NAMESPACE} get pods`, or tell an administrator"
        return failed(check, f"{tag} is not ready: nothing would start", fix)
    return ok(check, f"{tag} is ready")


def check_dry_run(problem: str | Unseen, results: Sequence[Result]) -> Result:
    """The API server's own word on the manifest.

    Args:
      problem: what it refused; empty when it took it.
      results: of the checks before; what they found is not said twice.
    """
    check = "dry run"
    if isinstance(problem, Unseen):
        return unknown(check, problem.reason)
    if not problem:
        return ok(check, "the cluster would accept the manifest")
    if any(result.level is Level.FAILED for result in results):
        return unknown(check, f"refused, as was to be expected: {problem}")
    return failed(check, problem, "correct what it names; `muster plan --manifest` shows the manifest")

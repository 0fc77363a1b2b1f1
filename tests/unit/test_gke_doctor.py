"""The doctor's checks of the cluster, the namespace and the bucket: what is said of what was observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from launcher.gke.doctor_checks import (
    Found,
    FoundAll,
    Level,
    Permission,
    Result,
    Unseen,
    check_account,
    check_clock,
    check_image,
    check_namespace,
    check_permissions,
    check_quotas,
    check_secrets,
    check_version,
    needs,
    pod_sets,
    quantity,
    selects,
    tolerates,
)
from launcher.gke.doctor_checks_api import (
    PATTERNS,
    check_controller,
    check_dry_run,
    check_fields,
    check_jobset,
    missing_fields,
)
from launcher.gke.doctor_checks_bucket import Bucket, check_bucket, check_location, region_of, regions_of
from launcher.gke.objects import JOBSETS, PODS
from tests.unit.manifest_support import golden

OK, WARNING, FAILED, UNKNOWN = Level.OK, Level.WARNING, Level.FAILED, Level.UNKNOWN
NOT_ALLOWED = Unseen(reason="jane may not get it")
DIGEST = f"repo/trainer@sha256:{'0' * 64}"


def named(name: str, **rest: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, **rest}


def said(result: Result, level: Level, words: str) -> None:
    """The result is as bad as that, says these words, and every failure has a fix."""
    text = f"{result.message} / {result.fix}"
    assert (result.level, words in text) == (level, True), f"{result.level}: {text}"
    assert result.fix or level is not FAILED


def test_version() -> None:
    said(check_version("gke_p_l_c", {"gitVersion": "v1.34.3"}), OK, "gke_p_l_c: Kubernetes v1.34.3")
    said(check_version("c", {}), OK, "unknown version")
    said(check_version("c", NOT_ALLOWED), UNKNOWN, "jane may not")


@pytest.mark.parametrize(
    ("skew_s", "level", "words"),
    [
        (0.4, OK, "within"),
        (-10.0, OK, "within"),
        (42.0, WARNING, "42 s ahead of"),
        (-42.0, WARNING, "42 s behind"),
        (301.0, FAILED, "credentials"),
        (None, UNKNOWN, "did not say"),
    ],
)
def test_clock(skew_s: float | None, level: Level, words: str) -> None:
    said(check_clock(skew_s), level, words)


CREATE, LOGS = (
    Permission(verb="create", resource=JOBSETS),
    Permission(verb="get", resource=PODS, subresource="log"),
)


@pytest.mark.parametrize(
    ("allowed", "needed_for", "level", "words"),
    [
        ({CREATE: True}, "", OK, "you may create jobsets.jobset.x-k8s.io"),
        ({CREATE: False, LOGS: True}, "", FAILED, "may not create jobsets.jobset.x-k8s.io /"),
        ({LOGS: False}, "logs", WARNING, "may not get pods/log: logs"),
        ({CREATE: True, LOGS: NOT_ALLOWED}, "", UNKNOWN, "jane may not"),
        ({CREATE: False, LOGS: NOT_ALLOWED}, "", FAILED, "create"),
    ],
)
def test_permissions(
    allowed: Mapping[Permission, bool | Unseen], needed_for: str, level: Level, words: str
) -> None:
    said(check_permissions("may", allowed, needed_for=needed_for), level, words)


@pytest.mark.parametrize(
    ("found", "account", "level", "words"),
    [
        (named("team"), None, OK, "team exists"),
        (None, None, FAILED, "there is no namespace team"),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, None, FAILED, "being deleted"),
        (NOT_ALLOWED, named("default"), OK, "team exists"),
        (NOT_ALLOWED, None, FAILED, "there is no namespace"),
        (NOT_ALLOWED, Unseen(reason="nor that"), UNKNOWN, "jane may not"),
    ],
)
def test_namespace(found: Found, account: Found, level: Level, words: str) -> None:
    said(check_namespace("team", found, account), level, words)


BOUND = {"metadata": {"annotations": {"iam.gke.io/gcp-service-account": "t@p.iam.gserviceaccount.com"}}}


@pytest.mark.parametrize(
    ("account", "found", "root", "level", "words"),
    [
        ("trainer", BOUND, "gs://b/r", OK, "acts as t@p.iam.gserviceaccount.com"),
        ("trainer", named("trainer"), "gs://b/r", UNKNOWN, "principal://"),
        ("trainer", named("trainer"), "/nfs", OK, "trainer exists"),
        (None, named("default"), "gs://b/r", WARNING, "target.service_account is not set"),
        (None, BOUND, "gs://b/r", OK, "default acts as"),
        ("trainer", None, "gs://b/r", FAILED, "there is no service account trainer"),
        ("trainer", NOT_ALLOWED, "gs://b/r", UNKNOWN, "jane may not"),
    ],
)
def test_account(account: str | None, found: Found, root: str, level: Level, words: str) -> None:
    said(check_account(account, found, root), level, words)


@pytest.mark.parametrize(
    ("keys", "level", "words"),
    [
        (frozenset({"token", "other"}), OK, "for WANDB_API_KEY"),
        (frozenset({"tokens", "other"}), FAILED, "it has other, tokens"),
        (frozenset(), FAILED, "it is empty"),
        (None, FAILED, "there is no Secret wandb"),
        (NOT_ALLOWED, UNKNOWN, "jane may not"),
    ],
)
def test_secrets(keys: frozenset[str] | Unseen | None, level: Level, words: str) -> None:
    [result] = check_secrets({"WANDB_API_KEY": "wandb/token"}, {"wandb": keys})
    said(result, level, words)
    assert result.check == "secret wandb/token"


def quota(hard: Mapping[str, str], used: Mapping[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return named("q", spec={"hard": hard, **spec}, status={"hard": hard, "used": used or {}})


TPU = "requests.google.com/tpu"


@pytest.mark.parametrize(
    ("quotas", "level", "words"),
    [
        ([], OK, "none in the namespace"),
        ([quota({TPU: "512"}, {TPU: "0"})], OK, "leaves room"),
        ([quota({TPU: "511"})], FAILED, "allows 511 requests.google.com/tpu in team, the run needs 512"),
        ([quota({TPU: "1k"}, {TPU: "600"})], WARNING, "600 of 1000"),
        ([quota({TPU: "8"}, scopes=["Terminating"])], WARNING, "0 of 8"),
        ([quota({"pods": "100"})], FAILED, "allows 100 pods"),
        ([quota({"count/jobs.batch": "1"})], FAILED, "needs 2"),
        (
            [quota({"count/jobsets.jobset.x-k8s.io": "5"}, {"count/jobsets.jobset.x-k8s.io": "5"})],
            WARNING,
            "5 of 5",
        ),
        ([quota({"limits.memory": "1Ti"})], WARNING, "LimitRange"),
        ([quota({"persistentvolumeclaims": "0", "services": "x"})], OK, "leaves room"),
        (NOT_ALLOWED, UNKNOWN, "jane may not"),
    ],
)
def test_quotas(quotas: FoundAll, level: Level, words: str) -> None:
    [result] = check_quotas(quotas, needs(golden("spot-two-slices")), "team")
    said(result, level, words)


@pytest.mark.parametrize("image", [None, "", "repo/trainer:latest", "repo/trainer", f"{DIGEST}0"])
def test_image_without_digest(image: str | None) -> None:
    [result] = check_image({"target.image": image})
    said(result, FAILED, "set target.image=REPOSITORY@sha256")


def test_image_by_digest() -> None:
    [result] = check_image({"target.image": DIGEST})
    said(result, OK, "is by digest")


# JobSet


@pytest.mark.parametrize(
    ("group", "level", "words"),
    [
        ({"versions": [{"version": "v1alpha2"}]}, OK, "serves v1alpha2"),
        ({"versions": [{"version": "v1alpha1"}]}, FAILED, "serves v1alpha1, not v1alpha2"),
        (None, FAILED, "not installed"),
        (NOT_ALLOWED, UNKNOWN, "jane may not"),
    ],
)
def test_jobset(group: Found, level: Level, words: str) -> None:
    said(check_jobset(group), level, words)


def schema_of(value: object) -> dict[str, Any]:
    """The structural schema that has exactly the fields of a value."""
    if isinstance(value, Mapping):
        return {"type": "object", "properties": {key: schema_of(inner) for key, inner in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        merged: dict[str, Any] = {}
        for inner in value:
            merged |= schema_of(inner).get("properties", {})
        return {"type": "array", "items": {"type": "object", "properties": merged}}
    return {"type": "string"}


def document(schema: Mapping[str, Any]) -> dict[str, Any]:
    kind = [{"group": "jobset.x-k8s.io", "kind": "JobSet", "version": "v1alpha2"}]
    return {
        "components": {
            "schemas": {"JobSet": {**schema, "x-kubernetes-group-version-kind": kind}, "Other": {}}
        }
    }


def without(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = schema
    for key in path[:-1]:
        inner = inner["properties"][key]
        inner = inner.get("items", inner)
    inner["properties"].pop(path[-1])
    return schema


def test_fields() -> None:
    manifest = golden("spot-two-slices")
    said(check_fields(manifest, document(schema_of(manifest))), OK, "has all")
    old = without(schema_of(manifest), "spec", "failurePolicy", "rules", PATTERNS)
    said(check_fields(manifest, document(old)), WARNING, "preemptions will count as restarts")
    older = without(old, "spec", "coordinator")
    said(check_fields(manifest, document(older)), FAILED, "has no spec.coordinator /")
    said(check_fields(manifest, document({})), FAILED, "apiVersion, kind, spec")
    said(check_fields(manifest, {}), UNKNOWN, "not published")
    said(check_fields(manifest, NOT_ALLOWED), UNKNOWN, "jane may not")


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ({"properties": {"a": {"additionalProperties": {"type": "string"}}}}, []),
        ({"properties": {"a": {"x-kubernetes-preserve-unknown-fields": True}}}, []),
        ({"additionalProperties": True}, []),
        ({"properties": {"a": {"properties": {"c": {}}}}}, ["a.b"]),
        ({"properties": {"a": "nonsense"}}, ["a.b"]),
        (None, ["a"]),
    ],
)
def test_missing_fields(schema: object, missing: Sequence[str]) -> None:
    assert list(missing_fields({"a": {"b": "text"}}, schema)) == missing


@pytest.mark.parametrize(
    ("ready", "level", "words"),
    [(1, OK, "jobset:v0.11.1 is ready"), (0, FAILED, "jobset:v0.11.1 is not ready")],
)
def test_controller(ready: int, level: Level, words: str) -> None:
    containers = [{"image": "registry.k8s.io/jobset/jobset:v0.11.1"}]
    found = {"spec": {"template": {"spec": {"containers": containers}}}, "status": {"readyReplicas": ready}}
    said(check_controller(found), level, words)


def test_controller_that_is_not_seen() -> None:
    said(check_controller(None), UNKNOWN, "another name")
    said(check_controller(NOT_ALLOWED), UNKNOWN, "jane may not")


def test_dry_run() -> None:
    before = Result(check="namespace", level=FAILED, message="none", fix="make it")
    said(check_dry_run("", [before]), OK, "would accept")
    said(check_dry_run("spec: wrong", []), FAILED, "spec: wrong")
    said(check_dry_run("spec: wrong", [before]), UNKNOWN, "as was to be expected: spec: wrong")
    said(check_dry_run(NOT_ALLOWED, []), UNKNOWN, "jane may not")


# Bucket


@pytest.mark.parametrize(
    ("location", "pair", "regions", "level", "words"),
    [
        ("US-EAST5", (), {"us-east5"}, OK, "US-EAST5, as the nodes in us-east5"),
        ("us-east5", (), {"us-east5"}, OK, "us-east5"),
        ("US-CENTRAL1", (), {"us-east5"}, WARNING, "use a bucket in us-east5"),
        ("EUROPE-WEST4", (), {"europe-west4", "us-east5"}, WARNING, "the nodes are in us-east5"),
        ("EUROPE-WEST4", (), {"europe-west4"}, OK, "europe-west4"),
        ("EUROPE-WEST4", (), {"europe-west41"}, WARNING, "europe-west41"),
        ("US", (), {"us-east5", "us-west4"}, OK, "several regions"),
        ("US", (), {"northamerica-northeast1"}, WARNING, "northamerica"),
        ("EU", (), {"europe-west4"}, OK, "several regions"),
        ("EU", (), {"europe-west2"}, WARNING, "europe-west2"),
        ("ASIA", (), {"asia-northeast1"}, OK, "several regions"),
        ("ASIA", (), {"australia-southeast1"}, WARNING, "australia"),
        ("NAM4", (), {"us-central1"}, OK, "several regions"),
        ("NAM4", (), {"us-west1"}, WARNING, "us-west1"),
        ("US", ("US-EAST1", "US-WEST1"), {"us-west1"}, OK, "us-west1"),
        ("US", ("US-EAST1", "US-WEST1"), {"us-central1"}, WARNING, "us-central1"),
        ("US-EAST5", (), set(), UNKNOWN, "region is not known"),
        (NOT_ALLOWED, (), {"us-east5"}, UNKNOWN, "jane may not"),
    ],
)
def test_location(
    location: str | Unseen, pair: Sequence[str], regions: set[str], level: Level, words: str
) -> None:
    bucket = Bucket(name="b", location=location, regions=pair)
    said(check_location(bucket, frozenset(regions)), level, words)


def test_bucket() -> None:
    there = Bucket(name="b", location="US")
    said(check_bucket(there, None), OK, "gs://b can be read")
    said(
        check_bucket(NOT_ALLOWED, ("bucket b does not exist", "make it")), FAILED, "does not exist / make it"
    )
    said(check_bucket(NOT_ALLOWED, None), UNKNOWN, "jane may not")


@pytest.mark.parametrize(
    ("labels", "context", "regions"),
    [
        ([{"topology.kubernetes.io/region": "us-east5"}], "gke_p_us-west1_c", {"us-east5"}),
        ([{"topology.kubernetes.io/zone": "us-east5-b"}], "kind", {"us-east5"}),
        ([{}], "gke_p_us-west1-c_c", {"us-west1"}),
        ([], "gke_p_us-west1_c", {"us-west1"}),
        ([], "kind", set()),
    ],
)
def test_regions(labels: Sequence[Mapping[str, str]], context: str, regions: set[str]) -> None:
    assert regions_of([{"metadata": {"labels": each}} for each in labels], context) == regions


def test_region_of_a_zone() -> None:
    assert (region_of("us-east5-b"), region_of("us-east5"), region_of("")) == ("us-east5", "us-east5", "")


# Shared parts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64.0),
        (64, 64.0),
        ("100k", 100_000.0),
        ("1Ki", 1024.0),
        ("1.5Gi", 1.5 * 2**30),
        ("500m", 0.5),
        ("1e3", 1000.0),
        ("1E", 1e18),
        ("12E2", 1200.0),
        ("", None),
        ("four", None),
        (None, None),
        (True, None),
    ],
)
def test_quantity(text: object, number: float | None) -> None:
    assert quantity(text) == (None if number is None else pytest.approx(number))


def test_pod_sets_of_a_pathways_run() -> None:
    head, worker = pod_sets(golden("pathways"))
    assert (head.job, head.jobs, head.pods) == ("head", 1, 1)
    assert (worker.job, worker.jobs) == ("worker", 2)
    assert head.requests.get("google.com/tpu") is None
    assert worker.total("google.com/tpu") == worker.pods * worker.requests["google.com/tpu"]


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        ({"key": "k", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Equal", "value": "v"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerates(toleration: Mapping[str, str], expected: bool) -> None:
    taint = {"key": "k", "value": "v", "effect": "NoSchedule"}
    assert tolerates([toleration], taint) is expected
    assert not tolerates([], taint)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        ({"matchLabels": {"a": "b"}}, True),
        ({"matchLabels": {"a": "c"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, False),
        ({"matchExpressions": [{"key": "x", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}, True),
        ({"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_selects(selector: Mapping[str, Any], expected: bool) -> None:
    assert selects(selector, {"metadata": {"labels": {"a": "b"}}}) is expected

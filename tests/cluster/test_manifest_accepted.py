"""Golden JobSets are accepted by the real API server, JobSet's and Kueue's webhooks; broken ones are not.

Every row of tests/unit/manifest_rows.py says what becomes of a broken JobSet that is sent all the same;
here it does. Dry runs, but for the last tests, which show what "never runs" looks like.

    pytest tests/cluster/test_manifest_accepted.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from launcher.gke.manifest import manifest_bytes
from launcher.gke.validate import problems
from tests.cluster.api import Api, ApiError, Json
from tests.cluster.cluster import JOBSETS, Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.waiting import wait_until
from tests.golden.update import MANIFESTS, OLD_JOBSET
from tests.unit.manifest_rows import ROWS
from tests.unit.manifest_support import (
    ODD_TEXTS,
    Broken,
    Change,
    Fate,
    Object,
    broken,
    chips,
    container,
    golden,
    pod,
)

GOLDENS = [*MANIFESTS, OLD_JOBSET]
DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
BATCH = "/apis/batch/v1"
NAMESPACES = ("default", "research")


def rows(*fates: Fate) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in ROWS if row.fate in fates]


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[Api]:
    make_namespaces(plane.api)
    yield plane.api


@pytest.fixture(scope="module")
def kueue_api(kueue_plane: ControlPlane) -> Iterator[Api]:
    make_namespaces(kueue_plane.api)
    yield kueue_plane.api


def make_namespaces(api: Api) -> None:
    for name in NAMESPACES:
        api.apply(
            f"/api/v1/namespaces/{name}",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        )


def apply(api: Api, jobset: Object, **query: str) -> Json:
    """As the launcher does it."""
    metadata = jobset["metadata"]
    return api.request(
        "PATCH",
        f"{JOBSETS}/namespaces/{metadata['namespace']}/jobsets/{metadata['name']}",
        manifest_bytes(jobset),
        query={"fieldManager": "muster", "force": "true", **query},
        content_type="application/apply-patch+yaml",
    )


def create_jobs(api: Api, jobset: Object) -> None:
    """The Jobs that JobSet would make, in a dry run."""
    for replicated in jobset["spec"]["replicatedJobs"]:
        spec = copy.deepcopy(replicated["template"]["spec"])
        spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**replicated["template"]["metadata"], "name": f"child-{replicated['name']}"},
            "spec": spec,
        }
        api.request("POST", f"{BATCH}/namespaces/default/jobs", body, query=DRY_RUN)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_accepted(api: Api, name: str) -> None:
    jobset = golden(name)
    answer = apply(api, jobset, **DRY_RUN)
    create_jobs(api, jobset)
    assert_kept(answer["spec"], jobset["spec"])


def assert_kept(found: Any, sent: Any) -> None:
    """All that was sent is there as it was sent; the server adds its defaults."""
    if isinstance(sent, dict):
        for key, value in sent.items():
            assert_kept(found[key], value)
    elif isinstance(sent, list):
        assert len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_kept(one, other)
    else:
        assert found == sent


def test_odd_texts_are_carried_exactly(api: Api) -> None:
    """The API server reads YAML with Go's reader, which takes bare words for more than Python's does."""
    jobset = golden("cpu")
    sent = [{"name": f"V{number}", "value": text} for number, text in enumerate(ODD_TEXTS)]
    container(jobset)["env"] = sent
    jobset["metadata"]["annotations"] = {f"a{number}": text for number, text in enumerate(ODD_TEXTS)}
    answer = apply(api, jobset, **DRY_RUN)
    assert container(answer)["env"] == sent
    assert answer["metadata"]["annotations"] == jobset["metadata"]["annotations"]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_accepted_by_kueue(kueue_api: Api, name: str) -> None:
    apply(kueue_api, golden(name), **DRY_RUN)


@pytest.mark.parametrize("row", rows(Fate.REFUSED))
def test_refused(api: Api, row: Broken) -> None:
    with pytest.raises(ApiError) as refusal:
        apply(api, broken(row), **DRY_RUN)
    assert refusal.value.status in (400, 403, 404, 413, 422, 500), refusal.value


@pytest.mark.parametrize("row", rows(Fate.CHILD))
def test_jobs_refused(api: Api, row: Broken) -> None:
    jobset = broken(row)
    apply(api, jobset, **DRY_RUN)
    with pytest.raises(ApiError) as refusal:
        create_jobs(api, jobset)
    assert refusal.value.status in (400, 422), refusal.value


@pytest.mark.parametrize("row", rows(Fate.KUEUE))
def test_refused_by_kueue(kueue_api: Api, row: Broken) -> None:
    with pytest.raises(ApiError, match=r"topology|slice") as refusal:
        apply(kueue_api, broken(row), **DRY_RUN)
    assert refusal.value.status == 403, refusal.value


@pytest.mark.parametrize("row", rows(Fate.LATE, Fate.KUEUE))
def test_nobody_else_finds_it(api: Api, row: Broken) -> None:
    jobset = broken(row)
    apply(api, jobset, **DRY_RUN)
    create_jobs(api, jobset)


def named(cluster: Cluster, name: str, change: Change = lambda _jobset: None) -> Object:
    """The golden JobSet of one host under another name, broken."""
    jobset = golden("one-host")
    jobset["metadata"].update(name=name, namespace=cluster.namespace)
    jobset["spec"]["network"]["subdomain"] = f"{name}-hosts"
    change(jobset)
    return jobset


def test_refused_jobs_leave_a_jobset_that_never_runs(cluster: Cluster) -> None:
    apply(cluster.api, named(cluster, "fine"))
    apply(cluster.api, named(cluster, "never", lambda js: pod(js).pop("restartPolicy")))
    wait_until(lambda: cluster.pods_of("fine"), 30)
    wait_until(lambda: warnings(cluster, "never"), 30)
    jobs = cluster.api.get(cluster.path("jobs"))["items"]
    assert [each["metadata"]["name"] for each in jobs] == ["fine-slice-0"]
    assert cluster.jobset_condition("never") == ""


def warnings(cluster: Cluster, run: str) -> list[Json]:
    found: list[Json] = cluster.api.get(cluster.path("events"))["items"]
    return [each for each in found if each["type"] == "Warning" and each["involvedObject"]["name"] == run]


UNSCHEDULABLE: Mapping[str, Change] = {
    "untolerated": lambda js: pod(js)["tolerations"].pop(0),
    "unknown": lambda js: select(js, "gke-tpu-accelerator", "tpu-v5e-slice"),
    "elsewhere": lambda js: select(js, "gke-tpu-topology", "4x4"),
    "too-large": lambda js: chips(js, "16", "16"),
}


def select(jobset: Object, label: str, value: str) -> None:
    pod(jobset)["nodeSelector"][f"cloud.google.com/{label}"] = value


def test_what_does_not_fit_its_machine_stays_pending(cluster: Cluster) -> None:
    cluster.kubelet.add_tpu_nodes(
        "pool", accelerator="tpu-v5-lite-podslice", topology="2x4", chips=8, count=5
    )
    apply(cluster.api, named(cluster, "fits"))
    for name, change in UNSCHEDULABLE.items():
        jobset = named(cluster, name, change)
        assert problems(jobset)
        apply(cluster.api, jobset)
    wait_until(lambda: scheduled(cluster, "fits") == "True", 30)
    wait_until(lambda: {scheduled(cluster, name) for name in UNSCHEDULABLE} == {"False"}, 30)


def scheduled(cluster: Cluster, run: str) -> str:
    """Status of PodScheduled of the run's pod; empty before the scheduler saw it."""
    conditions = [each for one in cluster.pods_of(run) for each in one["status"].get("conditions", [])]
    return next((each["status"] for each in conditions if each["type"] == "PodScheduled"), "")

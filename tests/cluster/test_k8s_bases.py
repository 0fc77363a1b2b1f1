"""What is below k8s/, against a real API server with the JobSet and Kueue controllers and their webhooks.

Every object is taken, roles allow what the launcher does and no more, and the queues admit the launcher's
own manifests.

    pytest tests/cluster/test_k8s_bases.py
"""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.gke.doctor import LAUNCHING, LOOKING
from launcher.gke.manifest import manifest
from launcher.plan import make_plan
from recipes.load import nest, recipe_from_dict
from tests.cluster.api import Json
from tests.cluster.build import PROGRAMS
from tests.cluster.conftest import require
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import node_body, tpu_node
from tests.cluster.waiting import wait_until
from tests.unit.k8s_support import (
    EXAMPLE,
    K8S,
    KUBECTL,
    TOPOLOGY_AWARE,
    Object,
    folders,
    label,
    of_kind,
    render,
    shown,
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on the PATH")
NAMESPACE = "ml-research"
GROUP = "ml-research@example.com"
TRAINER = f"system:serviceaccount:{NAMESPACE}:muster-trainer"
SUPERVISOR = f"system:serviceaccount:{NAMESPACE}:muster-supervisor"
WORKLOADS = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
ADMITTED_S = 30.0


def kubectl(plane: ControlPlane, *arguments: str, objects: list[Object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KUBECTL or "kubectl", *arguments, "-f", "-"],
        input=yaml.safe_dump_all(objects),
        env={**os.environ, **plane.env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def dry_run(plane: ControlPlane, objects: list[Object]) -> subprocess.CompletedProcess[str]:
    """As docs/gke.md says to: the server checks everything and keeps nothing."""
    return kubectl(plane, "apply", "--server-side", "--dry-run=server", "--validate=strict", objects=objects)


def checkpoint_configurations() -> Json:
    """The CRD that a GKE add-on brings, as far as its Go type says: what fields there are, and their types.

    github.com/GoogleCloudPlatform/high-scale-checkpointing-controller apis/checkpointing.gke.io/v1/types.go
    """
    text = {"type": "string"}
    toleration = {"type": "object", "properties": dict.fromkeys(("key", "operator", "value", "effect"), text)}
    spec = {
        "cloudStorageBucketName": text,
        "csiEphemeralLimit": text,
        "inMemoryVolumeSize": text,
        "enableExternalJaxProcessIds": {"type": "boolean"},
        "nodeSelector": {"type": "object", "additionalProperties": text},
        "tolerations": {"type": "array", "items": toleration},
        "gcsFuseMountOptions": {"type": "array", "items": text},
    }
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": spec}}}
    group, plural = "checkpointing.gke.io", "checkpointconfigurations"
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": "CheckpointConfiguration", "plural": plural},
            "scope": "Cluster",
            "versions": [version],
        },
    }


def apply(plane: ControlPlane, folder: Path) -> None:
    """The namespace first, as one does by hand before a dry run."""
    for objects in (of_kind(render(folder), "Namespace"), render(folder)):
        done = kubectl(plane, "apply", "--server-side", "--validate=strict", objects=objects)
        assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.fixture(scope="module")
def installed(kueue_plane: ControlPlane) -> Iterator[ControlPlane]:
    """A cluster with the example in it. What it leaves is named like nothing that other tests use."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    kueue_plane.api.create(crds, checkpoint_configurations())
    kueue_plane.api.create("/api/v1/namespaces", {"metadata": {"name": "muster"}})
    apply(kueue_plane, EXAMPLE)
    yield kueue_plane
    # Or their pods would take the nodes of others.
    kueue_plane.api.delete(JOBSETS)
    wait_until(lambda: not kueue_plane.api.get(PODS)["items"], ADMITTED_S, "no pods left")


# Objects


@pytest.mark.parametrize("folder", folders(), ids=shown)
def test_the_api_server_takes_every_object(installed: ControlPlane, folder: Path) -> None:
    objects = render(folder)
    done = dry_run(installed, objects)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning, of an admission plugin perhaps"
    assert len(done.stdout.splitlines()) == len(objects)


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        ("ClusterQueue", {"resourceGroup": []}, "resourceGroup"),
        ("ResourceFlavor", {"nodeLabels": {"not a label": "x"}}, "not a label"),
        ("LocalQueue", {"clusterQueue": "Not A Name"}, "Not A Name"),
        ("Deployment", {"replica": 1}, "replica"),
        ("CheckpointConfiguration", {"inMemoryVolumeSise": "1Gi"}, "inMemoryVolumeSise"),
    ],
)
def test_it_would_refuse_a_mistake(
    installed: ControlPlane, kind: str, wrong: Mapping[str, Any], said: str
) -> None:
    """So that the test before this one can fail."""
    found = copy.deepcopy(of_kind(render(EXAMPLE) + render(K8S / "base/multi-tier-checkpointing"), kind)[0])
    found.setdefault("spec", {}).update(wrong)
    done = dry_run(installed, [found])
    assert done.returncode != 0, label(found)
    assert said in done.stderr


def test_the_supervisor_may_run_where_only_restricted_pods_may(installed: ControlPlane) -> None:
    """Pod Security admission, of the pod that its Deployment would make."""
    installed.api.create(
        "/api/v1/namespaces",
        {"metadata": {"name": "strict", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
    )
    accounts = "/api/v1/namespaces/strict/serviceaccounts"
    installed.api.create(accounts, {"metadata": {"name": "muster-supervisor"}})
    template = of_kind(render(EXAMPLE), "Deployment")[0]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
    pod["metadata"] = {"name": "supervisor", "namespace": "strict"}
    done = dry_run(installed, [pod])
    assert done.returncode == 0, done.stderr


# Rights

A_JOBSET = ("jobset.x-k8s.io", "jobsets")
LAUNCHER_MAY = [
    *((verb, *A_JOBSET) for verb in ("get", "list", "watch", "create", "patch", "delete")),
    *((verb, "", "pods") for verb in ("get", "list", "watch")),
    ("get", "", "pods/log"),
    *((verb, "", "events") for verb in ("get", "list")),
    *((verb, "batch", "jobs") for verb in ("get", "list")),
    *(("get", "", what) for what in ("namespaces", "serviceaccounts", "resourcequotas")),
    *((verb, "kueue.x-k8s.io", what) for verb in ("get", "list") for what in ("workloads", "localqueues")),
]
"""(verb, group, resource) in the namespace."""
NOBODY_MAY = [
    *((verb, "", "secrets") for verb in ("get", "list", "create")),
    *(("create", "", what) for what in ("pods", "pods/exec", "pods/attach", "pods/portforward")),
    ("create", "", "serviceaccounts/token"),
    ("impersonate", "", "serviceaccounts"),
    ("delete", "", "pods"),
    ("deletecollection", *A_JOBSET),
    ("update", "jobset.x-k8s.io", "jobsets/status"),
    ("create", "batch", "jobs"),
    ("patch", "kueue.x-k8s.io", "workloads"),
    ("create", "rbac.authorization.k8s.io", "rolebindings"),
    ("escalate", "rbac.authorization.k8s.io", "roles"),
    ("list", "", "configmaps"),
]
DOCTOR_MAY = [
    *((verb, "", "nodes") for verb in ("get", "list")),
    *(
        (verb, "kueue.x-k8s.io", what)
        for verb in ("get", "list")
        for what in ("clusterqueues", "resourceflavors", "workloadpriorityclasses", "topologies")
    ),
]
"""Of the whole cluster."""
NOBODY_MAY_IN_THE_CLUSTER = [
    ("patch", "", "nodes"),
    ("get", "", "nodes/proxy"),
    ("create", "", "namespaces"),
    ("patch", "kueue.x-k8s.io", "clusterqueues"),
    ("get", "apps", "deployments"),
    ("list", "", "pods"),
    ("list", "", "namespaces"),
]


def may(
    plane: ControlPlane,
    user: str,
    asked: tuple[str, str, str],
    *,
    groups: tuple[str, ...] = (),
    namespace: str = "",
    name: str = "",
) -> bool:
    """What the API server's own authorizer says."""
    verb, group, what = asked
    resource, _, subresource = what.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    review = plane.api.create(
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {"spec": {"user": user, "groups": list(groups), "resourceAttributes": attributes}},
    )
    allowed: bool = review["status"]["allowed"]
    return allowed


def test_who_launches_may_do_that_and_no_more(installed: ControlPlane) -> None:
    person, groups = "someone@example.com", (GROUP, "system:authenticated")
    for asked in LAUNCHER_MAY:
        assert may(installed, person, asked, groups=groups, namespace=NAMESPACE), asked
        assert not may(installed, person, asked, groups=groups, namespace="default"), asked
        assert not may(installed, person, asked, groups=("system:authenticated",), namespace=NAMESPACE), asked
    for asked in NOBODY_MAY:
        assert not may(installed, person, asked, groups=groups, namespace=NAMESPACE), asked


def test_who_launches_may_what_doctor_asks_for(installed: ControlPlane) -> None:
    for needed in (*LAUNCHING, *LOOKING):
        what = f"{needed.resource.plural}/{needed.subresource}".rstrip("/")
        asked = (needed.verb, needed.resource.group, what)
        assert may(installed, "someone@example.com", asked, groups=(GROUP,), namespace=NAMESPACE), asked


def test_who_launches_may_look_at_the_cluster(installed: ControlPlane) -> None:
    person, groups = "someone@example.com", (GROUP, "system:authenticated")
    for asked in DOCTOR_MAY:
        assert may(installed, person, asked, groups=groups), asked
        assert not may(installed, person, asked, groups=("system:authenticated",)), asked
    for asked in NOBODY_MAY_IN_THE_CLUSTER:
        assert not may(installed, person, asked, groups=groups), asked
    get, where = ("get", "apps", "deployments"), "jobset-system"
    assert may(installed, person, get, groups=groups, namespace=where, name="jobset-controller-manager")
    assert not may(installed, person, get, groups=groups, namespace=where, name="another")


def test_the_pods_of_a_run_may_nothing(installed: ControlPlane) -> None:
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated")
    for asked in [*LAUNCHER_MAY, *NOBODY_MAY]:
        assert not may(installed, TRAINER, asked, groups=groups, namespace=NAMESPACE), asked
    for asked in [*DOCTOR_MAY, *NOBODY_MAY_IN_THE_CLUSTER]:
        assert not may(installed, TRAINER, asked, groups=groups), asked


def test_the_supervisor_may_what_people_may(installed: ControlPlane) -> None:
    for asked in LAUNCHER_MAY:
        assert may(installed, SUPERVISOR, asked, namespace=NAMESPACE), asked
        assert not may(installed, SUPERVISOR, asked, namespace="default"), asked
    for asked in NOBODY_MAY:
        assert not may(installed, SUPERVISOR, asked, namespace=NAMESPACE), asked


# Queues


def jobset(name: str, **changes: Any) -> Json:
    """A run of the launcher's own making, in the example's queue."""
    values: dict[str, Any] = {
        "name": name,
        "run.root": "gs://some-bucket/runs",
        "hardware.generation": "v6e",
        "hardware.topology": "4x4",
        "multislice.num_slices": 2,
        "model": {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "num_heads": 4},
        "model.num_kv_heads": 2,
        "model.head_dim": 16,
        "data.source": "synthetic",
        "optimizer.learning_rate": 3e-4,
        "train": {"num_steps": 10, "global_batch_size": 512, "sequence_length": 64},
        "target": {
            "kind": "gke",
            "namespace": NAMESPACE,
            "queue": "tpu",
            "service_account": "muster-trainer",
        },
        "target.image": "example.com/muster@sha256:" + 64 * "1",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    flat = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
    recipe = recipe_from_dict(nest(flat))
    return manifest(recipe, make_plan(recipe), bundle="sha256:" + 64 * "2")


def workload(plane: ControlPlane, name: str) -> Json | None:
    """Kueue's object for a JobSet."""
    found = [
        item
        for item in plane.api.get(WORKLOADS)["items"]
        if name in [owner["name"] for owner in item["metadata"]["ownerReferences"]]
    ]
    return found[0] if found else None


def condition(found: Json | None, kind: str) -> Json:
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def flavors(found: Json) -> set[str]:
    assignments = found["status"]["admission"]["podSetAssignments"]
    return {flavor for each in assignments for flavor in each.get("flavors", {}).values()}


def admitted(plane: ControlPlane, body: Json) -> Json:
    """Submits a JobSet and waits until Kueue lets it go."""
    name = body["metadata"]["name"]
    plane.api.create(JOBSETS, body)
    wait_until(
        lambda: condition(workload(plane, name), "Admitted").get("status") == "True",
        ADMITTED_S,
        f"{name} admitted: {condition(workload(plane, name), 'QuotaReserved')}",
    )
    found = workload(plane, name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("on-demand", {}, {"v6e"}),
        ("spot", {"target__capacity": "spot"}, {"v6e-spot"}),
        ("reserved", {"target__capacity": "reserved", "target__reservation": "ours"}, {"v6e"}),
        ("flex", {"target__capacity": "flex_start"}, {"v6e"}),
        ("other-chips", {"hardware__generation": "v5p", "hardware__topology": "2x2x2"}, {"v5p"}),
        ("high", {"target__priority_class": "muster-high"}, {"v6e"}),
    ],
)
def test_a_run_gets_the_flavor_of_its_chips(
    installed: ControlPlane, name: str, changes: Mapping[str, Any], expected: set[str]
) -> None:
    assert flavors(admitted(installed, jobset(name, **changes))) == expected


def test_more_chips_than_the_quota_wait_and_never_become_spot(installed: ControlPlane) -> None:
    body = jobset("too-large", hardware__topology="16x16", multislice__num_slices=3)
    installed.api.create(JOBSETS, body)
    said: str = wait_until(
        lambda: condition(workload(installed, "too-large"), "QuotaReserved").get("message", ""), ADMITTED_S
    )
    assert "v6e" in said
    assert "google.com/tpu" in said
    assert installed.api.get(f"{JOBSETS}/too-large")["spec"]["suspend"] is True


def test_pathways_head_is_admitted_beside_its_workers(installed: ControlPlane) -> None:
    """It asks for processor and memory: a queue that does not cover these would never admit it."""
    images = {
        f"target__pathways_{part}_image": f"example.com/{part}@sha256:" + 64 * "3"
        for part in ("server", "proxy")
    }
    body = jobset("pathways", target__controller="pathways", **images)
    assert flavors(admitted(installed, body)) == {"v6e", "host"}


@pytest.fixture
def topology_aware(tmp_path: Path) -> Iterator[ControlPlane]:
    """A cluster with two node pools of 4 hosts, each a v6e slice of 4x4."""
    require(*PROGRAMS, "kueue")
    with ControlPlane(tmp_path / "control-plane", kueue=True) as found:
        apply(found, TOPOLOGY_AWARE)
        for pool in ("pool-a", "pool-b"):
            node = tpu_node(pool, accelerator="tpu-v6e-slice", topology="4x4", chips=4, labels={})
            for number in range(4):
                found.api.create("/api/v1/nodes", node_body(f"{pool}-{number}", node, port=1))
        yield found


def test_topology_aware_slices_get_a_node_pool_each(topology_aware: ControlPlane) -> None:
    found = admitted(topology_aware, jobset("placed", target__placement="topology"))
    assert flavors(found) == {"v6e"}
    placed = found["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]
    assert placed["levels"] == ["kubernetes.io/hostname"]
    pods = wait_until(lambda: bound(topology_aware), ADMITTED_S)
    pools: dict[str, set[str]] = {}
    for pod in pods:
        slice_id = pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"]
        pools.setdefault(slice_id, set()).add(pod["spec"]["nodeName"][:6])
    assert sorted(pools.values(), key=str) == [{"pool-a"}, {"pool-b"}]
    # What docs/gke.md says of all other runs of the queue.
    topology_aware.api.create(JOBSETS, jobset("exclusive"))
    said: str = wait_until(
        lambda: condition(workload(topology_aware, "exclusive"), "QuotaReserved").get("message", ""),
        ADMITTED_S,
    )
    assert "supports only TopologyAwareScheduling" in said


def bound(plane: ControlPlane) -> list[Json]:
    """The pods, once all 8 have a node."""
    pods: list[Json] = plane.api.get(PODS)["items"]
    placed = [pod for pod in pods if pod["spec"].get("nodeName")]
    return placed if len(placed) == 8 else []

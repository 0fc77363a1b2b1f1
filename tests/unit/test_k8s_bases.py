"""What is below k8s/: it builds, pins what it uses, grants little, and agrees with the launcher.

pytest tests/unit/test_k8s_bases.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.gke.podspec import NODE_POOL, TPU
from recipes.hardware import CPU, generation, generations
from recipes.kubernetes_names import SPOT
from tests.cluster.build import COMPONENTS
from tests.unit.k8s_support import (
    CLUSTER_KINDS,
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

NO_KUBECTL = "there is no kubectl on the PATH: nothing below k8s/ can be rendered"
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason=NO_KUBECTL)
every_folder = pytest.mark.parametrize("folder", folders(), ids=shown)
PINNED = re.compile(r"[a-z0-9./_-]+@sha256:[0-9a-f]{64}")
PLACEHOLDER = "sha256:" + 64 * "0"
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
RBAC_KINDS = ("Role", "ClusterRole")
BINDING_KINDS = ("RoleBinding", "ClusterRoleBinding")


@needs_kubectl
@every_folder
def test_it_builds(folder: Path) -> None:
    assert render(folder)


def test_every_part_is_documented() -> None:
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    parts = [path for root in ("base", "components", "install") for path in (K8S / root).iterdir()]
    assert not [shown(path) for path in parts if f"`{shown(path)}`" not in readme]


# Names and places


@needs_kubectl
@every_folder
def test_every_object_is_where_it_belongs(folder: Path) -> None:
    """kustomize writes a namespace into kinds that have none when a custom resource is below `namespace:`."""
    objects = render(folder)
    expected = "ml-research" if "overlays" in folder.parts else "muster"
    for found in objects:
        namespace = None if found["kind"] in CLUSTER_KINDS else expected
        assert found["metadata"].get("namespace") == namespace, label(found)
        assert DNS_LABEL.fullmatch(found["metadata"]["name"]), label(found)
    assert {found["metadata"]["name"] for found in of_kind(objects, "Namespace")} <= {expected}


@needs_kubectl
def test_the_example_replaces_every_placeholder() -> None:
    rendered = json.dumps(render(EXAMPLE) + render(EXAMPLE / "multi-tier-checkpointing"))
    assert "set-by-overlay" not in rendered
    assert "muster-users" not in rendered
    assert "iam.gke.io/gcp-service-account" in rendered


@needs_kubectl
def test_references_resolve() -> None:
    """Roles, service accounts, queues and topologies that something names are all there."""
    for folder in (EXAMPLE, TOPOLOGY_AWARE):
        objects = render(folder)
        present = {(found["kind"], found["metadata"]["name"]) for found in objects}
        assert not set(references(objects)) - present


def references(objects: list[Object]) -> Iterator[tuple[str, str]]:
    for found in of_kind(objects, *BINDING_KINDS):
        yield found["roleRef"]["kind"], found["roleRef"]["name"]
        for subject in found["subjects"]:
            if subject["kind"] == "ServiceAccount":
                # A binding for the whole cluster is in no namespace itself.
                own = found["metadata"].get("namespace", subject["namespace"])
                assert subject["namespace"] == own, label(found)
                yield "ServiceAccount", subject["name"]
    for found in of_kind(objects, "Deployment"):
        yield "ServiceAccount", found["spec"]["template"]["spec"]["serviceAccountName"]
    for found in of_kind(objects, "LocalQueue"):
        yield "ClusterQueue", found["spec"]["clusterQueue"]
    for found in of_kind(objects, "ResourceFlavor"):
        if "topologyName" in found.get("spec", {}):
            yield "Topology", found["spec"]["topologyName"]
    for group in of_kind(objects, "ClusterQueue")[0]["spec"]["resourceGroups"]:
        yield from (("ResourceFlavor", flavor["name"]) for flavor in group["flavors"])


# Rights


def rules(objects: list[Object]) -> Iterator[tuple[str, str, str]]:
    """(verb, group, resource) of everything granted."""
    for role in of_kind(objects, *RBAC_KINDS):
        for rule in role["rules"]:
            for verb in rule["verbs"]:
                for group in rule.get("apiGroups", [""]):
                    for resource in rule.get("resources", []):
                        yield verb, group, resource


@needs_kubectl
@every_folder
def test_rights_are_named_one_by_one(folder: Path) -> None:
    granted = set(rules(render(folder)))
    assert not [rule for rule in granted if "*" in "".join(rule)]
    dangerous_verbs = {"escalate", "bind", "impersonate", "deletecollection"}
    dangerous_resources = {"secrets", "pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"}
    assert not [rule for rule in granted if rule[0] in dangerous_verbs or rule[2] in dangerous_resources]


@needs_kubectl
def test_only_jobsets_can_be_changed() -> None:
    granted = set(rules(render(EXAMPLE)))
    changing = {rule for rule in granted if rule[0] not in ("get", "list", "watch")}
    assert changing == {(verb, "jobset.x-k8s.io", "jobsets") for verb in ("create", "patch", "delete")}


@needs_kubectl
def test_the_pods_of_a_run_have_no_rights_and_no_token() -> None:
    objects = render(EXAMPLE)
    trainer = next(found for found in of_kind(objects, "ServiceAccount") if "trainer" in label(found))
    assert trainer["automountServiceAccountToken"] is False
    subjects = [each for found in of_kind(objects, *BINDING_KINDS) for each in found["subjects"]]
    assert "muster-trainer" not in {subject["name"] for subject in subjects}


# Pods


@needs_kubectl
@every_folder
def test_images_are_pinned(folder: Path) -> None:
    """And a placeholder runs nowhere."""
    for found in of_kind(render(folder), "Deployment"):
        for container in found["spec"]["template"]["spec"]["containers"]:
            assert PINNED.fullmatch(container["image"]), label(found)
            assert PLACEHOLDER not in container["image"] or found["spec"]["replicas"] == 0, label(found)


@needs_kubectl
@every_folder
def test_pods_are_restricted(folder: Path) -> None:
    """As the restricted Pod Security Standard has it, with a read-only root and bounded resources."""
    for found in of_kind(render(folder), "Deployment"):
        pod = found["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


# Kueue


def quotas(objects: list[Object]) -> dict[str, int]:
    """Flavor -> chips. Beside chips, what Pathways' head asks for is covered, by a flavor of its own."""
    chips, host = of_kind(objects, "ClusterQueue")[0]["spec"]["resourceGroups"]
    assert host["coveredResources"] == ["cpu", "memory"]
    assert [flavor["name"] for flavor in host["flavors"]] == ["host"]
    assert chips["coveredResources"] == [TPU]
    return {flavor["name"]: flavor["resources"][0]["nominalQuota"] for flavor in chips["flavors"]}


@needs_kubectl
def test_flavors_are_the_catalogue() -> None:
    """Each generation on demand and spot, found by the labels and taints that the launcher's pods have."""
    flavors = {
        found["metadata"]["name"]: found.get("spec")
        for found in of_kind(render(K8S / "base/kueue"), "ResourceFlavor")
    }
    names = [name for name in generations() if name != CPU]
    assert flavors.pop("host") is None
    assert set(flavors) == {name + suffix for name in names for suffix in ("", "-spot")}
    for name in names:
        accelerator = {"cloud.google.com/gke-tpu-accelerator": generation(name).gke_accelerator}
        assert flavors[name] == {"nodeLabels": accelerator}
        assert flavors[f"{name}-spot"] == {
            "nodeLabels": accelerator | {SPOT: "true"},
            "nodeTaints": [{"key": SPOT, "value": "true", "effect": "NoSchedule"}],
        }


@needs_kubectl
def test_nothing_is_admitted_before_an_overlay_sets_quotas() -> None:
    base = quotas(render(K8S / "base/kueue"))
    assert set(base.values()) == {0}
    example = quotas(render(EXAMPLE))
    assert set(example) < set(base)
    assert min(example.values()) > 0


@needs_kubectl
def test_the_queue_admits_the_namespace() -> None:
    objects = render(EXAMPLE)
    wanted = of_kind(objects, "ClusterQueue")[0]["spec"]["namespaceSelector"]["matchLabels"]
    assert wanted.items() <= of_kind(objects, "Namespace")[0]["metadata"]["labels"].items()


@needs_kubectl
def test_topology_aware_flavors_are_those_with_chips() -> None:
    objects = render(TOPOLOGY_AWARE)
    levels = of_kind(objects, "Topology")[0]["spec"]["levels"]
    assert [level["nodeLabel"] for level in levels] == [NODE_POOL, "kubernetes.io/hostname"]
    topologies = {
        found["metadata"]["name"]: found.get("spec", {}).get("topologyName")
        for found in of_kind(objects, "ResourceFlavor")
    }
    assert topologies.pop("host") is None
    assert set(topologies.values()) == {"muster-tpu"}


# Multi-tier checkpointing


@needs_kubectl
def test_checkpoint_configuration_has_the_fields_of_its_type() -> None:
    """Its CRD comes with a GKE add-on only; the fields are those of the published Go type."""
    spec = render(EXAMPLE / "multi-tier-checkpointing")[0]["spec"]
    assert set(spec) == {
        "cloudStorageBucketName", "nodeSelector", "tolerations", "inMemoryVolumeSize", "gcsFuseMountOptions",
    }  # fmt: skip
    assert spec["tolerations"] == [{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}]
    assert re.fullmatch(r"\d+(Mi|Gi)", spec["inMemoryVolumeSize"])


# Versions


def installed(component: str) -> Any:
    return yaml.safe_load((K8S / "install" / component / "kustomization.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("component", ["jobset", "kueue"])
def test_what_is_installed_is_what_is_tested(component: str) -> None:
    """The release and the one that tests/cluster builds and runs against are the same."""
    version = next(each.version for each in COMPONENTS if each.name == component)
    repository = f"https://github.com/kubernetes-sigs/{component}"
    assert installed(component)["resources"] == [f"{repository}/releases/download/{version}/manifests.yaml"]

"""Rendering what is below k8s/, for the tests of its text and for those against a real API server."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[2] / "k8s"
EXAMPLE = K8S / "overlays" / "example"
TOPOLOGY_AWARE = K8S / "overlays" / "example-topology-aware"
KUBECTL = shutil.which("kubectl")
CLUSTER_KINDS = {
    "CheckpointConfiguration", "ClusterQueue", "ClusterRole", "ClusterRoleBinding", "Namespace",
    "ResourceFlavor", "Topology", "WorkloadPriorityClass",
}  # fmt: skip
"""Kinds used here whose objects belong to no namespace."""

type Object = dict[str, Any]


def folders() -> list[Path]:
    """Every kustomization that can be built without a network."""
    found = {
        path.parent for root in ("base", "overlays") for path in (K8S / root).rglob("kustomization.yaml")
    }
    return sorted(found)


def shown(folder: Path) -> str:
    return str(folder.relative_to(K8S))


@functools.cache
def _rendered(folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [KUBECTL or "kubectl", "kustomize", str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization; a warning of kustomize's is a failure as much as an error is."""
    done = _rendered(folder)
    assert done.returncode == 0 and not done.stderr, f"{shown(folder)}: {done.stderr}"
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def label(found: Object) -> str:
    """How a message names an object."""
    return f"{found['kind']}/{found['metadata']['name']}"

"""The JobSet and Kueue controllers of a test control plane, with their CRDs and webhooks.

Webhooks are registered by URL: no Service routes on loopback. What upstream's kustomization patches in
beyond names is done here too: JobSet's pod webhooks look at JobSets' pods only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import yaml

from tests.cluster.api import ApiError, Json
from tests.cluster.build import find_manifests
from tests.cluster.waiting import wait_until

if TYPE_CHECKING:
    from tests.cluster.control_plane import ControlPlane

QPS = 1000
"""Requests per second of each controller: the defaults of 20-50 are for clusters with other users."""
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
KUEUE_NAMESPACE = "kueue-system"
KUEUE_HOOKS = ("-kueue-x-k8s-io-", "-batch-v1-job", "-jobset-x-k8s-io-")
"""In the paths of those of Kueue's webhooks whose kinds exist here."""


def start_jobset(plane: ControlPlane) -> None:
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "metrics": {"bindAddress": "0"},
        **_common(plane, "jobset"),
    }
    arguments = (f"--config={_write(plane, 'jobset', config)}", f"--kubeconfig={plane.kubeconfig}")
    plane.spawn("jobset", *arguments, "--metrics-bind-address=0")
    plane.wait_ready("jobset", f"http://127.0.0.1:{plane.ports['jobset-health']}/readyz")
    _apply_webhooks(plane, "jobset")


def start_kueue(plane: ControlPlane) -> None:
    plane.api.create("/api/v1/namespaces", {"metadata": {"name": KUEUE_NAMESPACE}})
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": KUEUE_NAMESPACE,
        # Its metrics want a certificate, its visibility server another.
        "metrics": {"bindAddress": "0"},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        **_common(plane, "kueue"),
    }
    env = {"KUBECONFIG": str(plane.kubeconfig), "KUEUE_METRICS_CERTS": str(plane.folder)}
    plane.spawn("kueue", f"--config={_write(plane, 'kueue', config)}", env=env)
    plane.wait_ready("kueue", f"http://127.0.0.1:{plane.ports['kueue-health']}/readyz")
    _apply_webhooks(plane, "kueue")


def _common(plane: ControlPlane, name: str) -> Json:
    return {
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": QPS, "burst": QPS},
        "webhook": {"host": "127.0.0.1", "port": plane.ports[name], "certDir": str(plane.folder)},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{plane.ports[f'{name}-health']}"},
    }


def _write(plane: ControlPlane, name: str, config: Json) -> Path:
    path = plane.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def apply_crds(plane: ControlPlane, names: Sequence[str]) -> None:
    """Those of some controllers, all at once; returns when their kinds are served.

    Before the controller manager starts: its garbage collector learns of later kinds only every 30 s.
    """

    def apply(path: Path) -> None:
        # As it is: one of them is 822 KB, which takes the Python parser seconds.
        group, _, plural = path.stem.partition("_")
        spec = plane.api.apply(f"{CRDS}/{plural}.{group}", path.read_bytes())["spec"]
        served = [version["name"] for version in spec["versions"] if version["served"]]
        wait_until(lambda: all(plural in _resources(plane, f"/apis/{group}/{v}") for v in served))

    paths = [path for name in names for path in (find_manifests(name) / "crd" / "bases").glob("*.yaml")]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(apply, paths))


def _resources(plane: ControlPlane, group: str) -> set[str]:
    """What is served of a group's version; empty while it does not exist."""
    with contextlib.suppress(ApiError):
        return {resource["name"] for resource in plane.api.get(group)["resources"]}
    return set()


def _apply_webhooks(plane: ControlPlane, name: str) -> None:
    text = (find_manifests(name) / "webhook" / "manifests.yaml").read_text()
    for configuration in yaml.safe_load_all(text):
        kind = configuration["kind"]
        plural = f"{kind[0].lower()}{kind[1:]}s".lower()
        configuration["metadata"]["name"] = f"{name}-{configuration['metadata']['name']}"
        configuration["webhooks"] = [
            _by_url(plane, name, hook) for hook in configuration["webhooks"] if _is_wanted(name, hook)
        ]
        plane.api.apply(f"{ADMISSION}/{plural}/{quote(configuration['metadata']['name'])}", configuration)


def _is_wanted(name: str, hook: Json) -> bool:
    return name != "kueue" or any(part in hook["clientConfig"]["service"]["path"] for part in KUEUE_HOOKS)


def _by_url(plane: ControlPlane, name: str, hook: Json) -> Json:
    url = f"https://127.0.0.1:{plane.ports[name]}{hook['clientConfig']['service']['path']}"
    hook["clientConfig"] = {"url": url, "caBundle": plane.authority_data}
    if name == "jobset" and hook["name"].endswith("pod.kb.io"):
        only = {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
        hook["objectSelector"] = {"matchExpressions": [only]}
    return hook

"""What one test has of a cluster: a namespace, nodes that run pods, and questions about runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from launcher.gke import names
from tests.cluster.api import ApiError, Json
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubelet import Kubelet, pod_path
from tests.cluster.waiting import WAIT_S, wait_until

JOBSETS = f"/apis/{names.GROUP}/{names.VERSION}"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
IMAGE_ENV = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}", "LANG": "C.UTF-8"}
"""What the image would set: this Python as `python`, with this project in it."""
IMAGE = "registry.invalid/muster@sha256:" + "0" * 64
"""The kubelet of the tests pulls nothing: its pods run in this environment."""
_numbers = itertools.count(1)


class Cluster:
    """One namespace of a control plane, with a kubelet of its own."""

    def __init__(self, plane: ControlPlane, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.plane, self.api = plane, plane.api
        self.namespace = f"test-{next(_numbers)}-{uuid.uuid4().hex[:4]}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        wait_until(lambda: self.find("serviceaccounts", "default"))
        image_env = {**IMAGE_ENV, **(env or {})}
        self.kubelet = Kubelet(plane, folder, env=image_env, name=self.namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kubelet.stop()
        with contextlib.suppress(ApiError, OSError):
            # Not waited for: the namespace controller does the rest.
            self.api.delete(f"/api/v1/namespaces/{self.namespace}")
            self._sweep()

    def _sweep(self) -> None:
        """Takes every JobSet away, wherever it is: its pods would run on the nodes of the next test."""
        for jobset in self.api.get(f"{JOBSETS}/jobsets")["items"]:
            place = f"{JOBSETS}/namespaces/{jobset['metadata']['namespace']}/jobsets"
            with contextlib.suppress(ApiError):
                self.api.delete(f"{place}/{jobset['metadata']['name']}", {"propagationPolicy": "Background"})
        for pod in self.api.get("/api/v1/pods", labelSelector=JOBSET_NAME)["items"]:
            with contextlib.suppress(ApiError):
                self.api.delete(pod_path(pod), {"gracePeriodSeconds": 0})

    def path(self, plural: str, name: str = "") -> str:
        """Address of a kind in the namespace, or of one object: core kinds, batch jobs, JobSets."""
        groups = {"jobsets": JOBSETS, "jobs": "/apis/batch/v1", "events": "/api/v1"}
        kind = f"{groups.get(plural, '/api/v1')}/namespaces/{self.namespace}/{plural}"
        return f"{kind}/{name}" if name else kind

    def create(self, plural: str, body: Json) -> Json:
        return self.api.create(self.path(plural), body)

    def find(self, plural: str, name: str) -> Json | None:
        """The object, or None."""
        try:
            return self.api.get(self.path(plural, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def jobset(self, run: str) -> Json | None:
        return self.find("jobsets", run)

    def jobset_condition(self, run: str) -> str:
        """Type of the JobSet's condition that is true: Completed, Failed, Suspended; empty: none is."""
        conditions = (self.jobset(run) or {}).get("status", {}).get("conditions", [])
        return next((c["type"] for c in reversed(conditions) if c["status"] == "True"), "")

    def pods_of(self, run: str) -> list[Json]:
        """All pods of a run's JobSet, by name."""
        found: list[Json] = self.api.get(self.path("pods"), labelSelector=f"{JOBSET_NAME}={run}")["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def phases(self, run: str) -> list[str]:
        return [pod["status"].get("phase", "") for pod in self.pods_of(run)]

    def phase(self, pod: str) -> str:
        """Of one pod; empty when it is gone."""
        return str((self.find("pods", pod) or {}).get("status", {}).get("phase", ""))

    def wait_pod(self, pod: str, phase: str, timeout_s: float = WAIT_S) -> Json:
        """Waits until a pod is in a phase, and gives it."""
        wait_until(lambda: self.phase(pod) == phase, timeout_s, f"{pod} {phase}")
        return self.api.get(self.path("pods", pod))

    def log(self, pod: str, **query: str) -> str:
        """A pod's log through the API server."""
        return self.api.text(f"{self.path('pods', pod)}/log", **query)

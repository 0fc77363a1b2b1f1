"""A kubelet without containers: pods bound to its stand-in nodes run as local processes.

    kubelet = Kubelet(plane, tmp_path / "kubelet", env={"PATH": ..., "STORAGE_EMULATOR_HOST": ...})
    nodes = kubelet.add_tpu_nodes("np0", accelerator="tpu-v5p-slice", topology="2x2x1", chips=4)
    kubelet.preempt(nodes[0])       # Spot reclaim: SIGTERM, 15 s, SIGKILL, pods Failed, another node
    kubelet.kill_node(nodes[0])     # the same without notice
    kubelet.kill_container("pod")   # SIGKILL to PID 1
    kubelet.stop()

As the real one: order of status updates, signals, exit codes, grace, last words, logs through the API server,
init containers, secrets, DisruptionTarget, deletion as the last act, retries while the API server is away.
Not: images, probes, sidecars, restarts in place, cgroups, volumes other than emptyDir.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.api import ApiError, Json
from tests.cluster.kubelet_env import ConfigError, Sandbox
from tests.cluster.kubelet_logs import LogServer, LogSource
from tests.cluster.nodes import Node, cpu_node, node_body, tpu_node
from tests.cluster.pods import PodWorker

if TYPE_CHECKING:
    from tests.cluster.control_plane import ControlPlane

SPOT_NOTICE_S = 15.0
THREADS = 8
"""For many nodes at once."""
PODS = "/api/v1/pods"
BOUND = "spec.nodeName!="


class Kubelet:
    """The nodes of one test, and the processes of the pods bound to them."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        *,
        env: Mapping[str, str],
        name: str = "node",
        teardown_s: float = 0.0,
    ) -> None:
        self.folder, self.env, self.children = folder, dict(env), plane.children
        self.name = name
        """Begins every node's name, which is unique in the cluster."""
        self.teardown_s = teardown_s
        """Between the last status and the removal of a deleted pod: volumes and sandbox, really."""
        self.unpullable: set[str] = set()
        """Images whose pull fails."""
        self.api = plane.user()
        self.nodes: dict[str, Node] = {}
        self.stopping = threading.Event()
        self._workers: dict[str, PodWorker] = {}
        self._numbers = itertools.count()
        certificate, key = plane.authority, plane.folder / "tls.key"
        self._logs = LogServer(self._find_log, certificate=certificate, key=key)
        self._thread = threading.Thread(target=self._watch, name="kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kills every process, takes nodes and their pods away; inert from then on."""
        self.stopping.set()
        workers = self.workers()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.thread.join()
        nodes, pods = (f"/api/v1/nodes/{name}" for name in self.nodes), (pod_path(w.pod) for w in workers)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._discard, (*nodes, *pods)))
        self._logs.close()
        while self._thread.is_alive():
            # Again and again: a watch that begins after this is closed by the next.
            self.api.close()
            self._thread.join(0.1)

    def add_tpu_nodes(
        self,
        pool: str,
        *,
        accelerator: str,
        topology: str,
        chips: int,
        count: int = 1,
        labels: Mapping[str, str] | None = None,
    ) -> list[str]:
        """One slice, as a node pool of ``count`` hosts; gives the nodes' names."""
        shape = tpu_node(pool, accelerator=accelerator, topology=topology, chips=chips, labels=labels or {})
        return self._add_all(shape, count)

    def add_cpu_nodes(
        self, pool: str, *, count: int = 1, labels: Mapping[str, str] | None = None, pods: int = 110
    ) -> list[str]:
        """Nodes without accelerator, each for so many pods."""
        return self._add_all(cpu_node(pool, labels=labels or {}, pods=pods), count)

    def preempt(self, name: str, *, notice_s: float = SPOT_NOTICE_S, replace: bool = True) -> str:
        """Takes a node away with notice; returns when it is gone, with the name of the one in its place."""
        workers = self.workers(name)
        for worker in workers:
            # Signals first: an API server that is away must not delay the notice.
            worker.disrupt(notice_s)
        self.persist(lambda: self.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}))
        for worker in workers:
            worker.thread.join()
        return self._remove_node(name, replace=replace)

    def kill_node(self, name: str, *, replace: bool = True) -> str:
        """Takes a node away at once, as a machine that stops; its pods end as the API server's garbage."""
        workers = self.workers(name)
        for worker in workers:
            worker.abandon()
        for worker in workers:
            worker.thread.join()
        replacement = self._remove_node(name, replace=replace)
        for worker in workers:
            self.persist(worker.collect)
            self.remove(worker.pod)
        return replacement

    def kill_container(self, pod: str, container: str = "") -> None:
        """SIGKILL to PID 1 of a running pod's container (the first one by default)."""
        self.worker(pod).container(container).kill()

    def worker(self, pod: str) -> PodWorker:
        """What runs the pod of that name.

        Raises:
          KeyError: it runs none.
        """
        for worker in self.workers():
            if worker.pod["metadata"]["name"] == pod and not worker.done.is_set():
                return worker
        raise KeyError(pod)

    def workers(self, node: str = "") -> list[PodWorker]:
        """What runs pods, of all nodes or of one."""
        return [
            worker
            for worker in list(self._workers.values())
            if not worker.done.is_set() and node in ("", worker.pod["spec"]["nodeName"])
        ]

    def sandbox(self, pod: Json) -> Sandbox:
        metadata = pod["metadata"]
        folder = self.folder / metadata["namespace"] / f"{metadata['name']}-{metadata['uid'][:8]}"
        for spec in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]):
            (folder / spec["name"]).mkdir(parents=True, exist_ok=True)
        return Sandbox(
            pod=pod,
            folder=folder,
            salt=self.children.mark,
            image_env=self.env,
            read_secret=lambda name: self._read_secret(metadata["namespace"], name),
        )

    def persist(self, call: Callable[[], object]) -> None:
        """Makes one API call count: again while the server is away; an object that is gone is no error."""
        while not self.stopping.is_set():
            try:
                call()
                return
            except ApiError as error:
                if error.status in (404, 409):
                    return
                if error.status != 429 and error.status < 500:
                    raise
            except (OSError, http.client.HTTPException):
                pass
            self.stopping.wait(0.2)

    def remove(self, pod: Json) -> None:
        """The kubelet's last act for a pod that is being deleted."""
        metadata = pod["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        self.persist(lambda: self.api.delete(pod_path(pod), body))

    def _discard(self, path: str) -> None:
        with contextlib.suppress(ApiError, OSError, http.client.HTTPException):
            self.api.delete(path, {"gracePeriodSeconds": 0})

    def _add_all(self, shape: Node, count: int) -> list[str]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda _: self._add(shape), range(count)))

    def _add(self, shape: Node) -> str:
        name = f"{self.name}-{shape.pool}-{next(self._numbers)}"
        self.nodes[name] = shape
        self.persist(lambda: self.api.create("/api/v1/nodes", node_body(name, shape, port=self._logs.port)))
        return name

    def _remove_node(self, name: str, *, replace: bool) -> str:
        shape = self.nodes.pop(name)
        self.persist(lambda: self.api.delete(f"/api/v1/nodes/{name}"))
        return self._add(shape) if replace else ""

    def _read_secret(self, namespace: str, name: str) -> dict[str, bytes]:
        try:
            secret = self.api.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        except ApiError as error:
            raise ConfigError(f'secret "{name}" not found') from error
        return {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}

    def _find_log(self, namespace: str, pod: str, container: str) -> LogSource | None:
        for worker in list(self._workers.values()):
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                return worker.log_source(container)
        return None

    def _watch(self) -> None:
        """List, then follow; whatever goes wrong with the connection leads back to the list."""
        while not self.stopping.is_set():
            try:
                pods = self.api.get(PODS, fieldSelector=BOUND)
                for pod in pods["items"]:
                    self._observe(pod)
                for uid in set(self._workers) - {pod["metadata"]["uid"] for pod in pods["items"]}:
                    self._forget(uid)
                version = pods["metadata"]["resourceVersion"]
                for event in self.api.watch(PODS, fieldSelector=BOUND, resourceVersion=version):
                    if event["type"] == "DELETED":
                        self._forget(event["object"]["metadata"]["uid"])
                    elif event["type"] in ("ADDED", "MODIFIED"):
                        self._observe(event["object"])
                    else:
                        break
            except (ApiError, OSError, http.client.HTTPException, ValueError):
                self.stopping.wait(0.2)

    def _observe(self, pod: Json) -> None:
        """Brings the processes in line with one pod of the API; may be called any number of times."""
        uid, leaving = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
        worker = self._workers.get(uid)
        if self.stopping.is_set() or pod["spec"]["nodeName"] not in self.nodes:
            return
        if worker is None:
            if leaving:
                self.remove(pod)
            elif pod["status"]["phase"] == "Pending":
                self._workers[uid] = PodWorker(self, pod)
        elif leaving:
            worker.delete(pod["metadata"].get("deletionGracePeriodSeconds", 0))

    def _forget(self, uid: str) -> None:
        """The pod is gone from the API: so is everything that it ran."""
        if worker := self._workers.pop(uid, None):
            worker.abandon()


def pod_path(pod: Json) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

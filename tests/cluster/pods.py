"""The life of one pod in the process kubelet: one thread, which alone writes the pod's status."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tests.cluster.api import Json
from tests.cluster.containers import Container, container_status, now
from tests.cluster.kubelet_env import ConfigError, Unsupported
from tests.cluster.kubelet_logs import LogSource

if TYPE_CHECKING:
    from tests.cluster.kubelet import Kubelet

POLL_S = 0.05
RETRY_S = 0.5
"""Between attempts to start what cannot start yet."""
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


class PodWorker:
    """Runs a pod from its binding to its end."""

    def __init__(self, kubelet: Kubelet, pod: Json) -> None:
        self.pod, self.done = pod, threading.Event()
        self._kubelet, self._sandbox = kubelet, kubelet.sandbox(pod)
        metadata = pod["metadata"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._lock = threading.Lock()
        self._containers: dict[str, Container] = {}
        self._waiting: Json | None = None
        self._deadline_s: float | None = None
        self._disrupted = self._deleted = self._abandoned = False
        self.thread = threading.Thread(target=self._run, name=metadata["name"], daemon=True)
        self.thread.start()

    def disrupt(self, notice_s: float) -> None:
        """The node is going away."""
        self._disrupted = True
        self._stop(notice_s)

    def delete(self, grace_s: float) -> None:
        """The pod is being deleted; when it has ended it is removed."""
        with self._lock:
            again, self._deleted = self._deleted, True
            ended = self.done.is_set()
        self._stop(grace_s)
        if ended and not again:
            self._kubelet.remove(self.pod)

    def abandon(self) -> None:
        """Ends the processes without a word to the API."""
        self._abandoned = True
        self.kill()

    def kill(self) -> None:
        self._stop(0)

    def container(self, name: str = "") -> Container:
        """A started container; the first of the pod's own by default."""
        return self._containers[name or self.pod["spec"]["containers"][0]["name"]]

    def log_source(self, container: str) -> LogSource | None:
        found = self._containers.get(container)
        return LogSource(path=found.log, is_ended=lambda: found.exit_code is not None) if found else None

    def collect(self) -> None:
        """What the pod garbage collector does with pods of a node that is gone."""
        message = "PodGC: node no longer exists"
        condition = _condition("DisruptionTarget", True, "DeletionByPodGC", message)
        body = {"metadata": {"uid": self.pod["metadata"]["uid"]}}
        self._kubelet.api.patch(
            f"{self._path}/status",
            body | {"status": {"phase": "Failed", "conditions": [condition]}},
            strategic=True,
        )

    def _run(self) -> None:
        try:
            self._report(self._live())
        except Unsupported as error:
            self._report("Failed", reason="HarnessUnsupported", message=str(error))
        finally:
            self.kill()
            time.sleep(self._kubelet.teardown_s if self._deleted else 0)
            with self._lock:
                self.done.set()
                deleted = self._deleted and not self._abandoned
            if deleted:
                self._kubelet.remove(self.pod)

    def _live(self) -> str:
        """Runs all containers; gives the phase that the pod ends in."""
        spec = self.pod["spec"]
        if spec.get("restartPolicy") != "Never":
            raise Unsupported(f"restartPolicy {spec.get('restartPolicy')}")
        for init in spec.get("initContainers", []):
            if "restartPolicy" in init:
                raise Unsupported("sidecars")
            if not self._start(init):
                return "Failed"
            self._report("Pending")
            self._wait([init])
            if self._containers[init["name"]].exit_code:
                return "Failed"
        started = [container for container in spec["containers"] if self._start(container)]
        if started:
            self._report("Running")
        self._wait(started)
        codes = [self._containers[container["name"]].exit_code for container in started]
        return "Failed" if any(codes) or started != spec["containers"] else "Succeeded"

    def _start(self, spec: Json) -> bool:
        """Starts one container once it can be; False when the pod is to end before."""
        while True:
            problem = self._try_start(spec)
            if problem is None or self._deadline_s is not None:
                return problem is None
            waiting = container_status(spec, {"waiting": problem})
            if waiting != self._waiting:
                self._waiting = waiting
                self._report("Pending")
            self._kubelet.stopping.wait(RETRY_S)

    def _try_start(self, spec: Json) -> Json | None:
        """Starts one container, or says why it cannot be: the ``waiting`` state."""
        image = spec.get("image", "")
        if image in self._kubelet.unpullable:
            return {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
        try:
            container = Container(spec, self._sandbox, self._kubelet.children)
        except ConfigError as error:
            return {"reason": "CreateContainerConfigError", "message": str(error)}
        with self._lock:
            if self._deadline_s is not None:
                return {"reason": "PodInitializing"}
            try:
                container.start()
            except OSError as error:
                raise Unsupported(f"cannot start {spec['name']}: {error}") from error
            self._containers[spec["name"]] = container
            self._waiting = None
        return None

    def _wait(self, specs: list[Json]) -> None:
        """Returns when these containers have ended; kills them when the grace is over."""
        containers = [self._containers[spec["name"]] for spec in specs]
        told = self._disrupted
        while False in [container.poll() for container in containers]:
            if self._disrupted and not told:
                told = True
                self._report("Running")
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                for container in containers:
                    container.kill()
            time.sleep(POLL_S)

    def _stop(self, grace_s: float) -> None:
        """SIGTERM once, to each container's first process; an earlier deadline replaces a later one."""
        deadline_s = time.monotonic() + grace_s
        with self._lock:
            first = self._deadline_s is None
            self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)
            for container in self._containers.values():
                if grace_s <= 0:
                    container.kill()
                elif first:
                    container.terminate()

    def _report(self, phase: str, *, reason: str | None = None, message: str | None = None) -> None:
        if self._abandoned:
            return
        if self._disrupted and phase == "Failed":
            reason, message = "Terminated", SHUTDOWN
        address, ready = self._sandbox.address, phase == "Running"
        conditions = [_condition(kind, ready) for kind in ("Ready", "ContainersReady")]
        if self._disrupted:
            conditions.append(_condition("DisruptionTarget", True, "TerminationByKubelet", SHUTDOWN))
        spec = self.pod["spec"]
        status = {
            "phase": phase,
            "reason": reason,
            "message": message,
            "hostIP": "127.0.0.1",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": self.pod["status"].get("startTime") or now()[:19] + "Z",
            "conditions": conditions,
            "containerStatuses": self._statuses(spec["containers"]),
            "initContainerStatuses": self._statuses(spec.get("initContainers", [])),
        }
        body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": status}
        self._kubelet.persist(lambda: self._kubelet.api.patch(f"{self._path}/status", body, strategic=True))

    def _statuses(self, specs: list[Json]) -> list[Json]:
        found = []
        for spec in specs:
            container = self._containers.get(spec["name"])
            waiting = self._waiting if self._waiting and self._waiting["name"] == spec["name"] else None
            initializing = container_status(spec, {"waiting": {"reason": "PodInitializing"}})
            found.append(container.status() if container else waiting or initializing)
        return found


def _condition(kind: str, value: bool, reason: str = "", message: str = "") -> Json:
    return {
        "type": kind,
        "status": str(value),
        "reason": reason,
        "message": message,
        "lastTransitionTime": now()[:19] + "Z",
    }

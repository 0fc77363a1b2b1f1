"""Thousands of pods that run nothing, for tests of size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.api import Api, Json
from tests.cluster.containers import container_status, now

PAGE = "2000"
THREADS = 8


def list_pods(api: Api, namespace: str, selector: str) -> Iterator[Json]:
    """All of them, page by page."""
    query = {"labelSelector": selector, "limit": PAGE}
    while True:
        page = api.get(f"/api/v1/namespaces/{namespace}/pods", **query)
        yield from page["items"]
        if not (token := page["metadata"].get("continue")):
            return
        query["continue"] = token


def bulk_run(api: Api, namespace: str, selector: str) -> int:
    """Makes all pods that match Running and ready, as a thousand kubelets would; gives their number."""

    def run(pod: Json) -> None:
        started = {"running": {"startedAt": now()[:19] + "Z"}}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now()[:19] + "Z"}
        status = {
            "phase": "Running",
            "conditions": [ready],
            "containerStatuses": [container_status(spec, started) for spec in pod["spec"]["containers"]],
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}/status"
        api.patch(path, {"status": status}, strategic=True)

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(1 for _ in pool.map(run, list_pods(api, namespace, selector)))

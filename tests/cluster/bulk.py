"""Thousands of pods that run nothing, for tests of size.

On two idle cores a pod costs some 2 ms to create like this and 4 ms to make run; one that comes from a JobSet
costs 15 ms, most of it in the API server, the controllers and their webhooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def bulk_create(api: Api, namespace: str, pods: Iterable[Json]) -> int:
    """Creates pods past their controllers; gives their number."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(1 for _ in pool.map(lambda pod: api.create(path, pod), pods))


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

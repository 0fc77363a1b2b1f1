"""What is certain to keep a run from starting, from a few small reads that ``muster doctor`` makes too.

Apart from the doctor because every launch waits for it, imports included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.beside import beside
from launcher.gke.api_errors import ClusterError, Missing, Unreachable
from launcher.gke.client import Cluster
from launcher.gke.doctor_checks import (
    Found,
    Level,
    Result,
    Unseen,
    check_account,
    check_namespace,
    check_secrets,
)
from launcher.gke.doctor_checks_kueue import check_local_queue
from launcher.gke.objects import Resource, mapping
from recipes.schema import Recipe

KUEUE = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Newest first."""
NAMESPACES = Resource(group="", version="v1", plural="namespaces", namespaced=False)
ACCOUNTS = Resource(group="", version="v1", plural="serviceaccounts")
SECRETS = Resource(group="", version="v1", plural="secrets")


def blockers(cluster: Cluster, recipe: Recipe) -> Sequence[Result]:
    """What is certain to keep the run from starting, from a handful of small reads side by side.

    For ``muster launch``: only failures, and nothing that a launcher's Role may not read is needed.
    """
    target = recipe.target
    looks: list[Callable[[], Sequence[Result]]] = [
        lambda: [namespace_check(cluster)[0]],
        lambda: [account_check(cluster, recipe)],
        lambda: secrets_check(cluster, target.secrets),
    ]
    if (queue := target.queue) is not None:
        looks.append(lambda: [check_local_queue(queue, local_queue(cluster, queue), ())])
    begun = [beside(look) for look in looks]
    return [result for found in begun for result in found.result() if result.level is Level.FAILED]


def namespace_check(cluster: Cluster) -> tuple[Result, bool]:
    """And whether to go on: what is in a namespace that does not exist is not worth a line each."""
    found = seen(lambda: cluster.get(NAMESPACES, cluster.namespace))
    account: Found = None
    if isinstance(found, Unseen):
        account = seen(lambda: cluster.get(ACCOUNTS, "default"))
    result = check_namespace(cluster.namespace, found, account)
    return result, result.level is not Level.FAILED


def account_check(cluster: Cluster, recipe: Recipe) -> Result:
    account = recipe.target.service_account
    found = seen(lambda: cluster.get(ACCOUNTS, account or "default"))
    return check_account(account, found, recipe.run.root)


def secrets_check(cluster: Cluster, secrets: Mapping[str, str]) -> Sequence[Result]:
    wanted = {place.partition("/")[0] for place in secrets.values()}
    return check_secrets(secrets, {secret: _secret_keys(cluster, secret) for secret in wanted})


def local_queue(cluster: Cluster, queue: str) -> Found:
    """In whichever version Kueue serves; None when there is none, or no Kueue."""
    for version in KUEUE_VERSIONS:
        resource = kueue_resource("localqueues", version, namespaced=True)
        try:
            found = cluster.list(resource, fields=f"metadata.name={queue}", limit=1).items
            return found[0] if found else None
        except Missing:
            continue
        except ClusterError as error:
            return Unseen(reason=error.message)
    return None


def seen[T](read: Callable[[], T]) -> T | Unseen:
    """What a read gives, or why it gives nothing."""
    try:
        return read()
    except Unreachable:
        raise
    except ClusterError as error:
        return Unseen(reason=error.message)


def _secret_keys(cluster: Cluster, secret: str) -> frozenset[str] | Unseen | None:
    """Names only: the values go no further."""
    found = seen(lambda: cluster.get(SECRETS, secret))
    return frozenset(mapping(found, "data")) if isinstance(found, Mapping) else found


def kueue_resource(plural: str, version: str, *, namespaced: bool = False) -> Resource:
    return Resource(group=KUEUE, version=version, plural=plural, namespaced=namespaced)

"""Recipe against cluster: reads what the checks of ``doctor_checks*.py`` judge. Changes nothing.

    muster doctor RECIPE target=gke target.cluster=CLUSTER run.root=gs://BUCKET/runs

What may not be read becomes ``unknown`` with the reason. Only a cluster that does not answer is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from launcher.gke import names
from launcher.gke.api_errors import ClusterError, Denied, Missing, Unreachable
from launcher.gke.blockers import (
    KUEUE,
    KUEUE_VERSIONS,
    NAMESPACES,
    account_check,
    kueue_resource,
    namespace_check,
    secrets_check,
    seen,
)
from launcher.gke.client import Cluster
from launcher.gke.doctor_checks import (
    Found,
    FoundAll,
    Level,
    Permission,
    PodSet,
    Result,
    Unseen,
    check_clock,
    check_image,
    check_permissions,
    check_quotas,
    check_version,
    needs,
    pod_sets,
)
from launcher.gke.doctor_checks_api import (
    CONTROLLER,
    CONTROLLER_NAMESPACE,
    PATTERNS,
    check_controller,
    check_dry_run,
    check_fields,
    check_jobset,
)
from launcher.gke.doctor_checks_bucket import Bucket, check_bucket, check_location, regions_of
from launcher.gke.doctor_checks_kueue import (
    Flavors,
    check_admits_namespace,
    check_cluster_queue,
    check_kueue,
    check_local_queue,
    check_priority,
    check_quota,
    check_topology,
    flavor_names,
)
from launcher.gke.doctor_checks_nodes import Hosts, check_nodes
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.gke.objects import EVENTS, JOBS, JOBSETS, PODS, Object, Resource, items, name, text
from launcher.gke.podspec import NODE_POOL, node_selector, tolerations
from launcher.plan import Plan
from launcher.storage import StorageError, Unavailable, open_storage
from launcher.storage_gcs import GcsStorage
from recipes.hardware import CPU
from recipes.kubernetes_names import ACCELERATOR, TOPOLOGY
from recipes.schema import Recipe

MAX_CPU_NODES = 500
NODES = Resource(group="", version="v1", plural="nodes", namespaced=False)
QUOTAS = Resource(group="", version="v1", plural="resourcequotas")
DEPLOYMENTS = Resource(group="apps", version="v1", plural="deployments")
LAUNCHING = tuple(
    Permission(verb=verb, resource=JOBSETS) for verb in ("get", "list", "create", "patch", "delete")
)
LOOKING = (
    Permission(verb="list", resource=JOBS),
    Permission(verb="list", resource=PODS),
    Permission(verb="get", resource=PODS, subresource="log"),
    Permission(verb="list", resource=EVENTS),
)
_ANY_BUNDLE = "sha256:" + 64 * "0"
"""As long as a real one: the manifest is only looked at."""


def examine(cluster: Cluster, recipe: Recipe, plan: Plan, *, now: Callable[[], float]) -> Sequence[Result]:
    """All checks, in the order in which one would mend things.

    Args:
      cluster: at ``target.namespace``.
      recipe: with ``target.kind=gke``.
      plan: of this recipe.
      now: Unix time by this machine's clock.

    Raises:
      Unreachable: the cluster does not answer.
      UserError: there are no credentials.
    """
    bundle = _ANY_BUNDLE if recipe.target.ship_code else None
    wanted = manifest(recipe, plan, bundle=bundle)
    first = [check_version(cluster.context, seen(lambda: cluster.read("/version")))]
    parts: Sequence[Callable[[], Sequence[Result]]] = (
        lambda: [check_clock(_skew_s(cluster, now)), *_permissions(cluster)],
        lambda: _jobset(cluster, wanted),
        lambda: _namespace(cluster, recipe, wanted),
        lambda: _nodes_and_bucket(cluster, recipe, plan),
        lambda: _kueue(cluster, recipe, plan, pod_sets(wanted)),
    )
    with ThreadPoolExecutor(len(parts) + 1) as pool:
        refused = pool.submit(_dry_run, cluster, recipe, plan, bundle)
        found = [*first, *(result for part in pool.map(lambda part: part(), parts) for result in part)]
        return [*found, check_dry_run(refused.result(), found)]


def _skew_s(cluster: Cluster, now: Callable[[], float]) -> float | None:
    before_s, server_s = now(), cluster.time_s()
    # The server's clock is read to the second, at some moment of the request.
    return None if server_s is None else (before_s + now()) / 2 - (server_s + 0.5)


def _permissions(cluster: Cluster) -> Sequence[Result]:
    def may(permission: Permission) -> bool | Unseen:
        return seen(lambda: cluster.may(permission.verb, permission.resource, permission.subresource))

    with ThreadPoolExecutor(len(LAUNCHING) + len(LOOKING)) as pool:
        answers = dict(zip((*LAUNCHING, *LOOKING), pool.map(may, (*LAUNCHING, *LOOKING)), strict=True))
    launching = {permission: answers[permission] for permission in LAUNCHING}
    looking = {permission: answers[permission] for permission in LOOKING}
    return [
        check_permissions("may launch", launching, needed_for=""),
        check_permissions(
            "may look", looking, needed_for="status cannot say why a run waits, or logs are not shown"
        ),
    ]


def _jobset(cluster: Cluster, wanted: Object) -> Sequence[Result]:
    group = _group(cluster, names.GROUP)
    results = [check_jobset(group)]
    if results[0].level is Level.FAILED:
        return results
    path = f"/openapi/v3/apis/{names.GROUP}/{names.VERSION}"
    results.append(check_fields(wanted, seen(lambda: cluster.read(path))))
    controllers = cluster.inside(CONTROLLER_NAMESPACE)
    return [*results, check_controller(seen(lambda: controllers.get(DEPLOYMENTS, CONTROLLER)))]


def _namespace(cluster: Cluster, recipe: Recipe, wanted: Object) -> Sequence[Result]:
    target = recipe.target
    images = {"target.image": target.image}
    if target.controller == "pathways":
        images["target.pathways_server_image"] = target.pathways_server_image
        images["target.pathways_proxy_image"] = target.pathways_proxy_image
    result, exists = namespace_check(cluster)
    if not exists:
        return [result, *check_image(images)]
    quotas = seen(lambda: cluster.list(QUOTAS).items)
    return [
        result,
        *check_quotas(quotas, needs(wanted), cluster.namespace),
        account_check(cluster, recipe),
        *secrets_check(cluster, target.secrets),
        *check_image(images),
    ]


def _nodes_and_bucket(cluster: Cluster, recipe: Recipe, plan: Plan) -> Sequence[Result]:
    hardware = plan.hardware
    is_tpu = hardware.generation != CPU
    hosts = Hosts(
        labels=node_selector(recipe.target, plan),
        tolerations=tolerations(recipe),
        chips_per_host=hardware.chips_per_host if is_tpu else 0,
        hosts_per_slice=hardware.hosts_per_slice,
        num_slices=hardware.num_slices,
        machine_type=hardware.machine_type,
    )
    nodes = (
        _tpu_nodes(cluster, hosts) if is_tpu else seen(lambda: cluster.list(NODES, limit=MAX_CPU_NODES).items)
    )
    results = list(check_nodes(nodes, hosts))
    bucket, problem = _bucket(recipe.run.root)
    results.append(check_bucket(bucket, problem))
    if isinstance(bucket, Bucket):
        # A cluster is in one region, whatever its nodes are.
        there = () if isinstance(nodes, Unseen) else nodes
        results.append(check_location(bucket, regions_of(there, cluster.context)))
    return results


def _tpu_nodes(cluster: Cluster, hosts: Hosts) -> FoundAll:
    """Those of the hardware; of others, when there are none, only the labels: a node is some 20 KB."""
    hardware = ",".join(f"{key}={hosts.labels[key]}" for key in (ACCELERATOR, TOPOLOGY))
    found = seen(lambda: cluster.list(NODES, labels=hardware).items)
    return found or seen(lambda: cluster.list(NODES, labels=ACCELERATOR, metadata_only=True).items)


def _bucket(root: str) -> tuple[Bucket | Unseen, tuple[str, str] | None]:
    """The bucket, or what the storage says against it."""
    try:
        storage = open_storage(root)
        if not isinstance(storage, GcsStorage):
            return Unseen(reason=""), (
                f"run.root={root} is a folder of this machine",
                "set run.root=gs://BUCKET/PREFIX",
            )
        storage.modified("")
    except Unavailable as error:
        return Unseen(reason=error.message), None
    except StorageError as error:
        return Unseen(reason=error.message), (error.message, error.hint)
    bucket = root.removeprefix("gs://").partition("/")[0]
    try:
        location, regions = storage.location()
    except StorageError as error:
        return Bucket(name=bucket, location=Unseen(reason=error.message)), None
    return Bucket(name=bucket, location=location, regions=regions), None


def _kueue(cluster: Cluster, recipe: Recipe, plan: Plan, sets: Sequence[PodSet]) -> Sequence[Result]:
    target = recipe.target
    if (wanted := target.queue) is None:
        return ()
    group = _group(cluster, KUEUE)
    results = [check_kueue(group)]
    if not isinstance(group, Mapping):
        return results
    version = _kueue_version(group)
    queues = kueue_resource("localqueues", version, namespaced=True)
    queue = seen(lambda: cluster.get(queues, wanted))
    others = seen(lambda: cluster.list(queues).items) if queue is None else ()
    results.append(check_local_queue(wanted, queue, others))
    if (priority := target.priority_class) is not None:
        classes = kueue_resource("workloadpriorityclasses", version)
        results.append(check_priority(priority, seen(lambda: cluster.get(classes, priority))))
    if isinstance(queue, Mapping):
        level = NODE_POOL if plan.hardware.hosts_per_slice > 1 else ""
        topology = level if target.placement == "topology" else None
        results += _cluster_queue(cluster, text(queue, "spec", "clusterQueue"), version, sets, topology)
    return results


def _cluster_queue(
    cluster: Cluster, queue: str, version: str, sets: Sequence[PodSet], topology: str | None
) -> Sequence[Result]:
    """``topology``: the level that slices are held together by; None without topology-aware placement."""
    resource = kueue_resource("clusterqueues", version)
    found = seen(lambda: cluster.get(resource, queue))
    results = [check_cluster_queue(queue, found)]
    if not isinstance(found, Mapping):
        return results
    namespace = seen(lambda: cluster.get(NAMESPACES, cluster.namespace))
    behind = _behind(cluster, found, version)
    results += [check_admits_namespace(found, namespace), *check_quota(behind, sets)]
    if topology is not None:
        results.append(check_topology(behind, sets, _topologies(cluster, behind, version), topology))
    return results


def _behind(cluster: Cluster, queue: Object, version: str) -> Flavors:
    resource = kueue_resource("resourceflavors", version)
    listed = seen(lambda: cluster.list(resource).items)
    there = {} if isinstance(listed, Unseen) else {name(each): each for each in listed}
    unread = listed if isinstance(listed, Unseen) else None
    return Flavors(queue=queue, flavors={each: there.get(each, unread) for each in flavor_names(queue)})


def _topologies(cluster: Cluster, behind: Flavors, version: str) -> Mapping[str, Found]:
    resource = kueue_resource("topologies", version)
    named = {text(flavor, "spec", "topologyName") for flavor in behind.flavors.values()} - {""}
    return {each: seen(functools.partial(cluster.get, resource, each)) for each in named}


def _dry_run(cluster: Cluster, recipe: Recipe, plan: Plan, bundle: str | None) -> str | Unseen:
    """What the API server and its webhooks refuse; empty when they take the manifest."""
    try:
        if cluster.get(JOBSETS, plan.run_name) is not None:
            return Unseen(
                reason=f"there is a JobSet {plan.run_name} already: launching adopts it or says why not"
            )
        for patterns in (True, False):
            body = manifest_bytes(manifest(recipe, plan, bundle=bundle, message_patterns=patterns))
            try:
                cluster.apply(JOBSETS, plan.run_name, body, dry_run=True)
                return ""
            except ClusterError as error:
                if not patterns or PATTERNS not in error.message:
                    raise
        raise AssertionError("the second try returns or raises")
    except Unreachable:
        raise
    except (Denied, Missing) as error:
        return Unseen(reason=error.message)
    except ClusterError as error:
        return error.message


def _group(cluster: Cluster, group: str) -> Found:
    """What the API server says of an API group; every user may ask."""
    try:
        return cluster.read(f"/apis/{group}")
    except Missing:
        return None
    except ClusterError as error:
        if isinstance(error, Unreachable):
            raise
        return Unseen(reason=error.message)


def _kueue_version(group: Object) -> str:
    served = {text(version, "version") for version in items(group, "versions")}
    return next((version for version in KUEUE_VERSIONS if version in served), KUEUE_VERSIONS[0])

"""Pathways: one JAX process at the head drives the workers of all slices through a proxy.

The flags, ports, variables and instance types are those of the public launchers: google/pathways-job
(internal/controller/pathwaysjob_controller.go), AI-Hypercomputer/pathways-utils (jobset.py) and xpk.
Unlike theirs, no pod takes the node's network or its /tmp by default, and images are given by digest.
"""

from __future__ import annotations

from launcher.gke.env import (
    COORDINATOR_HOST,
    JOBSET,
    Object,
    contract_env,
    expanded,
    identity_env,
    label,
    literal,
    megascale_env,
    user_env,
)
from launcher.gke.jobs import (
    EXCLUSIVE,
    is_exclusive,
    labels,
    pod_failure_policy,
    pod_template,
    replicated_job,
    topology_annotations,
)
from launcher.gke.podspec import (
    NODE_POOL,
    chips,
    placement,
    pod_basics,
    port,
    security_context,
    trainer_container,
    volumes,
)
from launcher.plan import Plan
from recipes.contract import GANG_PORT, Env
from recipes.errors import UserError
from recipes.flags import flag_arguments
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig

HEAD_JOB, WORKER_JOB = "head", "worker"
"""Short: the label that names the coordinator holds a run name of 40 characters and the head's."""
PROXY_PORT, MANAGER_PORT, WORKER_PORT = 29000, 29001, 29005
INSTANCE_TYPES = {"v4": "tpuv4", "v5e": "tpuv5e", "v5p": "tpuv5", "v6e": "tpuv6e", "tpu7x": "tpu7x"}
_ONE_HOST_OF_8 = {"ct5lp-hightpu-8t": "tpuv5e1t", "ct6e-standard-8t": "tpuv6e1t"}
_RESTARTS_PER_HOST = 4
"""Of an elastic slice, by itself (pathways-utils: num_vms * 4)."""
_MANAGER_SIZE = {"cpu": "8", "memory": "32G"}
_PROXY_SIZE = {"cpu": "16", "memory": "100G"}


def jobs(recipe: Recipe, plan: Plan, bundle: str | None, message_patterns: bool) -> list[Object]:
    """The head and the workers of every slice.

    Raises:
      UserError: there is no Pathways for this hardware.
    """
    head = replicated_job(
        HEAD_JOB,
        replicas=1,
        pods=1,
        failure=pod_failure_policy(message_patterns),
        pod=pod_template(labels(recipe, plan), {}, _head_pod(recipe, plan, bundle)),
        labels=labels(recipe, plan),
    )
    is_elastic = missing_slices(recipe) > 0
    worker = replicated_job(
        WORKER_JOB,
        replicas=plan.hardware.num_slices,
        pods=plan.hardware.hosts_per_slice,
        failure=_worker_failure(is_elastic, message_patterns),
        pod=pod_template(labels(recipe, plan), topology_annotations(recipe, plan), _worker_pod(recipe, plan)),
        labels=labels(recipe, plan),
        annotations={EXCLUSIVE: NODE_POOL} if is_exclusive(recipe, plan) else None,
        backoff_limit=plan.hardware.hosts_per_slice * _RESTARTS_PER_HOST if is_elastic else 0,
    )
    return [head, worker]


def success_policy() -> Object:
    """The run is complete when the head is."""
    return {"operator": "All", "targetReplicatedJobs": [HEAD_JOB]}


def missing_slices(recipe: Recipe) -> int:
    """How many slices may be away while training goes on (pathways-job: ElasticSlices)."""
    fewest = recipe.multislice.min_slices
    return 0 if fewest is None else max(0, recipe.multislice.num_slices - fewest)


def instance_type(plan: Plan) -> str:
    """A slice as Pathways names it, for example ``tpuv6e:16x16``."""
    hardware = plan.hardware
    if hardware.generation not in INSTANCE_TYPES:
        raise UserError(
            f"target.controller=pathways: there is no Pathways for hardware.generation={hardware.generation}",
            hint="use target.controller=multi",
        )
    name = _ONE_HOST_OF_8.get(hardware.machine_type, INSTANCE_TYPES[hardware.generation])
    return f"{name}:{hardware.topology}"


def _worker_failure(is_elastic: bool, message_patterns: bool) -> Object | None:
    """An elastic slice starts its own pods anew; otherwise a disruption restarts the whole JobSet.

    Without message patterns a rule would make the JobSet take a disruption for the user's error.
    """
    if not is_elastic and not message_patterns:
        return None
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {"rules": [{"action": "Ignore" if is_elastic else "FailJob", "onPodConditions": disrupted}]}


def _head_pod(recipe: Recipe, plan: Plan, bundle: str | None) -> Object:
    """The trainer beside the resource manager and the proxy, which serve as long as it runs."""
    trainer = trainer_container(recipe.target, _head_env(recipe, plan, bundle), [port("gang", GANG_PORT)], {})
    return {
        **pod_basics(recipe.target),
        "initContainers": [_resource_manager(recipe.target, plan), _proxy(recipe, plan)],
        "containers": [trainer],
        "volumes": volumes(),
    }


def _head_env(recipe: Recipe, plan: Plan, bundle: str | None) -> list[Object]:
    # To the agent it is a run of one host: that there are slices is between JAX and the proxy.
    contract = {**plan.environment, Env.NUM_SLICES: "1", Env.HOSTS_PER_SLICE: "1"}
    return [
        *identity_env(),
        *contract_env(recipe, contract, bundle),
        literal("JAX_PLATFORMS", "proxy"),
        expanded("JAX_BACKEND_TARGET", f"grpc://$({COORDINATOR_HOST}):{PROXY_PORT}"),
        literal("XCLOUD_ENVIRONMENT", "GCP"),
        *user_env(recipe.target),
    ]


def _resource_manager(target: TargetConfig, plan: Plan) -> Object:
    return {
        "name": "pathways-rm",
        "image": target.pathways_server_image or "",
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "args": [
            f"--server_port={MANAGER_PORT}",
            _scratch(plan),
            "--node_type=resource_manager",
            f"--instance_count={plan.hardware.num_slices}",
            f"--instance_type={instance_type(plan)}",
        ],
        "env": [
            label("HOST_ADDRESS", f"{JOBSET}/coordinator"),
            *_job_env(),
            literal("TPU_SKIP_MDS_QUERY", "true"),
        ],
        "ports": [port("manager", MANAGER_PORT), port("manager-peers", MANAGER_PORT + 1)],
        "resources": {"requests": dict(_MANAGER_SIZE), "limits": dict(_MANAGER_SIZE)},
        "securityContext": security_context(target),
    }


def _proxy(recipe: Recipe, plan: Plan) -> Object:
    missing = missing_slices(recipe)
    return {
        "name": "pathways-proxy",
        "image": recipe.target.pathways_proxy_image or "",
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "args": [
            f"--server_port={PROXY_PORT}",
            f"--resource_manager_address=$({COORDINATOR_HOST}):{MANAGER_PORT}",
            _scratch(plan),
            *([f"--num_elastic_slices={missing}"] if missing else []),
            # The proxy compiles, so flags go there (AI-Hypercomputer/maxtext maxtext_xpk_runner.py).
            *flag_arguments(recipe),
        ],
        "env": [label(COORDINATOR_HOST, f"{JOBSET}/coordinator")],
        "ports": [port("proxy", PROXY_PORT)],
        "resources": {"requests": dict(_PROXY_SIZE), "limits": dict(_PROXY_SIZE)},
        "securityContext": security_context(recipe.target),
    }


def _worker_pod(recipe: Recipe, plan: Plan) -> Object:
    container = {
        "name": "pathways-worker",
        "image": recipe.target.pathways_server_image or "",
        "imagePullPolicy": "IfNotPresent",
        "args": [
            f"--server_port={WORKER_PORT}",
            f"--resource_manager_address=$({COORDINATOR_HOST}):{MANAGER_PORT}",
            _scratch(plan),
        ],
        "env": [
            label(COORDINATOR_HOST, f"{JOBSET}/coordinator"),
            *_job_env(),
            literal("XCLOUD_ENVIRONMENT", "GCP"),
            *(megascale_env() if plan.hardware.num_slices > 1 else ()),
        ],
        "ports": [
            port("worker", WORKER_PORT),
            port("worker-peers", WORKER_PORT + 1),
            port("tpu-runtime", 8471),
        ],
        "resources": chips(plan),
        "securityContext": security_context(recipe.target),
        "volumeMounts": [
            {"name": "muster", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        **pod_basics(recipe.target),
        **placement(recipe, plan),
        "containers": [container],
        "volumes": volumes(),
    }


def _job_env() -> list[Object]:
    return [
        label("JOBSET_NAME", f"{JOBSET}/jobset-name"),
        label("REPLICATED_JOB_NAME", f"{JOBSET}/replicatedjob-name"),
    ]


def _scratch(plan: Plan) -> str:
    # Arguments are expanded like values of variables.
    return f"--gcs_scratch_location={plan.run_dir}/pathways".replace("$", "$$")

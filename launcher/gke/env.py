"""Environment of a pod, as Kubernetes writes it.

Kubernetes expands ``$(NAME)`` in values from the variables before it and turns ``$$`` into ``$``
(k8s.io/kubernetes third_party/forked/golang/expansion), so what comes from a recipe is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.plan import Plan
from launcher.rundir import launched_recipe
from recipes.contract import COORDINATOR_PORT, MEGASCALE_PORT, Env, PodEnv
from recipes.hardware import CPU
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig

type Object = dict[str, Any]

JOBSET = "jobset.sigs.k8s.io"
"""Prefix of the labels that JobSet gives to pods."""
COORDINATOR_HOST = "MUSTER_COORDINATOR_HOST"
TERMINATION_LOG = "/dev/termination-log"
VOLUME = "/muster"
"""Where the host's scratch volume is mounted."""


def host_env(recipe: Recipe, plan: Plan, bundle: str | None) -> list[Object]:
    """Environment of the agent of one host; later entries may refer to earlier ones."""
    is_tpu = plan.hardware.generation != CPU
    entries = [*identity_env(), *contract_env(recipe, plan.environment, bundle), *_jax_env(plan)]
    if is_tpu and plan.hardware.num_slices > 1:
        entries += megascale_env()
    return [*entries, *user_env(recipe.target)]


def identity_env() -> Iterator[Object]:
    """Who this pod is, from what Kubernetes and JobSet know of it."""
    yield field(PodEnv.POD_NAME, "metadata.name")
    yield field(PodEnv.POD_UID, "metadata.uid")
    yield field(PodEnv.POD_IP, "status.podIP")
    yield field(PodEnv.NODE_NAME, "spec.nodeName")
    yield label(Env.SLICE_ID, f"{JOBSET}/job-index")
    yield label(Env.HOST_ID, "batch.kubernetes.io/job-completion-index")
    yield label(COORDINATOR_HOST, f"{JOBSET}/coordinator")
    yield label(PodEnv.JOBSET_UID, f"{JOBSET}/jobset-uid")
    yield label(PodEnv.RESTART_ATTEMPT, f"{JOBSET}/restart-attempt")


def contract_env(recipe: Recipe, environment: Mapping[str, str], bundle: str | None) -> Iterator[Object]:
    """The rest of the contract: all but the attempt, which the pods find out when they meet."""
    for name in (Env.RUN_DIR, Env.NUM_SLICES, Env.HOSTS_PER_SLICE, Env.GRACE_PERIOD_S):
        yield literal(name, environment[name])
    yield expanded(Env.COORDINATOR, f"$({COORDINATOR_HOST}):{COORDINATOR_PORT}")
    yield literal(Env.SCRATCH_DIR, f"{VOLUME}/scratch")
    yield literal(PodEnv.RECIPE, launched_recipe(recipe)[0])
    yield literal(PodEnv.TERMINATION_LOG, TERMINATION_LOG)
    if bundle is not None:
        yield literal(PodEnv.BUNDLE, bundle)


def _jax_env(plan: Plan) -> Iterator[Object]:
    # By default JAX's coordinator listens on every address, and a second one on the port starts silently.
    yield expanded("JAX_COORDINATOR_BIND_ADDRESS", f"$({PodEnv.POD_IP.value}):{COORDINATOR_PORT}")
    if plan.hardware.generation == CPU:
        yield literal("JAX_PLATFORMS", "cpu")
        yield literal("JAX_NUM_CPU_DEVICES", str(plan.hardware.devices_per_host))
    else:
        yield literal("JAX_PLATFORMS", "tpu,cpu")


def megascale_env() -> Iterator[Object]:
    """What libtpu and JAX need to find the other slices; on one slice it must not be set."""
    yield label("MEGASCALE_NUM_SLICES", f"{JOBSET}/replicatedjob-replicas")
    yield label("MEGASCALE_SLICE_ID", f"{JOBSET}/job-index")
    yield label("MEGASCALE_COORDINATOR_ADDRESS", f"{JOBSET}/coordinator")
    yield literal("MEGASCALE_PORT", str(MEGASCALE_PORT))


def user_env(target: TargetConfig) -> Iterator[Object]:
    """The recipe's own variables and secrets, after defaults that they may replace."""
    defaults = {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": f"{VOLUME}/cache"}
    own = dict(sorted(target.env.items()))
    for name, value in defaults.items():
        if name not in own and name not in target.secrets:
            yield literal(name, value)
    for name, value in own.items():
        yield literal(name, value)
    for name, place in sorted(target.secrets.items()):
        secret, _, key = place.partition("/")
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def literal(name: str, value: str) -> Object:
    """A variable with exactly this value."""
    return {"name": str(name), "value": value.replace("$", "$$")}


def expanded(name: str, value: str) -> Object:
    """A variable whose ``$(NAME)`` Kubernetes replaces."""
    return {"name": str(name), "value": value}


def field(name: str, path: str) -> Object:
    """A variable from a field of the pod."""
    return {"name": str(name), "valueFrom": {"fieldRef": {"fieldPath": path}}}


def label(name: str, key: str) -> Object:
    """A variable from a label of the pod."""
    return field(name, f"metadata.labels['{key}']")

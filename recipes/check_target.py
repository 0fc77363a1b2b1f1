"""Rules of `check.py` on where a run goes: capacity, cluster, names, labels and environment.

Whatever the kind, a value that is set must be well-formed. What values may be together is asked of the
chosen kind alone, so that `target=local` rehearses a recipe without taking its keys for GKE away. What only
a launch needs (an image, a bucket) is in :func:`launch_problems`: a plan can be read without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from recipes import kubernetes_names as names
from recipes.check_tpu import check_tpu, tpu_launch_problems
from recipes.errors import Problem
from recipes.hardware import CPU
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig

MAX_ENV_BYTES = 64 * 1024
"""Of all names and values together: a JobSet with them is one object of at most 1.5 MiB in etcd."""

_COMPUTED_LABELS = {
    names.ACCELERATOR: "hardware.generation",
    names.TOPOLOGY: "hardware.topology",
    names.SPOT: "target.capacity=spot",
    names.FLEX_START: "target.capacity=flex_start",
    names.RESERVATION: "target.reservation",
}
"""Node labels that the plan selects by, and the keys that it takes them from."""
_RESERVED_DOMAINS = ("kubernetes.io", "k8s.io", "x-k8s.io", "muster.tpu")
_COMPUTED_ENV = re.compile(
    r"(MUSTER|MEGASCALE|KUBERNETES|JOBSET)_.*|TPU_.*|JAX_(COORDINATOR.*|PLATFORMS|NUM_CPU_DEVICES|NUM_PROCESSES"
    r"|PROCESS_ID|LOCAL_DEVICE_IDS|BACKEND_TARGET)|JOB_COMPLETION_INDEX|HOSTNAME|HOST_ADDRESS"
    r"|REPLICATED_JOB_NAME|XCLOUD_ENVIRONMENT"
)
_STARTING_ENV = ("LD_PRELOAD", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP")
"""What decides which program and which modules the agent in a pod is made of."""
_TUNING_ENV = re.compile(r"TPU_(MIN_LOG_LEVEL|STDERR_LOG_LEVEL|LOG_DIR|VMODULE|PREMAPPED_BUFFER_.*)")
"""libtpu's own settings, which say nothing of who a host is."""


def check_target(recipe: Recipe) -> Iterator[Problem]:
    """Problems of ``recipe.target`` that a plan must not have."""
    target = recipe.target
    yield from _check_kind(recipe)
    yield from _check_names(target)
    yield from _check_labels(target)
    yield from _check_env(target)
    yield from _check_secrets(target)
    if target.kind == "gke":
        yield from _check_gke(recipe)
    if target.kind != "local":
        yield from _check_reservation(target)
    yield from _check_controller(recipe)
    yield from check_tpu(recipe)


def launch_problems(recipe: Recipe, *, origins: Mapping[str, str] | None = None) -> list[Problem]:
    """What ``recipe`` lacks to be launched elsewhere, or to have its manifest written."""
    known = origins or {}
    return [replace(problem, origin=known.get(problem.key, "")) for problem in _launch_problems(recipe)]


def _problem(key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(key=f"target.{key}", value=value, reason=reason, fix=fix)


def _launch_problems(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.target
    if target.kind == "local":
        return
    if not recipe.run.root.startswith("gs://"):
        yield Problem(
            key="run.root",
            value=recipe.run.root,
            reason=f"is on this machine, which the hosts of target.kind={target.kind} do not see",
            fix="set run.root=gs://BUCKET/PREFIX",
        )
    if target.kind == "tpu":
        yield from tpu_launch_problems(recipe)
        return
    needed = ["image"]
    if target.controller == "pathways":
        needed += ["pathways_server_image", "pathways_proxy_image"]
    for key in needed:
        if getattr(target, key) is None:
            what = "must be given to launch on GKE" if key == "image" else "must be given for Pathways"
            yield _problem(key, None, what, f"set target.{key}=REPOSITORY@sha256:... (docs/image.md)")


def _check_kind(recipe: Recipe) -> Iterator[Problem]:
    kind, chip = recipe.target.kind, recipe.hardware.generation
    if kind == "local" and chip != CPU:
        fix = "use hardware.generation=cpu with target=local, or a TPU with target=gke or target=tpu"
        yield _problem("kind", kind, f"does not go with hardware.generation={chip}: only cpu is local", fix)


def _check_names(target: TargetConfig) -> Iterator[Problem]:
    label = "lower-case letters, digits and hyphens, at most 63, no hyphen at an end"
    dotted = "lower-case letters, digits, hyphens and dots, a letter or digit at both ends"
    rules: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
        ("namespace", names.is_dns_label, "a namespace", label),
        ("reservation", names.is_dns_label, "the name of a reservation", label),
        ("queue", _is_queue, "the name of a LocalQueue", f"{dotted}, at most 63"),
        ("priority_class", _is_queue, "the name of a WorkloadPriorityClass", f"{dotted}, at most 63"),
    )
    for key, is_valid, what, rule in rules:
        value = getattr(target, key)
        if value is not None and not is_valid(value):
            yield _problem(key, value, f"is not {what}", f"use {rule}")
    account = target.service_account
    # On TPU VMs it is one of Google Cloud's.
    if account is not None and target.kind != "tpu" and not names.is_dns_subdomain(account):
        yield _problem("service_account", account, "is not the name of a service account", f"use {dotted}")
    for key in ("image", "pathways_server_image", "pathways_proxy_image"):
        value = getattr(target, key)
        if value is not None and not names.is_image_by_digest(value):
            fix = "write REPOSITORY@sha256:<64 hex digits>: a tag can change during a run (docs/image.md)"
            yield _problem(key, value, "is not an image by digest", fix)
    cluster = target.cluster
    if cluster is not None and len(cluster) > names.MAX_SUBDOMAIN:
        yield _problem(
            "cluster", cluster, f"is longer than {names.MAX_SUBDOMAIN} characters", "give a shorter one"
        )
    elif cluster is not None and not names.is_cluster(cluster):
        yield _problem(
            "cluster", cluster, "is empty, or has control characters or blanks at an end", "remove them"
        )


def _is_queue(name: str) -> bool:
    # Kueue is told by a label, whose value is shorter than the name could be.
    return names.is_dns_subdomain(name, names.MAX_LABEL)


def _check_labels(target: TargetConfig) -> Iterator[Problem]:
    for key, entries in (("labels", target.labels), ("node_selector", target.node_selector)):
        for name, value in entries.items():
            if not names.is_label_key(name):
                fix = "use NAME or DOMAIN/NAME: at most 63 letters, digits, - _ . and a lower-case DOMAIN"
                yield _problem(f"{key}.{name}", value, "is not the name of a label", fix)
            elif not names.is_label_value(value):
                fix = "use at most 63 letters, digits, - _ . with a letter or digit at both ends"
                yield _problem(f"{key}.{name}", value, "is not the value of a label", fix)
    for name, value in target.labels.items():
        if _is_reserved(name):
            fix = "use a domain of your own, or none"
            yield _problem(f"labels.{name}", value, "is in a domain that others act on", fix)
    for name, value in target.node_selector.items():
        if name in _COMPUTED_LABELS:
            fix = f"remove it, and set {_COMPUTED_LABELS[name]}"
            yield _problem(f"node_selector.{name}", value, "is what the plan selects nodes by", fix)


def _is_reserved(label: str) -> bool:
    domain = label.rpartition("/")[0]
    return any(domain == reserved or domain.endswith(f".{reserved}") for reserved in _RESERVED_DOMAINS)


def _check_env(target: TargetConfig) -> Iterator[Problem]:
    for name, value in target.env.items():
        key = f"env.{name}"
        if fault := _env_name_fault(name):
            is_secret = names.looks_secret(name) or names.holds_password(value)
            yield _problem(key, None if is_secret else value, *fault)
        elif names.looks_secret(name) or names.holds_password(value):
            fix = f"keep it in a Kubernetes Secret, and set target.secrets.{name}=SECRET/KEY"
            what = "looks like a secret" if names.looks_secret(name) else "has a password in an address"
            yield _problem(key, None, f"{what}, which everyone could read in the manifest", fix)
        elif name in target.secrets:
            yield _problem(key, value, f"and target.secrets.{name} are both given", "keep one of them")
        elif "\0" in value:
            yield _problem(key, value, "has a NUL character, which ends a value", "remove it")
        elif not _is_encodable(value):
            yield _problem(key, ascii(value), "is not UTF-8 text", "remove what cannot be encoded")
    texts = [text for entry in target.env.items() for text in entry]
    size_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size_bytes > MAX_ENV_BYTES:
        fix = f"keep it below {MAX_ENV_BYTES} bytes: ship larger things as files"
        yield _problem("env", None, f"takes {size_bytes} bytes", fix)


def _env_name_fault(name: str) -> tuple[str, str] | None:
    """Reason and fix, or None when the user may set an environment variable of this name."""
    if not names.is_env_name(name):
        return "is not the name of an environment variable", "use letters, digits and _, and no digit first"
    if _COMPUTED_ENV.fullmatch(name) and not _TUNING_ENV.fullmatch(name):
        return "is set by Muster, JobSet or Kubernetes for each host", "remove it"
    if name in _STARTING_ENV:
        reason = "is the image's own: with another value the agent in the pod may not start"
        return reason, "remove it, and set it in the image (docs/image.md)"
    return None


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_secrets(target: TargetConfig) -> Iterator[Problem]:
    for name, place in target.secrets.items():
        key = f"secrets.{name}"
        secret, slash, entry = place.partition("/")
        if fault := _env_name_fault(name):
            yield _problem(key, None, *fault)
        elif not (slash and names.is_dns_subdomain(secret) and names.is_secret_key(entry)):
            # Not shown: someone may have put the secret itself here.
            fix = "write SECRET/KEY: the name of a Secret in target.namespace, and a key of it"
            yield _problem(key, None, "does not name a key of a Secret", fix)


def _check_gke(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.target
    if target.queue is None and target.priority_class is not None:
        fix = "set target.queue too, or remove it"
        yield _problem(
            "priority_class", target.priority_class, "is Kueue's, but target.queue is not set", fix
        )
    if target.queue is None and target.placement == "topology":
        fix = "set target.queue too, or use target.placement=exclusive"
        yield _problem("placement", "topology", "is Kueue's, but target.queue is not set", fix)
    if target.host_network and recipe.hardware.generation == CPU:
        fix = "use target.host_network=false"
        yield _problem(
            "host_network", True, "does not go with cpu: pods share a node there, and ports clash", fix
        )


def _check_reservation(target: TargetConfig) -> Iterator[Problem]:
    if target.capacity == "reserved" and target.reservation is None:
        fix = "set it, or use another target.capacity"
        yield _problem("reservation", None, "must be given for target.capacity=reserved", fix)
    if target.capacity != "reserved" and target.reservation is not None:
        fix = "use target.capacity=reserved, or remove it"
        reason = f"is not used by target.capacity={target.capacity}"
        yield _problem("reservation", target.reservation, reason, fix)


def _check_controller(recipe: Recipe) -> Iterator[Problem]:
    controller, fewest = recipe.target.controller, recipe.multislice.min_slices
    if controller == "pathways" and recipe.target.kind != "gke":
        fix = "use target.controller=multi, or target=gke"
        yield _problem("controller", controller, f"does not go with target.kind={recipe.target.kind}", fix)
    elif controller == "pathways" and recipe.hardware.generation == CPU:
        fix = "use target.controller=multi, or a TPU generation"
        yield _problem("controller", controller, "does not go with hardware.generation=cpu", fix)
    if fewest is None:
        return
    if recipe.target.kind == "local":
        fix = "remove it, or use target=gke or target=tpu"
        reason = "is not used by target.kind=local"
        yield Problem(key="multislice.min_slices", value=fewest, reason=reason, fix=fix)
    elif fewest > recipe.multislice.num_slices:
        most = recipe.multislice.num_slices
        reason = f"is above multislice.num_slices={most}"
        yield Problem(key="multislice.min_slices", value=fewest, reason=reason, fix=f"use at most {most}")

"""Rules of `check.py` on TPU VMs: names that go to the Cloud TPU API, fallbacks, times, code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from recipes.deadline import parse_deadline
from recipes.elastic import possible_slices
from recipes.errors import Problem
from recipes.hardware import CPU, slice_shape
from recipes.options import parse_fallback
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig

_ID = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_PROJECT = re.compile(r"(?:[a-z][-a-z0-9.]{0,40}:)?[a-z](?:[-a-z0-9]{4,28}[a-z0-9])")
_ZONE = re.compile(r"[a-z]{2,}(?:-[a-z]+)+[0-9]{1,2}-[a-z]")
_PATH = r"(?:projects/[-a-z0-9.:]{1,63}/(?:global|regions/[-a-z0-9]{1,63}|zones/[-a-z0-9]{1,63})/KIND/)?"
_NETWORK = re.compile(_PATH.replace("KIND", "networks") + _ID.pattern)
_SUBNETWORK = re.compile(_PATH.replace("KIND", "subnetworks") + _ID.pattern)
_DISK = re.compile(_PATH.replace("KIND", "disks") + _ID.pattern)
_RUNTIME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,61}[a-z0-9])?")
_EMAIL = re.compile(r"[-a-z0-9.]{1,64}@[-a-z0-9.]{1,128}\.gserviceaccount\.com")
_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][-a-z0-9_]{0,62}"), re.compile(r"[-a-z0-9_]{0,63}")

_VM_ENV = re.compile(
    r"GCE_METADATA_.*|STORAGE_EMULATOR_HOST|HOME|XDG_.*|UV_.*|PIP_.*|SSL_CERT_.*|.*_proxy|.*_PROXY"
)
_NAMES: tuple[tuple[str, re.Pattern[str], str, str], ...] = (
    ("project", _PROJECT, "the id of a project", "6 to 30 lower-case letters, digits and hyphens"),
    ("zone", _ZONE, "a zone", "for example us-east5-b"),
    ("network", _NETWORK, "a network", "NAME or projects/P/global/networks/NAME"),
    ("subnetwork", _SUBNETWORK, "a subnetwork", "NAME or projects/P/regions/R/subnetworks/NAME"),
    ("runtime_version", _RUNTIME, "a runtime version", "for example v2-alpha-tpuv6e"),
    ("service_account", _EMAIL, "a service account", "NAME@PROJECT.iam.gserviceaccount.com"),
)


def check_tpu(recipe: Recipe) -> Iterator[Problem]:
    """Problems of deadline and slices everywhere, and of TPU VMs where they are the target."""
    yield from _check_limits(recipe)
    yield from _check_slices(recipe)
    if recipe.target.kind == "tpu":
        yield from _check_generation(recipe)
        yield from _check_promises(recipe.target)
        yield from _check_names(recipe.target)
        yield from _check_fallbacks(recipe.target)
        yield from _check_labels(recipe.target)
        yield from _check_code(recipe.target)
        yield from _check_vm_env(recipe.target)
        yield from _check_times(recipe)


def tpu_launch_problems(recipe: Recipe) -> Iterator[Problem]:
    """What a launch onto TPU VMs lacks."""
    for key, example in (("project", "PROJECT"), ("zone", "us-east5-b")):
        if getattr(recipe.target, key) is None:
            yield _problem(key, None, "must be given to launch TPU VMs", f"set target.{key}={example}")


def _problem(key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(key=f"target.{key}", value=value, reason=reason, fix=fix)


def _check_limits(recipe: Recipe) -> Iterator[Problem]:
    text = recipe.run.deadline
    if text is None:
        return
    try:
        parse_deadline(text)
    except ValueError as error:
        yield Problem(
            key="run.deadline", value=text, reason=str(error), fix="write for example 2027-01-31T18:00Z"
        )


def _check_slices(recipe: Recipe) -> Iterator[Problem]:
    most, fewest = recipe.multislice.num_slices, recipe.multislice.min_slices
    if fewest is None or recipe.target.controller == "pathways" or fewest >= most:
        return
    try:
        possible = possible_slices(recipe)
    except ValueError:
        # The mesh has problems of its own, which are told of elsewhere.
        return
    if len(possible) < 2:
        yield Problem(
            key="multislice.min_slices",
            value=fewest,
            reason=f"allows no number of slices below {most}: mesh and batch cannot be divided over fewer",
            fix="use multislice.data=-1 and multislice.fsdp=1, or remove it",
        )


def _check_promises(target: TargetConfig) -> Iterator[Problem]:
    """Keys of GKE whose loss would be noticed too late."""
    if target.secrets:
        fix = "remove it: read Secret Manager in your code, as the VM's service account"
        yield _problem("secrets", None, "names Kubernetes Secrets, which TPU VMs do not have", fix)
    if target.queue is not None:
        yield _problem(
            "queue", target.queue, "is Kueue's, which has no TPU VMs", "remove it, or use target=gke"
        )


def _check_generation(recipe: Recipe) -> Iterator[Problem]:
    chip = recipe.hardware.generation
    if chip == "tpu7x":
        yield _problem("kind", "tpu", "the Cloud TPU API does not offer tpu7x", "use target=gke")
        return
    try:
        shape = slice_shape(recipe.hardware)
    except ValueError:
        return
    if shape.accelerator_type is None and chip != CPU:
        yield Problem(
            key="hardware.chips_per_host",
            value=recipe.hardware.chips_per_host,
            reason=f"the Cloud TPU API offers {chip} {shape.topology_name} only as one host of"
            f" {shape.num_chips}",
            fix=f"use hardware.chips_per_host={shape.num_chips}, or target=gke",
        )


def _check_names(target: TargetConfig) -> Iterator[Problem]:
    for key, pattern, what, rule in _NAMES:
        value = getattr(target, key)
        if value is not None and pattern.fullmatch(value) is None:
            yield _problem(key, value, f"is not {what}", f"write {rule}")
    for tag in target.network_tags:
        if _ID.fullmatch(tag) is None:
            yield _problem("network_tags", tag, "is not a network tag", "use lower-case letters, digits, -")
    for disk in target.disks:
        if _DISK.fullmatch(disk) is None:
            yield _problem("disks", disk, "is not a disk", "write NAME or projects/P/zones/Z/disks/NAME")


def _check_fallbacks(target: TargetConfig) -> Iterator[Problem]:
    capacities = [("capacity", str(target.capacity))]
    for text in target.fallbacks:
        try:
            zone, capacity = parse_fallback(text, zone=target.zone or "", capacity=target.capacity)
        except ValueError:
            fix = "write ZONE/CAPACITY, ZONE or /CAPACITY; capacities are on_demand, spot and reserved"
            yield _problem("fallbacks", text, "is not a place and a capacity", fix)
            continue
        capacities.append(("fallbacks", capacity))
        if zone and _ZONE.fullmatch(zone) is None:
            yield _problem("fallbacks", text, f"{zone!r} is not a zone", "write for example us-east5-b/spot")
    if target.capacity == "flex_start":
        fix = "use spot, on_demand or reserved, or target=gke"
        yield _problem("capacity", "flex_start", "is nothing that queued resources have", fix)
    if target.reservation is None and any(
        key == "fallbacks" and each == "reserved" for key, each in capacities
    ):
        yield _problem("reservation", None, "must be given for a reserved fallback", "set it")


def _check_labels(target: TargetConfig) -> Iterator[Problem]:
    for name, value in target.labels.items():
        if name.startswith("muster"):
            yield _problem(f"labels.{name}", value, "is Muster's own", "use another name")
        elif _LABEL_KEY.fullmatch(name) is None or _LABEL_VALUE.fullmatch(value) is None:
            fix = "use lower-case letters, digits, - and _, a letter first, at most 63"
            yield _problem(f"labels.{name}", value, "is not a label of Google Cloud", fix)


def _check_vm_env(target: TargetConfig) -> Iterator[Problem]:
    """The startup script has these too, and would go astray."""
    for name, value in target.env.items():
        if _VM_ENV.fullmatch(name):
            reason = "decides where a VM looks for its own metadata, code and home"
            yield _problem(f"env.{name}", value, reason, "remove it")


def _check_code(target: TargetConfig) -> Iterator[Problem]:
    if not target.ship_code:
        yield _problem("ship_code", False, "leaves TPU VMs without code", "use target.ship_code=true")
    for path in target.requirements:
        parts = PurePosixPath(path)
        if not path or parts.is_absolute() or ".." in parts.parts or not path.isprintable() or "\\" in path:
            fix = "give a path from the root of the code, for example requirements.lock"
            yield _problem("requirements", path, "is not a path within the code", fix)
    if target.python is None and not target.requirements:
        fix = "give lock files, or target.python for an interpreter that has everything"
        yield _problem("requirements", [], "leaves nothing to install", fix)
    if target.python is not None and not PurePosixPath(target.python).is_absolute():
        yield _problem("python", target.python, "is not an absolute path", "give /PATH/TO/python")


def _check_times(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.target
    if target.min_duration_s is not None and target.capacity == "spot":
        fix = "remove it, or use target.capacity=on_demand or reserved"
        yield _problem("min_duration_s", target.min_duration_s, "is promised by nobody for spot", fix)
    if target.workload_type != "default" and recipe.multislice.num_slices == 1:
        fix = "use target.workload_type=default"
        yield _problem("workload_type", target.workload_type, "is for several slices", fix)

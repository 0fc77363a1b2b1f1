"""A recipe in effect -> the queued resource that is asked for, as plain data. Pure.

What ``muster plan --manifest`` prints for TPU VMs is this, as canonical JSON. Scripts are constant texts;
what belongs to the run is JSON in a metadata attribute.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.rundir import launched_recipe
from launcher.supervise.records import Order
from launcher.tpu import names
from launcher.tpu.vm import SPEC, VmSpec
from recipes.elastic import with_slices
from recipes.hardware import CPU, slice_shape
from recipes.schema import Recipe

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
V2, V2ALPHA1 = "v2", "v2alpha1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One set of machines to ask for."""

    order: Order
    number: int
    """Of the provision."""
    zone: str
    capacity: str
    num_slices: int
    is_probe: bool = False
    valid_for_s: float | None = None
    """How long the service may look for machines; None: for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is sent to create a queued resource."""

    version: str
    """Of the API."""
    parent: str
    resource_id: str
    body: Mapping[str, Any]
    """The QueuedResource, with the field names of that version."""


def request(recipe: Recipe, url: str, wish: Wish) -> Request:
    """The request for one set of machines.

    Args:
      recipe: as launched, with all its slices.
      url: of the run directory.
      wish: what is asked for.
    """
    target = recipe.target
    version = V2 if target.workload_type == "default" or wish.num_slices == 1 else V2ALPHA1
    parent = f"projects/{target.project}/locations/{wish.zone}"
    resource_id = names.resource_id(url, is_probe=wish.is_probe)
    spec: dict[str, Any] = {
        "parent": parent,
        **_nodes(recipe, resource_id, wish.num_slices, version),
        "node": _node(recipe, url, wish),
    }
    body: dict[str, Any] = {"tpu": {"node_spec": [spec]}, **_tier(recipe, wish, parent, version)}
    valid_for_s = min(
        (limit for limit in (wish.valid_for_s, target.valid_until_s) if limit is not None), default=None
    )
    if valid_for_s is not None:
        body["queueing_policy"] = {"valid_until_duration": f"{math.ceil(valid_for_s)}s"}
    return Request(version=version, parent=parent, resource_id=resource_id, body=body)


def request_bytes(asked: Request) -> bytes:
    """Canonical JSON."""
    return (json.dumps(dataclasses.asdict(asked), sort_keys=True, indent=2) + "\n").encode()


def preview(recipe: Recipe, bundle: str) -> Request:
    """The first request of a launch; the launch's own id is known only when it begins."""
    order = Order(id="{order}", recipe=launched_recipe(recipe)[0], bundle=bundle, launched_s=0.0, by="")
    wish = Wish(
        order=order,
        number=1,
        zone=recipe.target.zone or "{zone}",
        capacity=recipe.target.capacity,
        num_slices=recipe.multislice.num_slices,
    )
    return request(recipe, recipe.run_dir, wish)


def preview_bytes(recipe: Recipe, bundle: str) -> bytes:
    """Canonical JSON of :func:`preview`."""
    return request_bytes(preview(recipe, bundle))


def accelerator_type(recipe: Recipe) -> str:
    """One slice, as the Cloud TPU API names it; of a rehearsal, as its stand-in does."""
    if recipe.hardware.generation == CPU:
        return f"cpu-{recipe.hardware.topology}"
    return slice_shape(recipe.hardware).accelerator_type or ""


def _nodes(recipe: Recipe, resource_id: str, num_slices: int, version: str) -> Mapping[str, Any]:
    if num_slices == 1:
        return {"node_id": f"{resource_id}-0"}
    several = {"node_count": num_slices, "node_id_prefix": resource_id}
    if version == V2:
        return {"multislice_params": several}
    return {"multi_node_params": {**several, "workload_type": recipe.target.workload_type.upper()}}


def _tier(recipe: Recipe, wish: Wish, parent: str, version: str) -> Mapping[str, Any]:
    target = recipe.target
    if wish.capacity == "spot":
        return {"spot": {}}
    guaranteed: dict[str, Any] = {}
    if target.min_duration_s is not None:
        guaranteed["min_duration"] = f"{math.ceil(target.min_duration_s)}s"
    if wish.capacity != "reserved":
        return {"guaranteed": guaranteed} if guaranteed else {}
    if version == V2ALPHA1:
        guaranteed["reserved"] = True
    return {"guaranteed": guaranteed, "reservation_name": f"{parent}/reservations/{target.reservation}"}


def _node(recipe: Recipe, url: str, wish: Wish) -> Mapping[str, Any]:
    target = recipe.target
    node: dict[str, Any] = {
        "accelerator_type": accelerator_type(recipe),
        "runtime_version": names.runtime_version(recipe),
        "network_config": _network(recipe),
        "labels": dict(names.labels(recipe, url, wish.order, wish.number, is_probe=wish.is_probe)),
    }
    if wish.capacity == "reserved":
        node["scheduling_config"] = {"reserved": True}
    if target.service_account is not None:
        node["service_account"] = {"email": target.service_account, "scope": [SCOPE]}
    if target.network_tags:
        node["tags"] = list(target.network_tags)
    if target.disks:
        node["data_disks"] = [
            {"source_disk": _disk(target.project, wish.zone, disk), "mode": "READ_ONLY"}
            for disk in target.disks
        ]
    if not wish.is_probe:
        node["metadata"] = _metadata(recipe, url, wish)
    return node


def _network(recipe: Recipe) -> Mapping[str, Any]:
    target = recipe.target
    found: dict[str, Any] = {"enable_external_ips": target.external_ips}
    if target.network is not None:
        found["network"] = target.network
    if target.subnetwork is not None:
        found["subnetwork"] = target.subnetwork
    return found


def _disk(project: str | None, zone: str, disk: str) -> str:
    return disk if "/" in disk else f"projects/{project}/zones/{zone}/disks/{disk}"


def _metadata(recipe: Recipe, url: str, wish: Wish) -> Mapping[str, str]:
    return {
        "startup-script": _script("bootstrap.py"),
        "shutdown-script": _script("shutdown.sh"),
        "enable-guest-attributes": "TRUE",
        SPEC: json.dumps(dataclasses.asdict(vm_spec(recipe, url, wish)), sort_keys=True),
    }


def vm_spec(recipe: Recipe, url: str, wish: Wish) -> VmSpec:
    """What the hosts of these machines are told."""
    shape, target = slice_shape(recipe.hardware), recipe.target
    return VmSpec(
        run_dir=url,
        recipe=launched_recipe(with_slices(recipe, wish.num_slices))[0],
        order=wish.order.id,
        provision=wish.number,
        bundle=wish.order.bundle or "",
        num_slices=wish.num_slices,
        hosts_per_slice=shape.num_hosts,
        devices_per_host=shape.devices_per_host,
        is_cpu=recipe.hardware.generation == CPU,
        grace_period_s=target.grace_period_s,
        max_restarts=recipe.run.max_restarts,
        python=target.python,
        requirements=tuple(target.requirements),
        env=dict(sorted(target.env.items())),
    )


def _script(name: str) -> str:
    return (Path(__file__).parent / name).read_text()

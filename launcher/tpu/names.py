"""What things are called in the Cloud TPU API: ids, labels, runtime versions.

Ids are made of the run's name and a digest of its address, so the service itself keeps a second set of
machines for one run out of a zone, and runs of one name in two buckets out of each other's way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from launcher.supervise.records import Order
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe

MANAGED_BY, OWNER = "muster-managed-by", "muster"
RUN, HOME, ORDER = "muster-run", "muster-home", "muster-order"
PROVISION, PROBE, FINGERPRINT = "muster-provision", "muster-probe", "muster-fingerprint"

RUNTIME_VERSIONS = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
    "cpu": "muster-rehearsal",
}
"""docs.cloud.google.com/tpu/docs/runtimes; of a rehearsal nobody asks."""


def home(url: str) -> str:
    """Digest of a run's address, for a label.

    Args:
      url: of the run directory.
    """
    return hashlib.sha256(url.encode()).hexdigest()[:12]


def resource_id(url: str, *, is_probe: bool = False) -> str:
    """Id of a run's queued resource; its nodes are called ``<id>-0`` and so on."""
    name = f"{url.rpartition('/')[2]}-{home(url)[:6]}"
    return f"{name}-probe" if is_probe else name


def labels(recipe: Recipe, url: str, order: Order, number: int, *, is_probe: bool) -> Mapping[str, str]:
    """Labels of every node of a provision: whose they are, and what for. The user's own never win."""
    ours = {
        MANAGED_BY: OWNER,
        RUN: url.rpartition("/")[2],
        HOME: home(url),
        ORDER: order.id,
        PROVISION: str(number),
        FINGERPRINT: fingerprint(recipe)[:16],
    }
    return {**recipe.target.labels, **ours, **({PROBE: "true"} if is_probe else {})}


def place_of(name: str) -> str:
    """The zone that something is in, ``projects/P/locations/ZONE``, of its name in full."""
    return "/".join(name.split("/")[:4])


def provision_of(labels: Mapping[str, str]) -> int:
    """Number of the provision, as labels say; 0 when they say nothing of the kind."""
    text = labels.get(PROVISION, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def runtime_version(recipe: Recipe) -> str:
    """Software of the VMs."""
    return recipe.target.runtime_version or RUNTIME_VERSIONS[recipe.hardware.generation]

"""Check of where the bucket is and where the nodes are: bytes that leave a region are paid for. Pure.

Locations of Cloud Storage: docs.cloud.google.com/storage/docs/locations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.gke.doctor_checks import Result, Unseen, failed, listed, ok, unknown, warning
from launcher.gke.objects import Object, label

REGION, ZONE = "topology.kubernetes.io/region", "topology.kubernetes.io/zone"
_DUAL_REGIONS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "EUR5": ("europe-west1", "europe-west2"),
    "EUR7": ("europe-west2", "europe-west3"),
    "EUR8": ("europe-west3", "europe-west6"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}
_MULTI_REGIONS = {"US": "us-", "EU": "europe-", "ASIA": "asia-"}
"""Each of the regions with this prefix; London and Zurich are in europe- but not in the EU."""
_NOT_IN_EU = ("europe-west2", "europe-west6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What is known of a bucket that can be listed."""

    name: str
    location: str | Unseen
    """For example ``US-EAST5``, ``NAM4`` or ``US``."""
    regions: Sequence[str] = ()
    """The two of a configurable dual-region."""


def regions_of(nodes: Iterable[Object], context: str) -> frozenset[str]:
    """Regions of the nodes; without any, that of the context's cluster, when gcloud named it."""
    found = frozenset(label(node, REGION) or region_of(label(node, ZONE)) for node in nodes) - {""}
    parts = context.split("_")
    if not found and len(parts) == 4 and parts[0] == "gke":
        return frozenset({region_of(parts[2])})
    return found


def region_of(location: str) -> str:
    """Of a zone or region: ``us-east5-b`` is in ``us-east5``."""
    head, _, tail = location.rpartition("-")
    return head if len(tail) == 1 and tail.isalpha() else location


def check_bucket(found: Bucket | Unseen, problem: tuple[str, str] | None) -> Result:
    """Whether the bucket is there and may be listed.

    Args:
      found: the bucket.
      problem: message and hint of what the storage refused.
    """
    if problem is not None:
        return failed("bucket", problem[0], problem[1] or "correct run.root")
    if isinstance(found, Unseen):
        return unknown("bucket", found.reason)
    return ok(
        "bucket", f"gs://{found.name} can be read by you; whether the pods may is their account's matter"
    )


def check_location(bucket: Bucket, regions: frozenset[str]) -> Result:
    """``regions``: of the nodes."""
    check, location = "bucket location", bucket.location
    if isinstance(location, Unseen):
        return unknown(check, location.reason)
    if not regions:
        return unknown(check, f"{location}; the nodes' region is not known")
    shown = listed(sorted(regions))
    outside = sorted(region for region in regions if not _is_in(region, location.upper(), bucket.regions))
    if not outside:
        several = " (several regions: reads may be charged)" if _is_multi(location) else ""
        return ok(check, f"{location}, as the nodes in {shown}{several}")
    return warning(
        check,
        f"{location}, but the nodes are in {listed(outside)}: every checkpoint and every byte of data crosses"
        " regions, which is slow and charged as egress",
        f"use a bucket in {outside[0]} as run.root",
    )


def _is_multi(location: str) -> bool:
    return location.upper() in _MULTI_REGIONS or location.upper() in _DUAL_REGIONS


def _is_in(region: str, location: str, pair: Sequence[str]) -> bool:
    if pair:
        return region.upper() in {each.upper() for each in pair}
    if location in _DUAL_REGIONS:
        return region in _DUAL_REGIONS[location]
    if location in _MULTI_REGIONS:
        return region.startswith(_MULTI_REGIONS[location]) and not (location == "EU" and region in _NOT_IN_EU)
    return region.upper() == location

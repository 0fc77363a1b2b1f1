"""The keys of `target`: where a run goes, and what it takes there. Part of `schema.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from recipes.schema_key import Effect, spec

Capacity = Literal["on_demand", "spot", "reserved", "flex_start"]
"""How chips are bought."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """Where the run goes."""

    kind: Literal["local", "gke", "tpu"] = field(
        metadata=spec("local CPU processes, GKE JobSet, or TPU VMs by queued resources", Effect.OPERATION)
    )
    capacity: Capacity = field(
        default="on_demand", metadata=spec("how the chips are bought", Effect.OPERATION)
    )
    reservation: str | None = field(
        default=None,
        metadata=spec("name of the reservation that target.capacity=reserved draws on", Effect.OPERATION),
    )
    grace_period_s: float = field(
        default=30.0,
        metadata=spec(
            "seconds between the notice and the end of a host", Effect.OPERATION, minimum=5.0, maximum=3600.0
        ),
    )
    max_chips: int = field(
        default=256,
        metadata=spec("chips above which launching asks first", Effect.OPERATION, minimum=0),
    )
    max_cost: float = field(
        default=1000.0,
        metadata=spec("USD per hour above which launching asks first", Effect.OPERATION, minimum=0.0),
    )
    cluster: str | None = field(
        default=None,
        metadata=spec(
            "kubeconfig context, or the name of a GKE cluster that one is for; null: the current one",
            Effect.OPERATION,
        ),
    )
    namespace: str = field(
        default="default", metadata=spec("Kubernetes namespace of the JobSet", Effect.OPERATION)
    )
    image: str | None = field(
        default=None,
        metadata=spec("container image by digest: REPOSITORY@sha256:... (docs/image.md)", Effect.OPERATION),
    )
    ship_code: bool = field(
        default=True,
        metadata=spec("send the working tree to the hosts; false: the image has the code", Effect.OPERATION),
    )
    service_account: str | None = field(
        default=None,
        metadata=spec(
            "Kubernetes service account for Workload Identity; on TPU VMs the e-mail address of one of Google"
            " Cloud's",
            Effect.OPERATION,
        ),
    )
    queue: str | None = field(
        default=None, metadata=spec("Kueue LocalQueue; null: without Kueue", Effect.OPERATION)
    )
    priority_class: str | None = field(
        default=None, metadata=spec("Kueue WorkloadPriorityClass", Effect.OPERATION)
    )
    placement: Literal["exclusive", "topology", "any"] = field(
        default="exclusive",
        metadata=spec(
            "a node pool for each slice (JobSet), Kueue's topology-aware scheduling, or any fitting nodes",
            Effect.OPERATION,
        ),
    )
    node_selector: Mapping[str, str] = field(
        default_factory=dict, metadata=spec("further labels that nodes must have", Effect.OPERATION)
    )
    labels: Mapping[str, str] = field(
        default_factory=dict, metadata=spec("labels for the JobSet and its pods", Effect.OPERATION)
    )
    env: Mapping[str, str] = field(
        default_factory=dict, metadata=spec("environment variables of the hosts", Effect.OPERATION)
    )
    secrets: Mapping[str, str] = field(
        default_factory=dict,
        metadata=spec("environment variable -> SECRET/KEY in the namespace", Effect.OPERATION),
    )
    host_network: bool = field(
        default=False,
        metadata=spec(
            "pods share their node's network: faster DCN on some clusters, but no network policy",
            Effect.OPERATION,
        ),
    )
    privileged: bool = field(
        default=False,
        metadata=spec("pods may do everything on their node: for profilers that need it", Effect.OPERATION),
    )
    ttl_s: int = field(
        default=7 * 86400,
        metadata=spec("seconds that an ended JobSet stays in the cluster", Effect.OPERATION, minimum=0),
    )
    controller: Literal["multi", "pathways"] = field(
        default="multi",
        metadata=spec(
            "multi: JAX on every host; pathways: one JAX process drives all slices through a proxy",
            Effect.OPERATION,
        ),
    )
    pathways_server_image: str | None = field(
        default=None,
        metadata=spec("image by digest of Pathways' resource manager and workers", Effect.OPERATION),
    )
    pathways_proxy_image: str | None = field(
        default=None, metadata=spec("image by digest of Pathways' proxy", Effect.OPERATION)
    )
    project: str | None = field(
        default=None, metadata=spec("Google Cloud project of TPU VMs, by its id", Effect.OPERATION)
    )
    zone: str | None = field(default=None, metadata=spec("zone of TPU VMs", Effect.OPERATION))
    fallbacks: Sequence[str] = field(
        default=(),
        metadata=spec(
            "ZONE/CAPACITY to try in this order while there are no TPU VMs in target.zone", Effect.OPERATION
        ),
    )
    fallback_after_s: float = field(
        default=900.0,
        metadata=spec(
            "seconds without chips before the next of target.fallbacks, or fewer slices, are tried",
            Effect.OPERATION,
            minimum=1.0,
        ),
    )
    valid_until_s: float | None = field(
        default=None,
        metadata=spec(
            "seconds after which the service gives up a request for TPU VMs; null: never",
            Effect.OPERATION,
            minimum=1.0,
        ),
    )
    min_duration_s: float | None = field(
        default=None,
        metadata=spec(
            "seconds that guaranteed TPU VMs are promised for (on_demand and reserved)",
            Effect.OPERATION,
            minimum=1.0,
        ),
    )
    workload_type: Literal["default", "throughput_optimized", "availability_optimized"] = field(
        default="default",
        metadata=spec("what Cloud TPU places several slices for (API v2alpha1)", Effect.OPERATION),
    )
    runtime_version: str | None = field(
        default=None,
        metadata=spec("software of TPU VMs; null: the one for the generation", Effect.OPERATION),
    )
    network: str | None = field(
        default=None, metadata=spec("VPC network of TPU VMs; null: the project's default", Effect.OPERATION)
    )
    subnetwork: str | None = field(
        default=None, metadata=spec("subnetwork of TPU VMs, in their region", Effect.OPERATION)
    )
    external_ips: bool = field(
        default=True,
        metadata=spec(
            "TPU VMs have external addresses; false: the network needs Cloud NAT and Private Google Access",
            Effect.OPERATION,
        ),
    )
    network_tags: Sequence[str] = field(
        default=(), metadata=spec("tags that firewall rules know TPU VMs by", Effect.OPERATION)
    )
    disks: Sequence[str] = field(
        default=(),
        metadata=spec("persistent disks of the zone, attached read-only to every TPU VM", Effect.OPERATION),
    )
    requirements: Sequence[str] = field(
        default=("requirements.lock", "k8s/requirements-tpu.lock"),
        metadata=spec("lock files within the code that TPU VMs install from, with hashes", Effect.OPERATION),
    )
    python: str | None = field(
        default=None,
        metadata=spec(
            "interpreter on the TPU VMs that has everything already; null: one is installed", Effect.OPERATION
        ),
    )

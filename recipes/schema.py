"""Every key of a recipe: type, default, unit, meaning and what changing it changes.

A recipe is a tree of frozen dataclasses. Values live in YAML (`recipes/*.yaml` and the groups
beside them); types, bounds and meanings live here. `recipes/load.py` reads one into the other.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Capacity = Literal["on_demand", "spot", "reserved", "flex_start"]
"""How chips are bought."""


class Effect(enum.StrEnum):
    """What changing a key does to a run that has already begun."""

    EXPERIMENT = "changes the experiment"
    """Another experiment: refused on an existing run."""
    SPEED = "safe: same experiment, losses equal up to rounding"
    OPERATION = "safe: does not touch the numbers"


def spec(
    doc: str,
    effect: Effect = Effect.EXPERIMENT,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Mapping[str, Any]:
    """Metadata of one key: meaning (with its unit), effect and bounds (``above`` is exclusive)."""
    return {"doc": doc, "effect": effect, "minimum": minimum, "maximum": maximum, "above": above}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Which run directory, and when to give up."""

    name: str | None = field(
        default=None,
        metadata=spec("run name; the recipe's name when null", Effect.OPERATION),
    )
    root: str = field(
        default="runs",
        metadata=spec("folder of all runs: a local path or gs://bucket/prefix", Effect.OPERATION),
    )
    max_restarts: int = field(
        default=3,
        metadata=spec(
            "failed attempts before the run stops; preemptions are not counted",
            Effect.OPERATION,
            minimum=0,
        ),
    )
    max_attempts_without_progress: int = field(
        default=3,
        metadata=spec(
            "attempts in a row without a newly committed step before the run stops",
            Effect.OPERATION,
            minimum=1,
        ),
    )
    deadline: str | None = field(
        default=None,
        metadata=spec(
            "when the run is stopped with a checkpoint, for example 2027-01-31T18:00Z", Effect.OPERATION
        ),
    )
    max_cost: float | None = field(
        default=None,
        metadata=spec("USD in all after which it is stopped with a checkpoint", Effect.OPERATION, above=0.0),
    )
    peer_timeout_s: float = field(
        default=10.0,
        metadata=spec(
            "seconds after which a silent host counts as lost; must be below the grace period",
            Effect.OPERATION,
            minimum=5.0,
        ),
    )
    hang_factor: float = field(
        default=10.0,
        metadata=spec(
            "a step that takes this many times the median step is a hang", Effect.OPERATION, above=1.0
        ),
    )
    hang_minimum_s: float = field(
        default=120.0,
        metadata=spec(
            "no step shorter than this is called a hang", Effect.OPERATION, above=0.0, maximum=86400.0
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfig:
    """Which accelerator, and in what shape; one entry of the catalogue."""

    generation: Literal["v4", "v5e", "v5p", "v6e", "tpu7x", "cpu"] = field(
        metadata=spec("TPU generation, or cpu", Effect.SPEED)
    )
    topology: str = field(
        metadata=spec(
            "chips of one slice, for example 16x16 or 4x4x8; on cpu HOSTSxDEVICES, for example 1x4",
            Effect.SPEED,
        )
    )
    chips_per_host: int | None = field(
        default=None,
        metadata=spec(
            "chips of one host, where a topology comes in more than one way (v5e and v6e 2x4)",
            Effect.SPEED,
            minimum=1,
        ),
    )
    price_per_chip_hour: float | None = field(
        default=None,
        metadata=spec(
            "your price in USD per chip-hour; the catalogue's list price when null",
            Effect.OPERATION,
            minimum=0.0,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family; with experts, of the Mixtral family."""

    family: Literal["llama", "mixtral"] = field(default="llama", metadata=spec("architecture, by name"))
    vocab_size: int = field(metadata=spec("entries of the embedding table", minimum=2, maximum=2**24))
    num_layers: int = field(metadata=spec("decoder blocks", minimum=1))
    embed_dim: int = field(metadata=spec("width of the residual stream", minimum=1))
    mlp_dim: int = field(metadata=spec("hidden width of the SwiGLU MLP (of one expert)", minimum=1))
    num_heads: int = field(metadata=spec("query heads", minimum=1))
    num_kv_heads: int = field(metadata=spec("key and value heads (GQA)", minimum=1))
    head_dim: int = field(metadata=spec("width of one head; even, for RoPE", minimum=2))
    num_experts: int = field(default=1, metadata=spec("experts of each MLP; 1 is dense", minimum=1))
    num_experts_per_token: int = field(
        default=1, metadata=spec("experts that each token is sent to", minimum=1)
    )
    router_loss_weight: float = field(
        default=0.0, metadata=spec("weight of the load-balancing loss", minimum=0.0)
    )
    rope_theta: float = field(default=500_000.0, metadata=spec("base of the RoPE angles", above=0.0))
    norm_epsilon: float = field(default=1e-5, metadata=spec("added to the mean square in RMSNorm", above=0.0))
    tie_embeddings: bool = field(
        default=False, metadata=spec("use the embedding table as the output projection")
    )
    dropout_rate: float = field(
        default=0.0, metadata=spec("dropout after attention and MLP", minimum=0.0, maximum=0.9)
    )
    compute_dtype: Literal["bfloat16", "float32"] = field(
        default="bfloat16", metadata=spec("dtype of activations and matmuls; weights stay float32")
    )
    attention: Literal["xla", "xla_chunked"] = field(
        default="xla",
        metadata=spec(
            "attention by name: whole score matrix, or by query chunks in less memory", Effect.SPEED
        ),
    )
    attention_chunk: int = field(
        default=512, metadata=spec("query positions of one chunk (xla_chunked)", Effect.SPEED, minimum=1)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Degrees of parallelism inside a slice, over ICI. One axis may be -1: what is left."""

    data: int = field(default=1, metadata=spec("replicas of the weights", Effect.SPEED))
    fsdp: int = field(
        default=-1, metadata=spec("shards of weights and optimizer state, and of the batch", Effect.SPEED)
    )
    context: int = field(default=1, metadata=spec("shards of the sequence", Effect.SPEED))
    expert: int = field(default=1, metadata=spec("shards of the experts", Effect.SPEED))
    tensor: int = field(default=1, metadata=spec("shards of heads and MLP width", Effect.SPEED))


@dataclass(frozen=True, kw_only=True, slots=True)
class MultisliceConfig:
    """Number of slices and degrees of parallelism across them, over DCN. One axis may be -1."""

    num_slices: int = field(default=1, metadata=spec("slices of the job", Effect.SPEED, minimum=1))
    min_slices: int | None = field(
        default=None,
        metadata=spec(
            "fewest slices to go on with while capacity is short; null: never fewer than num_slices",
            Effect.OPERATION,
            minimum=1,
        ),
    )
    grow_after_s: float = field(
        default=900.0,
        metadata=spec(
            "seconds on fewer slices before the missing ones are asked for again",
            Effect.OPERATION,
            minimum=1.0,
        ),
    )
    data: int = field(default=-1, metadata=spec("replicas of the weights across slices", Effect.SPEED))
    fsdp: int = field(default=1, metadata=spec("shards of the weights across slices", Effect.SPEED))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from. Batches are a pure function of seed and step."""

    source: Literal["python_stdlib", "text_files", "token_file", "array_record", "synthetic"] = field(
        metadata=spec("kind of data, by name")
    )
    path: str | None = field(
        default=None,
        metadata=spec("folder of texts, token file or ArrayRecord pattern; not for python_stdlib, synthetic"),
    )
    eval_path: str | None = field(
        default=None,
        metadata=spec("held-out data of the same kind; null splits off eval_fraction by file or record"),
    )
    eval_fraction: float = field(
        default=0.1, metadata=spec("share held out when eval_path is null", above=0.0, maximum=0.9)
    )
    tokenizer: Literal["byte", "huggingface"] = field(
        default="byte", metadata=spec("how text becomes tokens; token files carry tokens already")
    )
    tokenizer_path: str | None = field(
        default=None, metadata=spec("tokenizer.json of a Hugging Face tokenizer (a file, never a hub)")
    )
    token_dtype: Literal["uint16", "uint32"] = field(
        default="uint16", metadata=spec("integer type in a token file, little-endian")
    )
    shuffle: bool = field(default=True, metadata=spec("visit records in a seeded order, new each epoch"))
    prefetch_batches: int = field(
        default=4, metadata=spec("batches read ahead on each host", Effect.OPERATION, minimum=1, maximum=1024)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw"] = field(default="adamw", metadata=spec("optimizer, by name"))
    learning_rate: float = field(metadata=spec("peak learning rate", above=0.0))
    schedule: Literal["cosine", "constant"] = field(
        default="cosine", metadata=spec("learning rate after the warm-up")
    )
    warmup_steps: int = field(default=0, metadata=spec("steps of linear warm-up from 0", minimum=0))
    final_learning_rate_fraction: float = field(
        default=0.1,
        metadata=spec("learning rate at the last step, over the peak (cosine)", minimum=0.0, maximum=1.0),
    )
    b1: float = field(default=0.9, metadata=spec("decay of the first moment", minimum=0.0, maximum=0.9999))
    b2: float = field(default=0.95, metadata=spec("decay of the second moment", minimum=0.0, maximum=0.99999))
    epsilon: float = field(default=1e-8, metadata=spec("added to the root of the second moment", above=0.0))
    weight_decay: float = field(
        default=0.1, metadata=spec("decoupled weight decay; not on norms and biases", minimum=0.0)
    )
    clip_norm: float | None = field(
        default=1.0, metadata=spec("largest global gradient norm; null for no clipping", above=0.0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and how much to keep. There is always a last save and one at a preemption."""

    save_interval_steps: int | None = field(
        default=None, metadata=spec("steps between saves; null: by minutes only", Effect.OPERATION, minimum=1)
    )
    save_interval_minutes: float | None = field(
        default=10.0,
        metadata=spec(
            "minutes between saves; null: by steps only", Effect.OPERATION, above=0.0, maximum=1440.0
        ),
    )
    keep: int = field(
        default=3,
        metadata=spec(
            "newest checkpoints kept; at least 2, or a damaged one loses the run", Effect.OPERATION, minimum=2
        ),
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The loop: how long, how much at a time, what to report."""

    num_steps: int = field(metadata=spec("optimizer steps of the whole run", minimum=1))
    global_batch_size: int = field(
        metadata=spec("sequences per optimizer step over all devices and accumulation steps", minimum=1)
    )
    sequence_length: int = field(metadata=spec("tokens of one sequence", minimum=1, maximum=2**24))
    grad_accum_steps: int = field(
        default=1, metadata=spec("parts that the global batch is computed in", Effect.SPEED, minimum=1)
    )
    seed: int = field(default=0, metadata=spec("of weights, data order and dropout", minimum=0))
    remat_policy: Literal["none", "minimal", "full"] = field(
        default="full",
        metadata=spec(
            "what the backward pass recomputes: nothing, all but matmul outputs, everything", Effect.SPEED
        ),
    )
    log_interval_steps: int = field(
        default=1, metadata=spec("steps between metric records", Effect.OPERATION, minimum=1)
    )
    eval_interval_steps: int | None = field(
        default=None,
        metadata=spec("steps between evaluations; null: only at the end", Effect.OPERATION, minimum=1),
    )
    eval_num_batches: int = field(
        default=8,
        metadata=spec(
            "global batches of one evaluation; 0 turns it off", Effect.OPERATION, minimum=0, maximum=10**6
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One complete experiment."""

    name: str = field(
        metadata=spec("the recipe's file name without .yaml; not set by hand", Effect.OPERATION)
    )
    run: RunConfig
    hardware: HardwareConfig
    model: ModelConfig
    mesh: MeshConfig
    multislice: MultisliceConfig
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    target: TargetConfig
    train: TrainConfig

    @property
    def run_name(self) -> str:
        return self.name if self.run.name is None else self.run.name

    @property
    def run_dir(self) -> str:
        """The run directory, as a path or gs:// address."""
        return f"{self.run.root.rstrip('/')}/{self.run_name}"

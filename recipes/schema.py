"""Every key of a recipe: type, default, unit, meaning and what changing it changes.

A recipe is a tree of frozen dataclasses. Values live in YAML (`recipes/*.yaml` and the groups
beside them); types, bounds and meanings live here. `recipes/load.py` reads one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from recipes.schema_key import Effect, spec
from recipes.schema_target import TargetConfig


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
    tuned_flags: bool = field(
        default=True,
        metadata=spec("compile with the flags that `muster hardware` lists for the generation", Effect.SPEED),
    )
    compiler_flags: Mapping[str, str] = field(
        default_factory=dict,
        metadata=spec(
            "further compiler flags, without --; the value default drops a tuned one", Effect.SPEED
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family; with experts, of the Mixtral family."""

    family: Literal["llama", "mixtral"] = field(default="llama", metadata=spec("architecture, by name"))
    vocab_size: int = field(metadata=spec("entries of the embedding table", minimum=2, maximum=2**24))
    num_layers: int = field(metadata=spec("decoder blocks", minimum=1))
    embed_dim: int = field(metadata=spec("width of the residual stream", minimum=1))
    mlp_dim: int = field(metadata=spec("hidden width of the MLP (of one expert)", minimum=1))
    mlp_activation: Literal["swiglu", "relu"] = field(
        default="swiglu", metadata=spec("swiglu has a gate beside it, so three matrices; relu has two")
    )
    num_heads: int = field(metadata=spec("query heads", minimum=1))
    num_kv_heads: int = field(metadata=spec("key and value heads (GQA)", minimum=1))
    head_dim: int = field(metadata=spec("width of one head; even, for RoPE", minimum=2))
    num_experts: int = field(default=1, metadata=spec("experts of each MLP; 1 is dense", minimum=1))
    num_experts_per_token: int = field(
        default=1, metadata=spec("experts that each token is sent to", minimum=1)
    )
    num_shared_experts: int = field(
        default=0, metadata=spec("experts that every token is sent to besides", minimum=0)
    )
    expert_capacity: float | None = field(
        default=None,
        metadata=spec(
            "places of an expert over its fair share in a sequence, tokens beyond are dropped; null: none is",
            above=0.0,
        ),
    )
    grouped_matmul: Literal["xla", "megablox"] = field(
        default="xla",
        metadata=spec("matmuls of dropless experts by name: XLA's own, or the TPU kernel", Effect.SPEED),
    )
    router_loss_weight: float = field(
        default=0.0, metadata=spec("weight of the load-balancing loss", minimum=0.0)
    )
    router_z_loss_weight: float = field(
        default=0.0, metadata=spec("weight of the squared log-sum of the router's logits", minimum=0.0)
    )
    router_bias_rate: float = field(
        default=0.0,
        metadata=spec("step of the bias that balances experts without a loss; 0: no bias", minimum=0.0),
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
        default="bfloat16", metadata=spec("dtype of activations and matmuls")
    )
    weight_dtype: Literal["bfloat16", "float32"] = field(
        default="float32", metadata=spec("dtype that weights are kept and updated in")
    )
    quantization: Literal["none", "int8", "fp8"] = field(
        default="none", metadata=spec("dtype that matmuls of weights are rounded to, forward and backward")
    )
    attention: Literal["xla", "xla_chunked", "splash"] = field(
        default="xla",
        metadata=spec(
            "attention by name: whole score matrix, by query chunks in less memory, or the TPU kernel",
            Effect.SPEED,
        ),
    )
    attention_chunk: int = field(
        default=512,
        metadata=spec(
            "query positions of one chunk (xla_chunked), largest block of the kernel (splash)",
            Effect.SPEED,
            minimum=1,
        ),
    )
    attention_window: int | None = field(
        default=None,
        metadata=spec("positions that a token looks back, itself included; null: all", minimum=1),
    )
    attention_soft_cap: float | None = field(
        default=None, metadata=spec("scores s become cap * tanh(s / cap); null: as they are", above=0.0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Degrees of parallelism inside a slice, over ICI. One axis may be -1: what is left."""

    data: int = field(default=1, metadata=spec("replicas of the weights", Effect.SPEED))
    stage: int = field(default=1, metadata=spec("pipeline stages: shards of the layers", Effect.SPEED))
    fsdp: int = field(
        default=-1, metadata=spec("shards of weights and optimizer state, and of the batch", Effect.SPEED)
    )
    context: int = field(default=1, metadata=spec("shards of the sequence", Effect.SPEED))
    expert: int = field(default=1, metadata=spec("shards of the experts", Effect.SPEED))
    tensor: int = field(
        default=1,
        metadata=spec("shards of heads and MLP width, and of the sequence between them", Effect.SPEED),
    )
    zero1: bool = field(
        default=False,
        metadata=spec("optimizer state is divided over the data axis too (ZeRO-1)", Effect.SPEED),
    )
    context_exchange: Literal["all_gather", "ring"] = field(
        default="all_gather",
        metadata=spec("how keys and values cross the context axis: at once, or shard by shard", Effect.SPEED),
    )
    stage_rounds: int = field(
        default=1,
        metadata=spec(
            "times that a batch goes round the stages (circular pipeline)", Effect.SPEED, minimum=1
        ),
    )
    stage_microbatches: int | None = field(
        default=None,
        metadata=spec("parts of a batch in the pipeline; null: one a stage", Effect.SPEED, minimum=1),
    )
    collective_matmul: bool = field(
        default=False,
        metadata=spec("matmuls over the tensor axis exchange shards while they multiply", Effect.SPEED),
    )
    sharding_mode: Literal["auto", "explicit"] = field(
        default="auto",
        metadata=spec("who divides intermediates: the compiler, or JAX's sharded types", Effect.SPEED),
    )


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
    stage: int = field(default=1, metadata=spec("pipeline stages across slices", Effect.SPEED))
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
    document_separator: int | None = field(
        default=None,
        metadata=spec("token that ends a document, which attention does not cross; null: it does", minimum=0),
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
    first_moment_dtype: Literal["bfloat16", "float32"] = field(
        default="float32", metadata=spec("dtype that the first moment is kept in")
    )
    second_moment_dtype: Literal["bfloat16", "float32"] = field(
        default="float32", metadata=spec("dtype that the second moment is kept in")
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
    remat_policy: Literal["none", "minimal", "full", "named"] = field(
        default="full",
        metadata=spec(
            "what the backward pass recomputes: nothing, all but matmul outputs, everything, or everything"
            " but remat_save and remat_offload",
            Effect.SPEED,
        ),
    )
    remat_save: Sequence[str] = field(
        default=(), metadata=spec("tensors of a layer kept on the device (remat_policy=named)", Effect.SPEED)
    )
    remat_offload: Sequence[str] = field(
        default=(),
        metadata=spec("tensors of a layer kept in the host's memory (remat_policy=named)", Effect.SPEED),
    )
    vocab_chunks: int = field(
        default=1,
        metadata=spec(
            "parts of the vocabulary that logits are computed in, one at a time", Effect.SPEED, minimum=1
        ),
    )
    profile_start_step: int | None = field(
        default=None, metadata=spec("first step of a profiler trace; null: none", Effect.OPERATION, minimum=1)
    )
    profile_num_steps: int = field(
        default=3, metadata=spec("steps of one trace", Effect.OPERATION, minimum=1, maximum=100)
    )
    profile_interval_steps: int | None = field(
        default=None,
        metadata=spec("steps from one trace to the next; null: a single one", Effect.OPERATION, minimum=1),
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

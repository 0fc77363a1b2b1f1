"""What Muster and MaxText are compared on: the same work, written once for each of the two.

Sources of MaxText's settings and flags: its ``configs/tpu`` and ``benchmarks`` folders at 0.2.5, and
AI-Hypercomputer/tpu-recipes at c8cfe2f. Of the published flags those that libtpu refuses for the chip are
left out (``fuse_all_gather`` on v5p and v6e). The compiler gets the same flags from both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAXTEXT = "0.2.5"

_OVERLAP = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
V5E_FLAGS = (*_OVERLAP, "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true")
"""MaxText, configs/tpu/v5e/*.sh: one set for all."""
V5P_FLAGS = (
    *_OVERLAP,
    "--xla_tpu_megacore_fusion_allow_ags=false",
    "--xla_enable_async_collective_permute=true",
    "--xla_tpu_enable_ag_backward_pipelining=true",
)
"""MaxText, configs/tpu/v5p/*.sh; tpu-recipes, v5p/Mixtral-8X7B-Maxtext adds the limit of vector memory."""
V6E_FLAGS = (
    *_OVERLAP,
    "--xla_tpu_scoped_vmem_limit_kib=98304",
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "--xla_tpu_assign_all_reduce_scatter_layout=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false",
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "--xla_tpu_enable_all_reduce_offload_tracing=true",
    "--xla_tpu_use_tc_device_shape_on_sc=true",
    "--xla_sc_enable_instruction_fusion=false",
    "--xla_sc_disjoint_spmem=false",
    "--xla_sc_disable_megacore_partitioning=true",
    "--xla_tpu_enable_all_experimental_scheduler_features=true",
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "--xla_tpu_host_transfer_overlap_limit=24",
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "--xla_tpu_enable_ag_backward_pipelining=true",
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "--xla_max_concurrent_host_send_recv=100",
    "--xla_tpu_scheduler_percent_shared_memory_limit=100",
    "--xla_latency_hiding_scheduler_rerun=2",
    "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
)
"""tpu-recipes, trillium/Llama3.1-8B-MaxText/v6e-8: llama3_1_8b_8192_no_collective_matmul."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One train step, compiled ahead of time by both."""

    name: str
    flags: Sequence[str]
    recipe: str
    overrides: Sequence[str]
    """Muster's side."""
    settings: Sequence[str]
    """MaxText's side, beside those of every pair."""


COMMON = (
    *("dataset_type=synthetic", "enable_checkpointing=false", "log_config=false"),
    *("dtype=bfloat16", "weight_dtype=float32", "attention=flash", "ici_fsdp_parallelism=-1"),
    "compile_topology_num_slices=1",
)
_LARGE_BLOCKS = (
    *("sa_block_q=2048", "sa_block_kv=2048", "sa_block_kv_compute=2048"),
    *("sa_block_q_dkv=2048", "sa_block_kv_dkv=2048", "sa_block_kv_dkv_compute=2048"),
    *("sa_block_q_dq=2048", "sa_block_kv_dq=2048", "sa_use_fused_bwd_kernel=true"),
)
_OFFLOADED = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj")

PAIRS = (
    Pair(
        name="llama3.1-70b, v5p 4x4x8",
        flags=V5P_FLAGS,
        recipe="llama3-70b-v5p-4x4x8",
        overrides=("model=llama3.1-70b", "train.global_batch_size=256", "train.vocab_chunks=8"),
        settings=(
            *("model_name=llama3.1-70b", "compile_topology=v5p-256"),
            *("per_device_batch_size=2", "max_target_length=8192", "remat_policy=full"),
        ),
    ),
    Pair(
        name="mixtral-8x7b, v5p 4x4x4",
        flags=(*V5P_FLAGS, "--xla_tpu_scoped_vmem_limit_kib=81920"),
        recipe="mixtral-8x7b-v6e-16x16",
        overrides=(
            *("hardware.generation=v5p", "hardware.topology=4x4x4", "mesh=fsdp"),
            *("train.global_batch_size=256", "train.vocab_chunks=4"),
        ),
        settings=(
            *("model_name=mixtral-8x7b", "compile_topology=v5p-128", "megablox=true"),
            *("per_device_batch_size=4", "max_target_length=4096", "remat_policy=full"),
        ),
    ),
    Pair(
        name="llama3.1-8b, v5e 16x16",
        flags=V5E_FLAGS,
        recipe="llama3-8b-v5e-16x16",
        overrides=("model=llama3.1-8b", "train.vocab_chunks=4"),
        settings=(
            *("model_name=llama3.1-8b", "compile_topology=v5e-256", "use_iota_embed=true"),
            *("per_device_batch_size=1", "max_target_length=8192", "remat_policy=full"),
        ),
    ),
    Pair(
        name="llama3.1-8b, v6e 2x4",
        flags=V6E_FLAGS,
        recipe="llama3-8b-v5e-16x16",
        overrides=(
            *("hardware.generation=v6e", "hardware.topology=2x4", "hardware.chips_per_host=8"),
            *("model=llama3.1-8b", "model.attention_chunk=2048", "train.vocab_chunks=4"),
            *("train.global_batch_size=16", "train.remat_policy=named"),
            "train.remat_offload=[layer_input,query,key,value,attention_projected]",
        ),
        settings=(
            *("model_name=llama3.1-8b", "compile_topology=v6e-8", "use_iota_embed=true"),
            *("per_device_batch_size=2", "max_target_length=8192", "remat_policy=custom"),
            *(f"{name}=offload" for name in _OFFLOADED),
            *_LARGE_BLOCKS,
        ),
    ),
)
"""MaxText's own three sequences a device do not fit v6e 2x4 at 0.2.5; two do, so both have two."""

CPU_RECIPE = "quickstart"
CPU_BATCH, CPU_LENGTH, CPU_STEPS = 8, 256, 12
_WIDTHS: Mapping[str, int] = {
    "num_layers": 4,
    "embed_dim": 512,
    "mlp_dim": 1536,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
_MAXTEXT_NAMES = {
    "num_layers": "base_num_decoder_layers",
    "embed_dim": "base_emb_dim",
    "mlp_dim": "base_mlp_dim",
    "num_heads": "base_num_query_heads",
    "num_kv_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def cpu_overrides(num_devices: int, num_steps: int) -> Sequence[str]:
    """Changes to quickstart: 21 M parameters, one process, its devices as one fsdp axis."""
    return (
        *("multislice=one-slice", "data=synthetic", f"hardware.topology=1x{num_devices}"),
        *(f"model.{key}={value}" for key, value in _WIDTHS.items()),
        *("model.tie_embeddings=false", "model.compute_dtype=float32", "train.remat_policy=none"),
        *(f"train.global_batch_size={CPU_BATCH}", f"train.sequence_length={CPU_LENGTH}"),
        *(f"train.num_steps={num_steps}", "train.eval_num_batches=0"),
        *("checkpoint=by-minutes", "checkpoint.save_interval_minutes=1440"),
        *("optimizer=adamw", "optimizer.warmup_steps=0"),
    )


def cpu_settings(num_devices: int, num_steps: int) -> Sequence[str]:
    """The same for MaxText, without what a run of its kind does not need (clouds, goodput, saves)."""
    return (
        *("hardware=cpu", "skip_jax_distributed_system=true", "enable_goodput_recording=false"),
        *("dataset_type=synthetic", "enable_checkpointing=false", "log_config=false"),
        *(f"{_MAXTEXT_NAMES[key]}={value}" for key, value in _WIDTHS.items()),
        *("dtype=float32", "weight_dtype=float32", "attention=dot_product", "remat_policy=none"),
        *(f"per_device_batch_size={CPU_BATCH // num_devices}", f"max_target_length={CPU_LENGTH}"),
        *(f"steps={num_steps}", "ici_fsdp_parallelism=-1"),
    )

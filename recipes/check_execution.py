"""Rules of `check.py` on how a model is computed: pipeline, attention, experts, remat, precision."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.errors import Problem, problem_of
from recipes.hardware import CPU
from recipes.load import nearest
from recipes.parallelism import MeshShape, recipe_mesh
from recipes.remat import REMAT_TENSORS
from recipes.schema import Recipe

KERNEL_LANES = 128
"""Rows of a block of the splash kernel are multiples of this."""


def check_execution(recipe: Recipe) -> Iterator[Problem]:
    """Problems of keys that say how, not what; silent where the mesh itself is wrong."""
    yield from _check_experts(recipe)
    yield from _check_remat(recipe)
    yield from _check_precision(recipe)
    try:
        mesh = recipe_mesh(recipe)
    except ValueError:
        return
    yield from _check_stages(recipe, mesh)
    yield from _check_grouped_matmul(recipe, mesh)
    yield from _check_attention(recipe, mesh)
    yield from _check_vocabulary(recipe, mesh)


def _check_experts(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.num_experts > 1:
        if model.mlp_activation != "swiglu":
            reason = "is not what experts compute"
            yield problem_of("model.mlp_activation", model.mlp_activation, reason, "use swiglu")
        return
    idle = {
        "num_shared_experts": 0,
        "expert_capacity": None,
        "grouped_matmul": "xla",
        "router_loss_weight": 0.0,
        "router_z_loss_weight": 0.0,
        "router_bias_rate": 0.0,
    }
    for name, unset in idle.items():
        value = getattr(model, name)
        if value != unset:
            fix = f"use model.{name}={'null' if unset is None else unset}, or more experts"
            yield problem_of(f"model.{name}", value, "is for several experts, and model.num_experts=1", fix)


def _check_grouped_matmul(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    model, key = recipe.model, "model.grouped_matmul"
    if model.grouped_matmul == "xla" or model.num_experts == 1:
        return
    if model.expert_capacity is not None:
        reason = "is for dropless experts, and model.expert_capacity is set"
        yield problem_of(key, model.grouped_matmul, reason, "use model.expert_capacity=null, or xla")
    if model.quantization != "none":
        reason = f"does not round to {model.quantization}"
        yield problem_of(key, model.grouped_matmul, reason, "use xla, or model.quantization=none")
    rows = _routed_rows(recipe, mesh)
    if recipe.hardware.generation != CPU and rows % KERNEL_LANES:
        reason = f"takes multiples of {KERNEL_LANES} rows, and a device has {rows} routed tokens at once"
        fix = f"use a train.sequence_length that {KERNEL_LANES * mesh.total['context']} divides, or xla"
        yield problem_of(key, model.grouped_matmul, reason, fix)


def _routed_rows(recipe: Recipe, mesh: MeshShape) -> int:
    """Tokens of a device's part of the batch, times the experts that each is sent to."""
    train, context = recipe.train, mesh.total["context"]
    parts = recipe.mesh.stage_microbatches or mesh.total["stage"]
    sequences = train.global_batch_size // (train.grad_accum_steps * mesh.batch_shards * parts)
    rows = sequences * (train.sequence_length // context) * recipe.model.num_experts_per_token
    return rows * mesh.total["expert"]


def _check_remat(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    for key, names in (("remat_save", train.remat_save), ("remat_offload", train.remat_offload)):
        if names and train.remat_policy != "named":
            reason = f"is for train.remat_policy=named, and it is {train.remat_policy}"
            yield problem_of(
                f"train.{key}", list(names), reason, "use train.remat_policy=named, or leave it out"
            )
        for name in names:
            if name not in REMAT_TENSORS:
                guess = nearest(name, REMAT_TENSORS)
                fix = f"did you mean {guess}?" if guess else f"use some of {', '.join(REMAT_TENSORS)}"
                yield problem_of(f"train.{key}", name, "is not a tensor of a layer", fix)
    for name in sorted(set(train.remat_save) & set(train.remat_offload)):
        yield problem_of("train.remat_offload", name, "is in train.remat_save too", "name it in one of them")


def _check_precision(recipe: Recipe) -> Iterator[Problem]:
    kind, mesh = recipe.model.quantization, recipe.mesh
    if kind == "none":
        return
    if mesh.sharding_mode == "explicit":
        reason = "cannot be computed with mesh.sharding_mode=explicit: qwix knows no sharded types"
        yield problem_of("model.quantization", kind, reason, "use mesh.sharding_mode=auto")
    if mesh.collective_matmul:
        reason = "would leave out the matmuls of mesh.collective_matmul=true"
        yield problem_of("model.quantization", kind, reason, "use mesh.collective_matmul=false")


def _check_stages(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    stages, rounds = mesh.total["stage"], recipe.mesh.stage_rounds
    if stages == 1:
        if rounds > 1:
            reason = "is for a pipeline, and there is one stage"
            yield problem_of("mesh.stage_rounds", rounds, reason, "use 1, or mesh.stage=2 or more")
        return
    if recipe.mesh.sharding_mode == "explicit":
        reason = "cannot be combined with pipeline stages"
        yield problem_of("mesh.sharding_mode", "explicit", reason, "use auto, or mesh.stage=1")
    if recipe.model.dropout_rate > 0:
        reason = "would depend on the microbatches of a pipeline"
        yield problem_of("model.dropout_rate", recipe.model.dropout_rate, reason, "use 0.0, or mesh.stage=1")
    layers = recipe.model.num_layers
    if layers % (stages * rounds):
        reason = f"cannot be dealt out to {stages} stages in {rounds} rounds"
        near = max(layers // (stages * rounds), 1) * stages * rounds
        yield problem_of("model.num_layers", layers, reason, f"use fewer stages or rounds, or {near} layers")
    yield from _check_microbatches(recipe, mesh)


def _check_microbatches(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    stages, rounds = mesh.total["stage"], recipe.mesh.stage_rounds
    parts = recipe.mesh.stage_microbatches or stages
    if rounds > 1 and parts < stages:
        reason = f"is less than the {stages} stages, so a batch would not be round in time for the next round"
        yield problem_of("mesh.stage_microbatches", parts, reason, f"use at least {stages}")
    unit = recipe.train.grad_accum_steps * mesh.batch_shards * parts
    if recipe.train.global_batch_size % unit:
        size = recipe.train.global_batch_size
        reason = f"cannot be divided into {unit} equal parts ({parts} microbatches of every device's share)"
        fix = f"use a multiple of {unit}, or another mesh.stage_microbatches"
        yield problem_of("train.global_batch_size", size, reason, fix)


def _check_attention(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    model, context = recipe.model, mesh.total["context"]
    if model.attention != "splash":
        return
    if recipe.mesh.context_exchange == "ring" and context > 1:
        reason = "is computed in plain XLA, and model.attention is splash"
        fix = "use mesh.context_exchange=all_gather, or model.attention=xla_chunked"
        yield problem_of("mesh.context_exchange", "ring", reason, fix)
    rows = recipe.train.sequence_length // context
    if rows % KERNEL_LANES:
        reason = f"leaves {rows} rows a device, and the splash kernel takes multiples of {KERNEL_LANES}"
        fix = f"use a multiple of {KERNEL_LANES * context}, or model.attention=xla_chunked"
        yield problem_of("train.sequence_length", recipe.train.sequence_length, reason, fix)
    if model.attention_chunk % KERNEL_LANES:
        reason = f"is not a multiple of {KERNEL_LANES}, as blocks of the splash kernel are"
        yield problem_of("model.attention_chunk", model.attention_chunk, reason, "use 512, 1024 or 2048")


def _check_vocabulary(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    size, chunks, shards = recipe.model.vocab_size, recipe.train.vocab_chunks, mesh.total["tensor"]
    if size % (chunks * shards) and size % shards == 0:
        each = size // shards
        fitting = next(part for part in range(chunks, 0, -1) if each % part == 0)
        reason = f"does not divide the {each} tokens of model.vocab_size={size} that a device holds"
        yield problem_of("train.vocab_chunks", chunks, reason, f"use {fitting}")
    separator = recipe.data.document_separator
    if separator is not None and separator >= size:
        reason = f"is not below model.vocab_size={size}"
        yield problem_of("data.document_separator", separator, reason, f"use a token below {size}, or null")

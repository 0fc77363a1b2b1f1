"""The same experiment small enough for this machine: every axis, slice and feature, tiny sizes. Pure.

Mesh axes larger than 1 stay larger than 1, so whatever is divided, gathered or exchanged still is; on CPU
devices, slices are groups of processes. What a number must be divisible by is what the checks ask.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from recipes.hardware import slice_shape
from recipes.parallelism import AXES, MeshShape, recipe_mesh
from recipes.schema import (
    CheckpointConfig,
    DataConfig,
    HardwareConfig,
    MeshConfig,
    ModelConfig,
    MultisliceConfig,
    OptimizerConfig,
    Recipe,
    RunConfig,
    TrainConfig,
)
from recipes.schema_target import TargetConfig

NUM_STEPS = 6
SAVE_INTERVAL_STEPS = 2
_MAX_RESTARTS = 2
"""One for a host that is killed, one for what happens on a busy machine."""
_KERNEL_BLOCK = 128
"""Rows that the splash kernel takes at once, and so its shortest sequence."""
_SEQUENCE = 32
"""Elsewhere; every mesh of degrees up to 2 inside and across slices divides it."""
_WIDTH = 64
_HEAD_DIM = 16
_SYNTHETIC_VOCABULARY = 256


def miniature(recipe: Recipe, *, synthetic_data: bool = False) -> Recipe:
    """``recipe``, which passed its checks, in miniature for CPU devices of this machine.

    Args:
      recipe: of any hardware and target.
      synthetic_data: random tokens instead of the recipe's own data, which may not be here.
    """
    mesh = _halves(recipe_mesh(recipe))
    data = DataConfig(source="synthetic") if synthetic_data else recipe.data
    model = _model(recipe, mesh, data)
    separator = data.document_separator
    if separator is not None:
        data = dataclasses.replace(data, document_separator=min(separator, model.vocab_size - 1))
    return dataclasses.replace(
        recipe,
        run=RunConfig(name=recipe.run.name, root=recipe.run.root, max_restarts=_MAX_RESTARTS),
        hardware=HardwareConfig(generation="cpu", topology=_topology(recipe, mesh)),
        model=model,
        mesh=_mesh(recipe.mesh, mesh),
        multislice=_multislice(mesh),
        data=data,
        optimizer=_optimizer(recipe.optimizer),
        checkpoint=CheckpointConfig(
            save_interval_steps=SAVE_INTERVAL_STEPS, save_interval_minutes=None, keep=recipe.checkpoint.keep
        ),
        target=TargetConfig(kind="local", env=recipe.target.env),
        train=_train(recipe, mesh, model),
    )


def _halves(shape: MeshShape) -> MeshShape:
    """Every degree above 1 as 2."""
    return MeshShape(
        ici={axis: min(shape.ici[axis], 2) for axis in AXES},
        dcn={axis: min(shape.dcn[axis], 2) for axis in AXES},
    )


def _topology(recipe: Recipe, mesh: MeshShape) -> str:
    """Two processes at least where there were several hosts: one a slice, or one slice on two."""
    devices = math.prod(mesh.ici.values())
    one_slice_of_hosts = math.prod(mesh.dcn.values()) == 1 and slice_shape(recipe.hardware).is_multi_host
    num_hosts = 2 if one_slice_of_hosts and devices > 1 else 1
    return f"{num_hosts}x{devices // num_hosts}"


def _mesh(config: MeshConfig, mesh: MeshShape) -> MeshConfig:
    parts, stages = config.stage_microbatches, mesh.total["stage"]
    degrees: dict[str, Any] = {**mesh.ici}
    return dataclasses.replace(
        config,
        **degrees,
        stage_rounds=min(config.stage_rounds, 2),
        stage_microbatches=None if parts is None else min(parts, 2 * stages),
    )


def _multislice(mesh: MeshShape) -> MultisliceConfig:
    dcn = mesh.dcn
    return MultisliceConfig(
        num_slices=math.prod(dcn.values()), data=dcn["data"], stage=dcn["stage"], fsdp=dcn["fsdp"]
    )


def _model(recipe: Recipe, mesh: MeshShape, data: DataConfig) -> ModelConfig:
    model, tensor = recipe.model, mesh.total["tensor"]
    num_kv_heads = max(min(model.num_kv_heads, 2), tensor)
    length = _rows_of_a_device(model)
    window, chunk = model.attention_window, model.attention_chunk
    return dataclasses.replace(
        model,
        **_experts(model, mesh),
        vocab_size=_vocabulary(recipe, mesh, data),
        num_layers=_num_layers(recipe, mesh),
        embed_dim=_WIDTH,
        mlp_dim=_WIDTH,
        num_heads=num_kv_heads * min(model.num_heads // model.num_kv_heads, 2),
        num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM,
        attention_chunk=_KERNEL_BLOCK
        if model.attention == "splash"
        else _power_of_2(min(chunk, length // 2)),
        attention_window=None if window is None else min(window, length // 2),
    )


def _experts(model: ModelConfig, mesh: MeshShape) -> dict[str, Any]:
    if model.num_experts == 1:
        return {}
    per_token = min(model.num_experts_per_token, 2)
    degree = mesh.total["expert"]
    num_experts = max(min(model.num_experts, 4), per_token, degree)
    return {
        "num_experts": _multiple(num_experts, degree),
        "num_experts_per_token": per_token,
        "num_shared_experts": min(model.num_shared_experts, 1),
    }


def _num_layers(recipe: Recipe, mesh: MeshShape) -> int:
    unit = mesh.total["stage"] * min(recipe.mesh.stage_rounds, 2)
    return _multiple(min(recipe.model.num_layers, 2), unit)


def _vocabulary(recipe: Recipe, mesh: MeshShape, data: DataConfig) -> int:
    """Random tokens need few; the recipe's own need all."""
    size = recipe.model.vocab_size
    wanted = min(size, _SYNTHETIC_VOCABULARY) if data.source == "synthetic" else size
    return _multiple(wanted, mesh.total["tensor"] * _vocab_chunks(recipe))


def _vocab_chunks(recipe: Recipe) -> int:
    return min(recipe.train.vocab_chunks, 2)


def _rows_of_a_device(model: ModelConfig) -> int:
    """Positions of a sequence that one device holds, whatever the context axis."""
    return _KERNEL_BLOCK if model.attention == "splash" else _SEQUENCE


def _optimizer(config: OptimizerConfig) -> OptimizerConfig:
    return dataclasses.replace(config, warmup_steps=min(config.warmup_steps, 1))


def _train(recipe: Recipe, mesh: MeshShape, model: ModelConfig) -> TrainConfig:
    train = recipe.train
    accum = min(train.grad_accum_steps, 2)
    parts = _mesh(recipe.mesh, mesh).stage_microbatches or mesh.total["stage"]
    interval, profiled = train.eval_interval_steps, train.profile_start_step is not None
    return dataclasses.replace(
        train,
        num_steps=NUM_STEPS,
        global_batch_size=accum * mesh.batch_shards * parts,
        sequence_length=_rows_of_a_device(model) * mesh.total["context"],
        grad_accum_steps=accum,
        vocab_chunks=_vocab_chunks(recipe),
        profile_start_step=NUM_STEPS // 2 if profiled else None,
        profile_num_steps=1,
        profile_interval_steps=None,
        log_interval_steps=1,
        eval_interval_steps=None if interval is None else NUM_STEPS // 2,
        eval_num_batches=min(train.eval_num_batches, 1),
    )


def _multiple(number: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``number``."""
    return -(-number // unit) * unit


def _power_of_2(number: int) -> int:
    """The largest one that is at most ``number``."""
    return 1 << (number.bit_length() - 1)

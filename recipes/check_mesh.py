"""Rules of `check.py` on what is divided over what: slices, mesh, model dimensions, batch, sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from recipes.errors import Problem, problem_of
from recipes.hardware import CPU, SliceShape, slice_shape
from recipes.parallelism import AXES, BATCH_AXES, MeshShape, mesh_shape
from recipes.schema import Recipe

_DIVIDED_DIMENSIONS = (
    ("num_heads", "tensor"),
    ("num_kv_heads", "tensor"),
    ("mlp_dim", "tensor"),
    ("vocab_size", "tensor"),
    ("embed_dim", "fsdp"),
    ("num_experts", "expert"),
)
"""Model dimensions and the mesh axis that each is divided over."""


def check_mesh(recipe: Recipe) -> Iterator[Problem]:
    """Problems of hardware, mesh, multislice, and of model and batch against them."""
    yield from _check_model(recipe)
    try:
        shape = slice_shape(recipe.hardware)
    except ValueError as error:
        yield _hardware_problem(recipe, str(error))
        return
    yield from _check_multislice_hosts(recipe, shape)
    problems = [*_check_ici(recipe, shape), *_check_dcn(recipe)]
    yield from problems
    if not problems:
        mesh = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=shape.num_devices)
        yield from _check_divided(recipe, mesh)
        yield from _check_batch(recipe, mesh)
        yield from _check_sequence(recipe, mesh)


def _hardware_problem(recipe: Recipe, text: str) -> Problem:
    reason, _, fix = text.partition("; ")
    key = "chips_per_host" if "hardware.chips_per_host" in fix else "topology"
    return problem_of(f"hardware.{key}", getattr(recipe.hardware, key), reason, fix)


def _check_multislice_hosts(recipe: Recipe, shape: SliceShape) -> Iterator[Problem]:
    if recipe.multislice.num_slices > 1 and shape.generation != CPU and not shape.is_multi_host:
        name = f"{shape.generation} {shape.topology_name}"
        yield problem_of(
            "multislice.num_slices",
            recipe.multislice.num_slices,
            f"only slices of several hosts can be joined, and {name} is one host",
            "use one slice with a larger hardware.topology",
        )


def _check_ici(recipe: Recipe, shape: SliceShape) -> Iterator[Problem]:
    degrees = {axis: getattr(recipe.mesh, axis) for axis in AXES}
    what = f"a slice of {shape.generation} {shape.topology_name} has {_counted(shape.num_devices, 'device')}"
    return _check_degrees("mesh", degrees, shape.num_devices, what, "fsdp")


def _check_dcn(recipe: Recipe) -> Iterator[Problem]:
    slices = recipe.multislice
    degrees = {"data": slices.data, "stage": slices.stage, "fsdp": slices.fsdp}
    what = f"the job has {_counted(slices.num_slices, 'slice')}"
    return _check_degrees("multislice", degrees, slices.num_slices, what, "data")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_degrees(
    group: str, degrees: Mapping[str, int], total: int, what: str, usual_axis: str
) -> Iterator[Problem]:
    """Degrees of at least 1, one -1 at most, and a product of ``total``."""
    bad = {axis: degree for axis, degree in degrees.items() if degree < 1 and degree != -1}
    for axis, degree in bad.items():
        yield problem_of(
            f"{group}.{axis}", degree, "is not a degree", "give at least 1, or -1 for what is left"
        )
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    for axis in open_axes[1:]:
        reason = f"only one axis can be -1, and {group}.{open_axes[0]} is already"
        yield problem_of(f"{group}.{axis}", -1, reason, "give a number of at least 1")
    if not bad and len(open_axes) < 2:
        yield from _check_product(group, degrees, total, what, usual_axis)


def _check_product(
    group: str, degrees: Mapping[str, int], total: int, what: str, usual_axis: str
) -> Iterator[Problem]:
    closed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    known, has_open = math.prod(closed.values()), len(closed) < len(degrees)
    if known == total or (has_open and total % known == 0):
        return
    # The largest degree is most likely the mistake.
    axis = max((usual_axis, *closed), key=lambda name: closed.get(name, 0))
    product = " x ".join(f"{name} {degree}" for name, degree in closed.items() if degree > 1) or "all axes 1"
    reason = (
        f"{what}, which {product} does not divide" if has_open else f"{what}, and {product} makes {known}"
    )
    room, rest = divmod(total, known // closed[axis])
    if rest:
        fix = f"make the product of the other axes ({known // closed[axis]}) divide {total}"
    elif has_open:
        fix = f"use a {group}.{axis} that divides {room}: {_listed(_divisors(room))}"
    else:
        fix = f"use {group}.{axis}={room} or -1"
    yield problem_of(f"{group}.{axis}", closed[axis], reason, fix)


def _check_model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.head_dim % 2:
        fix = f"use {model.head_dim + 1} or {model.head_dim - 1}"
        yield problem_of("model.head_dim", model.head_dim, "is odd, and RoPE turns pairs", fix)
    if model.num_heads % model.num_kv_heads:
        fix = f"use a divisor of model.num_heads={model.num_heads}: {_listed(_divisors(model.num_heads))}"
        reason = f"does not divide model.num_heads={model.num_heads}"
        yield problem_of("model.num_kv_heads", model.num_kv_heads, reason, fix)
    if model.family == "llama" and model.num_experts != 1:
        fix = "use model.num_experts=1, or model.family=mixtral"
        yield problem_of("model.num_experts", model.num_experts, "the llama family has no experts", fix)
    if model.family == "mixtral" and model.num_experts == 1:
        fix = "use at least 2, or model.family=llama"
        yield problem_of(
            "model.num_experts", model.num_experts, "the mixtral family has several experts", fix
        )
    if model.num_experts_per_token > model.num_experts:
        reason = f"is more than model.num_experts={model.num_experts}"
        fix = f"use at most {model.num_experts}"
        yield problem_of("model.num_experts_per_token", model.num_experts_per_token, reason, fix)


def _check_divided(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    for name, axis in _DIVIDED_DIMENSIONS:
        size, degree = getattr(recipe.model, name), mesh.total[axis]
        if size % degree == 0:
            continue
        fix = (
            f"use a {axis} degree that divides {size}: {_listed(_divisors(math.gcd(size, mesh.num_devices)))}"
        )
        if name in ("vocab_size", "mlp_dim", "embed_dim"):
            fix += f"; or model.{name}={_multiples_around(size, degree)}"
        yield problem_of(f"model.{name}", size, f"is not divisible by the {axis} axis ({degree})", fix)


def _check_batch(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    train = recipe.train
    unit = train.grad_accum_steps * mesh.batch_shards
    if train.global_batch_size % unit == 0:
        return
    shards = (
        " x ".join(f"{axis} {mesh.total[axis]}" for axis in BATCH_AXES if mesh.total[axis] > 1) or "1 shard"
    )
    parts = f"{shards}" + (
        f" x train.grad_accum_steps {train.grad_accum_steps}" if train.grad_accum_steps > 1 else ""
    )
    yield problem_of(
        "train.global_batch_size",
        train.global_batch_size,
        f"cannot be divided into {unit} equal parts ({parts})",
        f"use the nearest: {_multiples_around(train.global_batch_size, unit)}",
    )


def _check_sequence(recipe: Recipe, mesh: MeshShape) -> Iterator[Problem]:
    length, context = recipe.train.sequence_length, mesh.total["context"]
    # In balanced order a device holds two chunks; between attention and MLP tensor divides them too.
    unit = math.lcm(context if context == 1 else 2 * context, context * mesh.total["tensor"])
    if length % unit:
        axes = [axis for axis in ("context", "tensor") if mesh.total[axis] > 1]
        over = " and ".join(f"{axis} {mesh.total[axis]}" for axis in axes)
        reason = f"cannot be divided into {unit} equal parts (mesh axes {over})"
        fix = f"use the nearest: {_multiples_around(length, unit)}"
        yield problem_of("train.sequence_length", length, reason, fix)
        return
    length //= context
    chunk = recipe.model.attention_chunk
    if recipe.model.attention == "xla_chunked" and chunk < length and length % chunk:
        near = [part for part in _divisors(length) if part <= chunk][-1:]
        near += [part for part in _divisors(length) if part > chunk][:1]
        fix = f"use {' or '.join(map(str, near))}, or model.attention=xla"
        reason = f"does not divide the {length} positions of a sequence that a device holds"
        yield problem_of("model.attention_chunk", chunk, reason, fix)


def _divisors(number: int) -> Sequence[int]:
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def _multiples_around(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _listed(numbers: Sequence[int]) -> str:
    """All of a short list, the ends of a long one."""
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:6]))} ... {numbers[-1]}"

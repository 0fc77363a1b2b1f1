"""The program of a recipe in outline, where there is no compiler: what a step must do, from sizes alone.

The same list of operations as a compiled program makes, so timeline and report are the same too: layers
forward and backward, the loss, the optimizer, and what crosses each mesh axis. A compiler may do better or
worse; docs/prediction.md says by how much.

Legend: t tokens of a device in one part of the batch, d embed_dim, f mlp_dim, h and kv widths of all heads,
v vocab_size; all of one shard of the tensor axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from launcher.preflight.estimate import tensor_widths
from launcher.preflight.kernels import ATTENTION, GROUPED_MATMUL, Kernel
from launcher.preflight.program import Op
from launcher.preflight.rates import overlapping_exchanges
from launcher.preflight.torus import Link, Side, Torus
from recipes.hardware import slice_shape
from recipes.parallelism import AXES, recipe_mesh
from recipes.parameters import DTYPE_BYTES, parameter_groups, sharded_count
from recipes.schema import Recipe

# Reads and writes of each width in a layer forward: norms and residuals; rotation and layouts around
# attention; activation and gate. Backward has twice as many.
_STREAM_PASSES, _HEAD_PASSES, _MLP_PASSES = 8, 6, 3
_DISPATCH_PASSES = 4
_LOGIT_PASSES = 4
_FLOAT32_BYTES = 4
_RECOMPUTED: Mapping[str, Sequence[str]] = {
    "none": (),
    "minimal": (),
    "full": ("query", "key", "value", "attention_projected", "mlp_gate", "mlp_up"),
}


def outline(recipe: Recipe) -> Sequence[Op]:
    """Of a recipe for TPUs."""
    return tuple(_Outline(recipe).ops())


def axis_links(degrees: Mapping[str, int], torus: Torus) -> Mapping[str, Link]:
    """Sides of the torus by mesh axis, as `jax.experimental.mesh_utils` gives them out: innermost axis first,
    the fewest whole sides that make its degree; else a part of what is left."""
    left = {place: side for place, side in enumerate(torus.topology) if side > 1}
    links: dict[str, Link] = {}
    cores = torus.devices_per_chip
    for axis in reversed(AXES):
        degree = degrees[axis]
        if degree > 1 and cores > 1 and degree % cores == 0:
            degree, cores = degree // cores, 1
        taken = _whole_sides(degree, left)
        if taken is None:
            links[axis] = Link(sides=_parts(degree, left, torus))
            continue
        links[axis] = Link(sides=tuple(Side(size=left[at], wraps=_wraps(torus, at, left)) for at in taken))
        for at in taken:
            del left[at]
    return links


def _wraps(torus: Torus, place: int, left: Mapping[int, int]) -> bool:
    return torus.wrap[place] and left[place] == torus.topology[place]


def _whole_sides(degree: int, left: Mapping[int, int]) -> Sequence[int] | None:
    for count in range(len(left) + 1):
        for places in itertools.combinations(left, count):
            if math.prod(left[place] for place in places) == degree:
                return places
    return None


def _parts(degree: int, left: dict[int, int], torus: Torus) -> tuple[Side, ...]:
    """A share of each side until the degree is made; what is taken is no longer there."""
    sides = []
    for place in sorted(left, key=lambda at: -left[at]):
        size = math.gcd(degree, left[place])
        if size > 1:
            wraps = torus.wrap[place] and size == torus.topology[place]
            sides.append(Side(size=size, wraps=wraps))
            degree //= size
            left[place] //= size
    return tuple(sides)


class _Outline:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.mesh = recipe, recipe_mesh(recipe)
        shape = slice_shape(recipe.hardware)
        self.links = axis_links(self.mesh.ici, Torus.of(shape))
        model, train, total = recipe.model, recipe.train, self.mesh.total
        self.element_bytes = DTYPE_BYTES[model.compute_dtype]
        self.parts = train.grad_accum_steps
        shards = self.parts * self.mesh.batch_shards * total["context"]
        self.tokens = train.global_batch_size * train.sequence_length // shards
        self.layers = model.num_layers // total["stage"]
        tensor = total["tensor"]
        self.heads = model.num_heads * model.head_dim // tensor
        self.kv_heads = model.num_kv_heads * model.head_dim // tensor
        experts = model.num_experts_per_token if model.num_experts > 1 else 1
        self.hidden = (experts + model.num_shared_experts) * model.mlp_dim // tensor
        self.layer_bytes = self.element_bytes * sum(
            sharded_count(group, self.mesh) * total["fsdp"] // self.layers
            for group in parameter_groups(model)
            if "fsdp" in group.axes and "stage" in group.axes
        )

    def ops(self) -> Iterator[Op]:
        stages = self.mesh.total["stage"]
        microbatches = (self.recipe.mesh.stage_microbatches or stages) * self.recipe.mesh.stage_rounds
        # A pipeline is filled and emptied once a round.
        bubble = (microbatches + stages - 1) / microbatches
        rounds = max(1, round(self.layers * self.parts * bubble))
        yield Op(name="forward", category="loop", body=tuple(self._forward()), rounds=rounds)
        yield from self._loss()
        yield Op(name="backward", category="loop", body=tuple(self._backward()), rounds=rounds)
        yield from self._gradients_across_slices()
        yield self._optimizer()

    def _matmuls(self) -> Mapping[str, int]:
        """FLOPs forward by the tensor of `recipes/remat.py` that is made; ``mlp_out`` is the last."""
        width = self.recipe.model.embed_dim
        in_and_out = {
            "query": self.heads,
            "key": self.kv_heads,
            "value": self.kv_heads,
            "attention_projected": self.heads,
            "mlp_up": self.hidden,
            "mlp_out": self.hidden,
        }
        if self.recipe.model.mlp_activation == "swiglu":
            in_and_out["mlp_gate"] = self.hidden
        return {name: 2 * self.tokens * width * other for name, other in in_and_out.items()}

    def _forward(self) -> Iterator[Op]:
        waits: list[Op] = []
        yield from self._overlapped(self._gathered_weights(), waits)
        yield from _pairs(self._offloaded("to host"), waits)
        yield from _pairs(self._exchanged_activations(2), waits)
        yield from self._exchanged_tokens(1)
        yield from self._work(self._matmuls(), 1, 1)
        yield from waits

    def _backward(self) -> Iterator[Op]:
        waits: list[Op] = []
        train, matmuls = self.recipe.train, self._matmuls()
        yield from self._overlapped(self._gathered_weights(), waits)
        yield from self._overlapped(self._scattered_gradients(), waits)
        yield from _pairs(self._offloaded("from host"), waits)
        again = set(_RECOMPUTED[train.remat_policy if train.remat_policy in _RECOMPUTED else "full"])
        if train.remat_policy == "named":
            again -= {*train.remat_save, *train.remat_offload}
        recomputed = {name: flops for name, flops in matmuls.items() if name in again}
        # Forward again, and backward: of gathered inputs and of gathered gradients.
        yield from _pairs(self._exchanged_activations(6 if len(recomputed) > 2 else 4), waits)
        yield from self._exchanged_tokens(3 if "mlp_up" in again else 2)
        if train.remat_policy != "none":
            kept = (*train.remat_save, *train.remat_offload)
            yield from self._work(recomputed, 1, 1, attends="attention_out" not in kept)
        yield from self._work(matmuls, 2, 2)
        yield from waits

    def _overlapped(self, ops: Iterator[Op], waits: list[Op]) -> Iterator[Op]:
        """Exchanges of weights and gradients; beside other work where the compiler overlaps their kind."""
        overlapping = overlapping_exchanges(self.recipe.hardware.generation)
        for op in ops:
            if op.lane == "dcn" or op.category in overlapping:
                yield from _pairs(iter([op]), waits)
            else:
                yield op

    def _work(
        self, matmuls: Mapping[str, int], factor: int, passes: int, *, attends: bool = True
    ) -> Iterator[Op]:
        """Matmuls of one layer, attention, and what is read and written around them."""
        model = self.recipe.model
        is_grouped = model.num_experts > 1
        dense = sum(flops for name, flops in matmuls.items() if not (is_grouped and name.startswith("mlp")))
        grouped = sum(matmuls.values()) - dense
        yield Op(
            name=f"matmuls x{factor}",
            category="matmul",
            flops=factor * dense,
            size_bytes=factor * self.layer_bytes,
        )
        if grouped and model.expert_capacity is None:
            kernel = Kernel(category=GROUPED_MATMUL, flops=factor * grouped, width=_WIDE)
            yield Op(name=f"experts x{factor}", category=GROUPED_MATMUL, kernel=kernel)
        elif grouped:
            flops = round(factor * grouped * (model.expert_capacity or 1))
            yield Op(name=f"experts x{factor}", category="matmul", flops=flops)
        if attends:
            yield self._attention(factor)
        width = _STREAM_PASSES * model.embed_dim // self.mesh.total["tensor"]
        if is_grouped:
            width += _DISPATCH_PASSES * model.num_experts_per_token * model.embed_dim
        width += _HEAD_PASSES * (self.heads + 2 * self.kv_heads) + _MLP_PASSES * self.hidden
        size = passes * self.tokens * width * self.element_bytes
        yield Op(name=f"elementwise x{passes}", category="elementwise", size_bytes=size)

    def _attention(self, factor: int) -> Op:
        """Two matmuls of the score matrix forward; seven backward, in two kernels."""
        keys = self.recipe.train.sequence_length
        matmuls = 2 if factor == 1 else 7
        flops = 2 * matmuls * self.tokens * keys * self.heads
        kernel = Kernel(category=ATTENTION, flops=flops, width=self.recipe.model.head_dim)
        return Op(name=f"attention x{factor}", category=ATTENTION, kernel=kernel)

    def _loss(self) -> Iterator[Op]:
        """Logits forward, again backward, and the gradients of both factors."""
        model = self.recipe.model
        logits = self.tokens * model.vocab_size // self.mesh.total["tensor"]
        table_bytes = model.vocab_size * model.embed_dim * self.element_bytes
        table_bytes //= self.mesh.total["tensor"]
        for number in range(self.parts):
            for use in ("forward", "backward"):
                yield from self._exchange(f"output table {use} {number}", "all-gather", "fsdp", table_bytes)
            yield Op(name=f"logits {number}", category="matmul", flops=8 * logits * model.embed_dim)
            size = _LOGIT_PASSES * logits * _FLOAT32_BYTES
            yield Op(name=f"softmax {number}", category="elementwise", size_bytes=size)
            yield from self._exchange(f"output gradient {number}", self._scatter(), "fsdp", table_bytes)

    def _optimizer(self) -> Op:
        """Weights, both moments and gradients read, all but the gradients written."""
        optimizer, model = self.recipe.optimizer, self.recipe.model
        moments = DTYPE_BYTES[optimizer.first_moment_dtype] + DTYPE_BYTES[optimizer.second_moment_dtype]
        each = 2 * (DTYPE_BYTES[model.weight_dtype] + moments) + DTYPE_BYTES[model.weight_dtype]
        return Op(name="optimizer", category="elementwise", size_bytes=each * self._held())

    def _held(self) -> int:
        """Parameters of one device."""
        return sum(sharded_count(group, self.mesh) for group in parameter_groups(self.recipe.model))

    def _gathered_weights(self) -> Iterator[Op]:
        yield from self._exchange("weights", "all-gather", "fsdp", self.layer_bytes)

    def _scattered_gradients(self) -> Iterator[Op]:
        yield from self._exchange("gradients", self._scatter(), "fsdp", self.layer_bytes)
        held = self.layer_bytes // self.mesh.total["fsdp"]
        yield from self._exchange("gradients of replicas", "all-reduce", "data", held)

    def _scatter(self) -> str:
        """How gradients are summed over fsdp: where all sides of the torus wrap libtpu sums them whole,
        unless it can overlap that (docs/compiled.md has the collectives of programs)."""
        sides = self.links["fsdp"].sides
        overlapping = overlapping_exchanges(self.recipe.hardware.generation)
        whole = sides and all(side.wraps for side in sides) and "reduce-scatter" not in overlapping
        return "all-reduce" if whole else "reduce-scatter"

    def _gradients_across_slices(self) -> Iterator[Op]:
        held = self._held() * self.element_bytes
        degree = self.mesh.dcn["data"]
        if degree > 1:
            yield Op(
                name="gradients across slices",
                category="all-reduce",
                lane="dcn",
                size_bytes=held,
                group_size=degree,
                axes="dcn:data",
            )

    def _exchanged_activations(self, pairs: int) -> Iterator[Op]:
        """Between the shards of the tensor axis, around attention and around the MLP."""
        stream = self.tokens * self.recipe.model.embed_dim * self.element_bytes
        for place in range(pairs):
            yield from self._exchange(f"into {place}", "all-gather", "tensor", stream)
            yield from self._exchange(f"out of {place}", "reduce-scatter", "tensor", stream)

    def _exchanged_tokens(self, times: int) -> Iterator[Op]:
        """Keys and values of the whole sequence; tokens to their experts and back."""
        model, total = self.recipe.model, self.mesh.total
        keys = 2 * times * self.tokens * total["context"] * self.kv_heads * self.element_bytes
        yield from self._exchange("keys and values", "all-gather", "context", keys)
        stream = self.tokens * model.embed_dim * self.element_bytes // total["tensor"]
        sent = round(2 * times * model.num_experts_per_token * (model.expert_capacity or 1) * stream)
        yield from self._exchange("tokens to experts", "all-to-all", "expert", sent)

    def _offloaded(self, category: str) -> Iterator[Op]:
        train = self.recipe.train
        if train.remat_policy != "named" or not train.remat_offload:
            return
        widths = tensor_widths(self.recipe.model, self.mesh)
        size = self.tokens * self.element_bytes * sum(widths[name] for name in train.remat_offload)
        yield Op(name=category, category=category, lane="host", size_bytes=size)

    def _exchange(self, name: str, kind: str, axis: str, size_bytes: int) -> Iterator[Op]:
        """Inside of a slice, and across slices where the axis goes on there."""
        inside, across = self.mesh.ici[axis], self.mesh.dcn[axis]
        if inside > 1 and size_bytes:
            yield Op(
                name=f"{name}, {axis}",
                category=kind,
                lane="ici",
                size_bytes=size_bytes,
                link=self.links[axis],
                group_size=inside,
                axes=axis,
            )
        if across > 1 and axis != "data" and size_bytes:
            yield Op(
                name=f"{name}, {axis} across slices",
                category=kind,
                lane="dcn",
                size_bytes=size_bytes // inside,
                group_size=across,
                axes=f"dcn:{axis}",
            )


_WIDE = 2**20
"""No dimension of it is narrower than a matrix unit."""


def _pairs(ops: Iterator[Op], waits: list[Op]) -> Iterator[Op]:
    """Starts of what may go on beside other work; appends the waits for them."""
    for op in ops:
        waits.append(Op(name=f"{op.name} done", category="wait", awaits=op.name))
        yield dataclasses.replace(op, is_start=True)

"""HBM of a device from sizes alone, where there is no TPU compiler. Pure; docs/preflight.md says how near.

At the peak, in the backward pass of the layers or of the loss, a device holds its state, the gradients
of all its weights, their copies in the compute dtype, what rematerialization saves of every layer, and
the work of one layer or of one part of the vocabulary.

Tokens are those of a device: of its part of the batch, of one accumulation and one microbatch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.hardware import generation
from recipes.parallelism import MeshShape, recipe_mesh
from recipes.parameters import DTYPE_BYTES, parameter_groups, sharded_count, state_bytes_per_device
from recipes.remat import REMAT_TENSORS
from recipes.schema import ModelConfig, Recipe

USABLE_SHARE = 0.98
"""Of the HBM of a chip, left to programs: libtpu 0.0.50.1 leaves 98.4 % of v5e and 97.6 % of v6e."""
_INT32_BYTES = 4
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the need."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a device needs, and what it has for programs."""

    parts: Sequence[Part]
    usable_hbm_bytes: int

    @property
    def hbm_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def estimate(recipe: Recipe) -> Estimate:
    """Of a recipe for TPUs."""
    chip = generation(recipe.hardware.generation)
    assert chip.hbm_bytes is not None
    return Estimate(
        parts=tuple(_parts(recipe, recipe_mesh(recipe))),
        usable_hbm_bytes=int(USABLE_SHARE * chip.hbm_bytes // chip.devices_per_chip),
    )


def _parts(recipe: Recipe, mesh: MeshShape) -> Iterator[Part]:
    model, train = recipe.model, recipe.train
    sizes = _Sizes(recipe, mesh)
    yield Part(name="weights and optimizer state", size_bytes=state_bytes_per_device(recipe, mesh))
    weights = sum(sharded_count(group, mesh) for group in parameter_groups(model))
    yield Part(name="gradients", size_bytes=weights * DTYPE_BYTES[model.weight_dtype])
    if model.weight_dtype != model.compute_dtype:
        yield Part(name="weights to compute with", size_bytes=weights * sizes.element_bytes)
    yield Part(name="saved for the backward pass", size_bytes=sizes.saved_bytes())
    layer, loss = sizes.layer_bytes(), sizes.loss_bytes(train.vocab_chunks)
    name = "work of a layer" if layer > loss else "work of the loss"
    yield Part(name=name, size_bytes=max(layer, loss))


class _Sizes:
    """Bytes of activations of one device."""

    def __init__(self, recipe: Recipe, mesh: MeshShape) -> None:
        self.recipe, self.mesh = recipe, mesh
        self.element_bytes = DTYPE_BYTES[recipe.model.compute_dtype]
        train = recipe.train
        parts = train.grad_accum_steps * mesh.batch_shards * mesh.total["context"]
        self.tokens = train.global_batch_size * train.sequence_length // parts
        """Of one accumulation, all microbatches."""
        stages = mesh.total["stage"]
        self.tokens_at_once = self.tokens // (recipe.mesh.stage_microbatches or stages)
        self.layers = recipe.model.num_layers // stages

    def saved_bytes(self) -> int:
        """By the policy; what is offloaded is not in HBM."""
        train = self.recipe.train
        widths = tensor_widths(self.recipe.model, self.mesh)
        saved: set[str] = {
            "none": set(REMAT_TENSORS),
            "minimal": set(REMAT_TENSORS) - {"attention_out"},
            "full": {"layer_input"},
            "named": {"layer_input", *train.remat_save},
        }[train.remat_policy]
        offloaded = set(train.remat_offload) if train.remat_policy == "named" else set()
        size = sum(widths[name] for name in saved - offloaded) * self.element_bytes
        if train.remat_policy == "none":
            size += _FLOAT32_BYTES * self._kept_floats(widths)
        return self.layers * self.tokens * size

    def _kept_floats(self, widths: Mapping[str, int]) -> int:
        """Of a layer where nothing is computed anew, in float32: sums and norms of the residual stream,
        queries before and after RoPE, and the activation with its argument and its slope."""
        return 4 * widths["layer_input"] + 2 * widths["query"] + 3 * widths["mlp_up"]

    def layer_bytes(self) -> int:
        """One layer backward: its weights and their gradients whole, and its activations and theirs."""
        model, total = self.recipe.model, self.mesh.total
        matrices = sum(
            group.count * total["fsdp"] // (model.num_layers * self._divided_by(group.axes))
            for group in parameter_groups(model)
            if "stage" in group.axes
        )
        widths = tensor_widths(model, self.mesh)
        mlp = widths["mlp_gate"] + widths["mlp_up"]
        attention = sum(widths[name] for name in ("query", "key", "value", "attention_out"))
        # gate, up and what comes of them, each with its gradient; the kernel's normaliser is in float32
        activations = self.tokens_at_once * (3 * mlp + 2 * attention + 2 * widths["layer_input"])
        return (matrices + activations) * self.element_bytes

    def loss_bytes(self, num_chunks: int) -> int:
        """Logits of one part of the vocabulary in float32, and their gradient in the compute dtype."""
        model = self.recipe.model
        rows = model.vocab_size // (self.mesh.total["tensor"] * num_chunks)
        logits = self.tokens * rows * (_FLOAT32_BYTES + self.element_bytes)
        return logits + 2 * rows * model.embed_dim * self.element_bytes

    def _divided_by(self, axes: Sequence[str]) -> int:
        product = 1
        for axis in axes:
            if axis != "stage":
                product *= self.mesh.total[axis]
        return product


def tensor_widths(model: ModelConfig, mesh: MeshShape) -> Mapping[str, int]:
    """Elements of each tensor of `recipes/remat.py` for one token, on one device."""
    tensor = mesh.total["tensor"]
    heads = model.num_heads * model.head_dim // tensor
    kv_heads = model.num_kv_heads * model.head_dim // tensor
    residual = model.embed_dim // tensor
    # A token is in as many rows as it has experts; a capacity or an expert axis moves them, on average.
    hidden = model.num_experts_per_token * model.mlp_dim // tensor
    return {
        "layer_input": residual,
        "query": heads,
        "key": kv_heads,
        "value": kv_heads,
        "attention_out": heads,
        "attention_projected": residual,
        "mlp_gate": hidden if model.mlp_activation == "swiglu" else 0,
        "mlp_up": hidden,
        "mlp_out": residual,
    }

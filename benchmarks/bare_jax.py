"""The yardstick: the same Llama model, batch and optimizer as a recipe, in plain JAX on one page.

Nothing of Muster but the recipe's numbers: no NNX, no input pipeline, no metrics, no checkpoints.
Also the reference that the trainer's decoder is tested against. One process, weights divided over
all devices (FSDP) as a hand-written script would. ``python -m benchmarks.bare_jax RECIPE.yaml`` trains
for the recipe's steps and prints the seconds of each as JSON.

Legend: b batch, t position, s key position, d embed, n query head, k key/value head, h head width,
g query heads of a key/value head, f MLP width, v vocabulary, l layer.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.load import recipe_from_dict
from recipes.schema import ModelConfig, OptimizerConfig, Recipe

Weights = dict[str, jax.Array]


def norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon) * scale).astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    t, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(t)[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def layer(config: ModelConfig, x: jax.Array, w: Weights) -> jax.Array:
    dtype, t = x.dtype, x.shape[1]
    w = {name: value.astype(dtype) for name, value in w.items()}
    y = norm(x, w["attention_norm"], config.norm_epsilon)
    q = rotate(jnp.einsum("btd,dnh->btnh", y, w["q"]), config.rope_theta)
    k = rotate(jnp.einsum("btd,dkh->btkh", y, w["k"]), config.rope_theta)
    v = jnp.einsum("btd,dkh->btkh", y, w["v"])
    q = q.reshape(*q.shape[:2], config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores / config.head_dim**0.5, -jnp.inf)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores).astype(dtype), v)
    mixed = mixed.reshape(*mixed.shape[:2], config.num_heads, config.head_dim)
    x = x + jnp.einsum("btnh,nhd->btd", mixed, w["o"])
    y = norm(x, w["mlp_norm"], config.norm_epsilon)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def forward(
    config: ModelConfig,
    weights: dict[str, Any],
    tokens: jax.Array,
    by_row: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Logits (b, t, v) in float32; ``by_row`` keeps activations divided as the batch is."""
    dtype = jnp.dtype(config.compute_dtype)
    x = by_row(weights["embedding"].astype(dtype)[tokens])
    x, _ = jax.lax.scan(lambda x, w: (by_row(layer(config, x, w)), None), x, weights["layers"])
    x = norm(x, weights["final_norm"], config.norm_epsilon)
    output = weights["embedding"] if config.tie_embeddings else weights["output"]
    return by_row(jnp.einsum("btd,vd->btv", x, output.astype(dtype), preferred_element_type=jnp.float32))


def weights_of(params: dict[str, Any]) -> dict[str, Any]:
    """The trainer's weights under this page's names, to start both from the same numbers."""
    blocks = params["blocks"]
    layers = {
        "attention_norm": blocks["attention_norm"]["scale_d"],
        "q": blocks["attention"]["q_dnh"],
        "k": blocks["attention"]["k_dkh"],
        "v": blocks["attention"]["v_dkh"],
        "o": blocks["attention"]["o_nhd"],
        "mlp_norm": blocks["mlp_norm"]["scale_d"],
        "gate": blocks["mlp"]["gate_df"],
        "up": blocks["mlp"]["up_df"],
        "down": blocks["mlp"]["down_fd"],
    }
    weights = {
        "embedding": params["embedding_vd"],
        "layers": layers,
        "final_norm": params["final_norm"]["scale_d"],
    }
    return weights if "output_vd" not in params else {**weights, "output": params["output_vd"]}


def new_weights(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    d, f, v, n_l = config.embed_dim, config.mlp_dim, config.vocab_size, config.num_layers
    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (d, n, h), "k": (d, k, h), "v": (d, k, h), "o": (n, h, d)}
    shapes |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
    keys = iter(jax.random.split(key, len(shapes) + 2))
    layers = {name: 0.02 * jax.random.normal(next(keys), (n_l, *shape)) for name, shape in shapes.items()}
    layers |= {"attention_norm": jnp.ones((n_l, d)), "mlp_norm": jnp.ones((n_l, d))}
    weights = {"embedding": 0.02 * jax.random.normal(next(keys), (v, d)), "layers": layers}
    weights["final_norm"] = jnp.ones(d)
    if not config.tie_embeddings:
        weights["output"] = 0.02 * jax.random.normal(next(keys), (v, d))
    return weights


def make_optimizer(o: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW, warm-up and cosine, clipping; norms are not decayed."""
    end_value = o.learning_rate * o.final_learning_rate_fraction
    rate = optax.warmup_cosine_decay_schedule(0.0, o.learning_rate, o.warmup_steps, num_steps, end_value)

    def decayed(weights: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, weights)

    adamw = optax.adamw(rate, o.b1, o.b2, o.epsilon, weight_decay=o.weight_decay, mask=decayed)
    return adamw if o.clip_norm is None else optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)


def step_times(recipe: Recipe) -> list[float]:
    """Seconds between the ends of steps; each loss is read while the next step runs."""
    train = recipe.train
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    optimizer = make_optimizer(recipe.optimizer, train.num_steps)

    def loss(weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
        by_row = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731
        logits = forward(recipe.model, weights, tokens[:, :-1], by_row)
        value: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return value

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, value

    def placed(leaf: jax.Array) -> jax.Array:
        """Divides the embed dimension, or else the first that the devices divide."""
        sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
        spec: list[str | None] = [None] * leaf.ndim
        if any(sizes):
            spec[sizes.index(recipe.model.embed_dim) if recipe.model.embed_dim in sizes else 0] = "fsdp"
        divided: jax.Array = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
        return divided

    weights = jax.tree.map(placed, new_weights(recipe.model, jax.random.key(train.seed)))
    opt_state = jax.tree.map(placed, optimizer.init(weights))
    shape = (train.global_batch_size, train.sequence_length + 1)
    batches = np.random.default_rng(0).integers(recipe.model.vocab_size, size=(8, *shape), dtype=np.int32)
    ends_s: list[float] = []
    previous: jax.Array | None = None
    for index in range(train.num_steps):
        weights, opt_state, value = step(weights, opt_state, jax.device_put(batches[index % 8], rows))
        if previous is not None:
            float(previous)
            ends_s.append(time.perf_counter())
        previous = value
    jax.block_until_ready(weights)  # a process must not end under a running program
    return np.diff(ends_s).tolist()


def main() -> None:
    recipe = recipe_from_dict(yaml.safe_load(Path(sys.argv[1]).read_text()))
    json.dump(step_times(recipe), sys.stdout)


if __name__ == "__main__":
    main()

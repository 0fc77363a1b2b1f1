"""The yardstick: the same Llama model, batch and optimizer as a recipe, in plain JAX on one page.

Nothing of Muster but the recipe's numbers: no NNX, no input pipeline, no metrics, no checkpoints.
Also the reference that the trainer's decoder is tested against. One process, weights divided over
all devices (FSDP) as a hand-written script would.

Legend: b batch, t position, s key position, d embed, n query head, k key/value head, h head width,
g query heads of a key/value head, f MLP width, v vocabulary, l layer.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.schema import ModelConfig, Recipe

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


def forward(config: ModelConfig, weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Logits (b, t, v) in float32."""
    dtype = jnp.dtype(config.compute_dtype)
    x = weights["embedding"].astype(dtype)[tokens]
    x, _ = jax.lax.scan(lambda x, w: (layer(config, x, w), None), x, weights["layers"])
    x = norm(x, weights["final_norm"], config.norm_epsilon)
    output = weights["embedding"].T if config.tie_embeddings else weights["output"]
    return jnp.einsum("btd,dv->btv", x, output.astype(dtype), preferred_element_type=jnp.float32)


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
    return weights if "output_dv" not in params else {**weights, "output": params["output_dv"]}


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
        weights["output"] = 0.02 * jax.random.normal(next(keys), (d, v))
    return weights


def step_times(recipe: Recipe, num_steps: int) -> list[float]:
    """Seconds of each of ``num_steps`` steps after compilation; one sync per step, as by hand."""
    train, o = recipe.train, recipe.optimizer
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    optimizer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm or 1.0),
        optax.adamw(o.learning_rate, o.b1, o.b2, o.epsilon, weight_decay=o.weight_decay),
    )

    def loss(weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
        logits = forward(recipe.model, weights, tokens[:, :-1])
        value: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return value

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, value

    def placed(leaf: jax.Array) -> jax.Array:
        """Divides the first dimension that the devices divide."""
        spec: list[str | None] = [None] * leaf.ndim
        whole = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
        if whole:
            spec[whole[0]] = "fsdp"
        divided: jax.Array = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
        return divided

    weights = jax.tree.map(placed, new_weights(recipe.model, jax.random.key(0)))
    opt_state = jax.tree.map(placed, optimizer.init(weights))
    shape = (train.global_batch_size, train.sequence_length + 1)
    batches = np.random.default_rng(0).integers(recipe.model.vocab_size, size=(8, *shape), dtype=np.int32)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    times_s = []
    for index in range(num_steps + 2):
        start_s = time.perf_counter()
        tokens = jax.device_put(batches[index % 8], rows)
        weights, opt_state, value = step(weights, opt_state, tokens)
        value.block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    return times_s[2:]

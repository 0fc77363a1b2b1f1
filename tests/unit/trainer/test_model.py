"""The decoder against independent references: the hand-written one in benchmarks/, and NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import bare_jax
from recipes.schema import Recipe
from trainer.attention import AttentionSpec, Places, attend
from trainer.execution import Execution, execution_of
from trainer.loss import logits_of
from trainer.models.decoder import Decoder
from trainer.models.layers import RMSNorm
from trainer.models.moe import Experts
from trainer.models.router import router_loss

MakeRecipe = Callable[..., Recipe]


def decoder(recipe: Recipe) -> Decoder:
    return Decoder(recipe.model, execution_of(recipe), rngs=nnx.Rngs(params=jax.random.key(0)))


def places(length: int) -> Places:
    return Places(jnp.arange(length, dtype=jnp.int32), None)


def logits(model: Decoder, tokens_bt: jax.Array, key: jax.Array | None = None) -> jax.Array:
    return logits_of(model(tokens_bt, places(tokens_bt.shape[1]), key)[0], model.table_vd)


def tokens(recipe: Recipe) -> jax.Array:
    shape = (recipe.train.global_batch_size, recipe.train.sequence_length)
    return jax.random.randint(jax.random.key(1), shape, 0, recipe.model.vocab_size)


@pytest.mark.parametrize(
    ("tied", "policy", "attention"),
    [(False, "none", "xla"), (True, "full", "xla_chunked"), (False, "minimal", "xla")],
)
def test_decoder_equals_hand_written_model(
    small: MakeRecipe, tied: bool, policy: str, attention: str
) -> None:
    recipe = small(
        {
            "model.tie_embeddings": tied,
            "train.remat_policy": policy,
            "model.attention": attention,
            "model.attention_chunk": 4,
        }
    )
    model = decoder(recipe)
    graphdef, state = nnx.split(model)

    def ours(params: dict[str, object]) -> jax.Array:
        merged = nnx.merge(graphdef, nnx.State(jax.tree.map(nnx.Param, params)))
        return jnp.sum(jnp.square(logits(merged, tokens(recipe))))

    def reference(params: dict[str, object]) -> jax.Array:
        weights = bare_jax.weights_of(params)
        return jnp.sum(jnp.square(bare_jax.forward(recipe.model, weights, tokens(recipe))))

    params = nnx.to_pure_dict(state)
    value, grads = jax.value_and_grad(ours)(params)
    expected_value, expected_grads = jax.value_and_grad(reference)(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), grads, expected_grads)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_attention_equals_numpy(kv_heads: int, implementation: str) -> None:
    b, t, n, h = 2, 8, 4, 6
    rng = np.random.default_rng(0)
    q = rng.normal(size=(b, t, n, h)).astype(np.float32)
    k = rng.normal(size=(b, t, kv_heads, h)).astype(np.float32)
    v = rng.normal(size=(b, t, kv_heads, h)).astype(np.float32)
    expected = np.zeros_like(q)
    for row in range(b):
        for head in range(n):
            group = head // (n // kv_heads)
            for position in range(t):
                scores = k[row, : position + 1, group] @ q[row, position, head] / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                expected[row, position, head] = weights / weights.sum() @ v[row, : position + 1, group]
    spec = AttentionSpec(implementation=implementation, chunk=2)  # type: ignore[arg-type]
    out = attend(jnp.array(q), jnp.array(k), jnp.array(v), places(t), spec)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


def test_no_position_sees_the_future(small: MakeRecipe) -> None:
    recipe = small()
    model = decoder(recipe)
    before = tokens(recipe)
    changed = before.at[:, 9].set((before[:, 9] + 1) % recipe.model.vocab_size)
    same, other = logits(model, before), logits(model, changed)
    np.testing.assert_array_equal(same[:, :9], other[:, :9])
    assert not np.array_equal(same[:, 9:], other[:, 9:])


def test_rms_norm_has_unit_mean_square() -> None:
    x = 5 * jax.random.normal(jax.random.key(0), (2, 3, 64))
    normal = RMSNorm(64, 1e-6)(x)
    np.testing.assert_allclose(jnp.mean(jnp.square(normal), -1), 1, rtol=1e-4)


def test_experts_equal_a_loop_over_tokens(small: MakeRecipe) -> None:
    recipe = small({"model.family": "mixtral", "model.num_experts": 4, "model.num_experts_per_token": 2})
    experts = Experts(recipe.model, Execution(), rngs=nnx.Rngs(params=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (2, 5, recipe.model.embed_dim))
    out, stats = experts(x)
    matrices = (experts.router.router_de, experts.gate_edf, experts.up_edf, experts.down_efd)
    router, gate, up, down = (np.asarray(w[...]) for w in matrices)
    for row in np.ndindex(2, 5):
        token = np.asarray(x)[row]
        logits = token @ router
        chosen = np.argsort(-logits)[:2]
        share = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        hidden = [np.asarray(jax.nn.silu(token @ gate[e])) * (token @ up[e]) for e in chosen]
        expected = sum(s * h @ down[e] for s, h, e in zip(share, hidden, chosen, strict=True))
        np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5)
    balance = router_loss(
        dataclasses.replace(recipe.model, router_loss_weight=1.0), jax.tree.map(lambda x: x[None], stats)
    )
    assert 1.0 <= float(balance) < 4.0


def test_dropout_follows_its_key(small: MakeRecipe) -> None:
    recipe = small({"model.dropout_rate": 0.5})
    model = decoder(recipe)
    first = logits(model, tokens(recipe), jax.random.key(1))
    np.testing.assert_array_equal(first, logits(model, tokens(recipe), jax.random.key(1)))
    assert not np.array_equal(first, logits(model, tokens(recipe), jax.random.key(2)))
    assert not np.array_equal(first, logits(model, tokens(recipe)))


def test_bfloat16_keeps_float32_weights_and_logits(small: MakeRecipe) -> None:
    recipe = small({"model.compute_dtype": "bfloat16"})
    model = decoder(recipe)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    rounded = logits(model, tokens(recipe))
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, logits(decoder(small()), tokens(recipe)), atol=0.1)

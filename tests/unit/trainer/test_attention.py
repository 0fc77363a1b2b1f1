"""Every attention against one written in NumPy, with windows, caps, documents and grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from recipes.parallelism import AXES
from trainer.attention import AttentionSpec, Places, attend, balanced_order, documents, to_balanced
from trainer.attention.order import to_natural

B, T, N, K, H = 2, 256, 4, 2, 128
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "window": {"window": 40},
    "soft cap": {"soft_cap": 2.0},
    "documents": {"documents": True},
    "all": {"window": 100, "soft_cap": 2.0, "documents": True},
}


def inputs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    q, k, v, weight = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(q, (B, T, N, H)),
        jax.random.normal(k, (B, T, K, H)),
        jax.random.normal(v, (B, T, K, H)),
        jax.random.normal(weight, (B, T, N, H)),
    )


def segments() -> jax.Array:
    tokens = jax.random.randint(jax.random.key(5), (B, T), 0, 40)
    return documents(tokens, 3)


def expected(rule: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Output and the gradient for the queries, in float64, row by row."""
    q, k, v, weight = (np.asarray(x, np.float64) for x in inputs())
    document = np.asarray(segments())
    out, dq = np.zeros_like(q), np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        seen = np.arange(T) <= t
        if rule.get("window"):
            seen &= t - np.arange(T) < rule["window"]
        if rule.get("documents"):
            seen &= document[b] == document[b, t]
        keys, values = k[b, seen, n // (N // K)], v[b, seen, n // (N // K)]
        raw = keys @ q[b, t, n] / np.sqrt(H)
        cap = rule.get("soft_cap")
        scores = raw if cap is None else cap * np.tanh(raw / cap)
        share = np.exp(scores - scores.max())
        share /= share.sum()
        out[b, t, n] = share @ values
        towards = values @ weight[b, t, n]
        dscores = share * (towards - share @ towards)
        slope = 1.0 if cap is None else 1 - np.tanh(raw / cap) ** 2
        dq[b, t, n] = (dscores * slope) @ keys / np.sqrt(H)
    return out, dq


def mesh(context: int) -> Mesh:
    sizes = [context if axis == "context" else 1 for axis in AXES]
    grid = np.array(jax.devices()[:context]).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("implementation", "context", "exchange"),
    [
        ("xla", 1, "all_gather"),
        ("xla_chunked", 1, "all_gather"),
        ("xla_chunked", 2, "ring"),
        ("xla", 2, "all_gather"),
        ("splash", 1, "all_gather"),
        ("splash", 2, "all_gather"),
    ],
)
def test_output_and_gradient(implementation: Any, context: int, exchange: Any, rule: str) -> None:
    given = RULES[rule]
    spec = AttentionSpec(
        implementation=implementation,
        chunk=128,
        window=given.get("window"),
        soft_cap=given.get("soft_cap"),
        exchange=exchange,
    )
    document = to_balanced(segments(), 1, context) if given.get("documents") else None
    places = Places(jnp.asarray(balanced_order(T, context)), document)
    q, k, v, weight = (to_balanced(x, 1, context) for x in inputs())

    def weighted(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, places, spec)
        return jnp.sum(out * weight), out

    with jax.set_mesh(mesh(context)):
        dq, out = jax.jit(jax.grad(weighted, has_aux=True))(q)
    wanted_out, wanted_dq = expected(given)
    np.testing.assert_allclose(to_natural(out, 1, context), wanted_out, atol=2e-5)
    np.testing.assert_allclose(to_natural(dq, 1, context), wanted_dq, atol=2e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_balanced_order(num_shards: int) -> None:
    order = balanced_order(16, num_shards)
    assert sorted(order) == list(range(16))
    x = jnp.arange(32).reshape(2, 16)
    np.testing.assert_array_equal(to_balanced(x, 1, num_shards)[0], order)
    np.testing.assert_array_equal(to_natural(to_balanced(x, 1, num_shards), 1, num_shards), x)
    # What the queries of each shard may see, in (query, key) pairs, is the same for all.
    work = (order + 1).reshape(num_shards, -1).sum(axis=1)
    assert len(set(work.tolist())) == 1


def test_a_separator_ends_its_own_document() -> None:
    tokens = jnp.array([[5, 0, 7, 7, 0, 0, 1]])
    np.testing.assert_array_equal(documents(tokens, 0), [[0, 0, 1, 1, 1, 2, 3]])

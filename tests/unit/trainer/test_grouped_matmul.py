"""Every grouped matmul against one matmul a group, forward and backward, with and without rows behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.schema import ModelConfig
from trainer.execution import Execution
from trainer.grouped_matmul import grouped_matmul_of

WIDTH, HIDDEN = 24, 40
MODEL = {
    "vocab_size": 64,
    "num_layers": 1,
    "embed_dim": WIDTH,
    "mlp_dim": HIDDEN,
    "head_dim": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
}
SIZES = [(10, 20, 2, 32), (0, 64, 0, 0), (16, 16, 16, 16), (5, 0, 20, 7), (0, 0, 0, 0)]


def by_hand(x_rd: np.ndarray, w_edf: np.ndarray, sizes_e: tuple[int, ...]) -> np.ndarray:
    """Rows of the groups; nothing of what is behind them."""
    ends = np.cumsum(sizes_e)
    parts = [x_rd[end - size : end] @ w for end, size, w in zip(ends, sizes_e, w_edf, strict=True)]
    return np.concatenate(parts)


def assert_close(actual: jax.typing.ArrayLike, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes_e", SIZES)
@pytest.mark.parametrize("kind", ["xla", "megablox"])
def test_groups_times_their_matrices(kind: str, sizes_e: tuple[int, ...]) -> None:
    matmul = grouped_matmul_of(ModelConfig(**MODEL, grouped_matmul=kind), Execution())  # type: ignore[arg-type]
    random = np.random.default_rng(7)
    x_rd, w_edf, cotangent_rf = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((64, WIDTH), (4, WIDTH, HIDDEN), (64, HIDDEN))
    )
    rows = sum(sizes_e)
    out_rf, pull = jax.vjp(lambda x, w: matmul(x, w, jnp.array(sizes_e, jnp.int32)), x_rd, w_edf)
    dx_rd, dw_edf = pull(jnp.asarray(cotangent_rf))
    assert_close(out_rf[:rows], by_hand(x_rd, w_edf, sizes_e))
    transposed_efd = np.swapaxes(w_edf, 1, 2)
    assert_close(dx_rd[:rows], by_hand(cotangent_rf, transposed_efd, sizes_e))
    for end, size, dw_df in zip(np.cumsum(sizes_e), sizes_e, np.asarray(dw_edf), strict=True):
        group = slice(end - size, end)
        assert_close(dw_df, x_rd[group].T @ cotangent_rf[group])

"""Mean cross-entropy from the last hidden state, without ever holding all logits.

The vocabulary is taken in chunks: a running log-sum-exp forward, and each chunk's logits once more
backward. With 128,256 tokens in 8 chunks that is an eighth of the memory for 1 % more FLOPs of an 8B.

Legend: b batch, t position, d embed, v vocabulary, c chunk of the vocabulary, w token of a chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trainer.sharding import axis_size, constrain, einsum, use

_TABLE_VD = ("vocab", "embed")
_LOGITS_BTV = ("batch", "sequence", "vocab")
_TOKENS_BT = ("batch", "sequence")
_HIDDEN_BTD = ("batch", "sequence", None)


def cross_entropy(x_btd: jax.Array, table_vd: jax.Array, targets_bt: jax.Array, num_chunks: int) -> jax.Array:
    """Mean of -log softmax(table @ x)[target] in nats, a float32 scalar.

    ``x_btd`` is in the compute dtype, ``table_vd`` as it is stored; logits are float32.
    """
    if num_chunks == 1:
        logits_btv = logits_of(x_btd, table_vd)
        label_bt = jnp.sum(jnp.where(_is_target(jnp.arange(len(table_vd)), targets_bt), logits_btv, 0), -1)
        return jnp.mean(jax.nn.logsumexp(logits_btv, axis=-1) - label_bt)
    return jnp.mean(_chunked(x_btd, table_vd, targets_bt, num_chunks))


def logits_of(x_btd: jax.Array, table_vd: jax.Array) -> jax.Array:
    """Logits (b, t, v) in float32, of a table as it is stored."""
    return _logits(x_btd, use(table_vd, _TABLE_VD, x_btd.dtype))


def _logits(x_btd: jax.Array, table_wd: jax.Array) -> jax.Array:
    return einsum(
        "btd,wd->btw", x_btd, table_wd, _LOGITS_BTV, name="logits", preferred_element_type=jnp.float32
    )


def _is_target(tokens_w: jax.Array, targets_bt: jax.Array) -> jax.Array:
    return tokens_w == targets_bt[..., None]


def _in_chunks(table_vd: jax.Array, num_chunks: int) -> tuple[jax.Array, jax.Array]:
    """The table as (c, w, d), and which token each row is, (c, w).

    Every chunk takes its share from each shard of the vocabulary, so nothing moves.
    """
    v, d = table_vd.shape
    shards = axis_size("tensor")
    grid = (shards, num_chunks, v // (shards * num_chunks))
    table_cwd = jnp.swapaxes(table_vd.reshape(*grid, d), 0, 1).reshape(num_chunks, -1, d)
    tokens_cw = jnp.swapaxes(jnp.arange(v, dtype=jnp.int32).reshape(grid), 0, 1).reshape(num_chunks, -1)
    return constrain(table_cwd, (None, *_TABLE_VD), "vocabulary chunks"), tokens_cw


def _out_of_chunks(table_cwd: jax.Array) -> jax.Array:
    num_chunks, w, d = table_cwd.shape
    shards = axis_size("tensor")
    table_tcwd = jnp.swapaxes(table_cwd.reshape(num_chunks, shards, w // shards, d), 0, 1)
    return constrain(table_tcwd.reshape(-1, d), _TABLE_VD, "gradient of the output table")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(x_btd: jax.Array, table_vd: jax.Array, targets_bt: jax.Array, num_chunks: int) -> jax.Array:
    return _forward(x_btd, table_vd, targets_bt, num_chunks)[0]


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum, sum of exponentials below it, and the target's logit; (b, t) each."""


def _forward(
    x_btd: jax.Array, table_vd: jax.Array, targets_bt: jax.Array, num_chunks: int
) -> tuple[jax.Array, Residuals]:
    def add(carry: _Sums, chunk: tuple[jax.Array, jax.Array]) -> tuple[_Sums, None]:
        maximum_bt, total_bt, label_bt = carry
        table_wd, tokens_w = chunk
        logits_btw = logits_of(x_btd, table_wd)
        new_maximum_bt = jnp.maximum(maximum_bt, jnp.max(logits_btw, axis=-1))
        here_bt = jnp.sum(jnp.exp(logits_btw - new_maximum_bt[..., None]), axis=-1)
        total_bt = total_bt * jnp.exp(maximum_bt - new_maximum_bt) + here_bt
        label_bt += jnp.sum(jnp.where(_is_target(tokens_w, targets_bt), logits_btw, 0), axis=-1)
        return (new_maximum_bt, total_bt, label_bt), None

    zeros_bt = constrain(jnp.zeros(targets_bt.shape, jnp.float32), _TOKENS_BT, "loss")
    start = (zeros_bt - jnp.inf, zeros_bt, zeros_bt)
    (maximum_bt, total_bt, label_bt), _ = jax.lax.scan(add, start, _in_chunks(table_vd, num_chunks))
    normaliser_bt = maximum_bt + jnp.log(total_bt)
    return normaliser_bt - label_bt, (x_btd, table_vd, targets_bt, normaliser_bt)


def _backward(
    num_chunks: int, residuals: Residuals, cotangent_bt: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_btd, table_vd, targets_bt, normaliser_bt = residuals

    def add(dx_btd: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        table_wd, tokens_w = chunk
        used_wd = use(table_wd, _TABLE_VD, x_btd.dtype)
        probability_btw = jnp.exp(_logits(x_btd, used_wd) - normaliser_bt[..., None])
        error_btw = probability_btw - _is_target(tokens_w, targets_bt)
        error_btw = (error_btw * cotangent_bt[..., None]).astype(x_btd.dtype)
        dx_btd += einsum(
            "btw,wd->btd", error_btw, used_wd, _HIDDEN_BTD, name="dx", preferred_element_type=jnp.float32
        )
        dtable_wd = einsum("btd,btw->wd", x_btd, error_btw, _TABLE_VD, name="gradient of the output table")
        return dx_btd, dtable_wd

    zeros_btd = constrain(jnp.zeros(x_btd.shape, jnp.float32), _HIDDEN_BTD, "dx")
    dx_btd, dtable_cwd = jax.lax.scan(add, zeros_btd, _in_chunks(table_vd, num_chunks))
    return dx_btd.astype(x_btd.dtype), _out_of_chunks(dtable_cwd).astype(table_vd.dtype), None


_chunked.defvjp(_forward, _backward)

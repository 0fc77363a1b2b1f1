"""The parts of a decoder block: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Weights are cast to the compute dtype where they are used. Between attention and MLP the sequence is
divided over the tensor axis too ("split_sequence"): the norms work on a part each.

Legend of dimensions: b batch, t position, d embed, n query head, k key/value head, h head width,
f MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.attention import AttentionSpec, Places, attend
from trainer.collective_matmul import gather_matmul, matmul_scatter
from trainer.execution import Execution, named
from trainer.models.weights import project, residual_scale, weight
from trainer.sharding import axis_size, constrain, use

RESIDUAL_BTD = ("batch", "split_sequence", None)
WHOLE_BTD = ("batch", "sequence", None)

_Q_DNH = ("embed", "heads", "head_dim")
_K_DKH = ("embed", "kv_heads", "head_dim")
_O_NHD = ("heads", "head_dim", "embed")
_UP_DF = ("embed", "mlp")
_DOWN_FD = ("mlp", "embed")
_HIDDEN_BTF = ("batch", "sequence", "mlp")


def _exchanges_while_multiplying(execution: Execution) -> bool:
    return execution.collective_matmul and axis_size("tensor") > 1


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 with a learned scale."""

    def __init__(self, dim: int, epsilon: float) -> None:
        self.scale_d = nnx.Param(jnp.ones((dim,), jnp.float32), out_sharding=("norm",), eager_sharding=False)
        self.epsilon = epsilon

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        x32_btd = x_btd.astype(jnp.float32)
        mean_square_bt1 = jnp.mean(jnp.square(x32_btd), axis=-1, keepdims=True)
        normal_btd = x32_btd * jax.lax.rsqrt(mean_square_bt1 + self.epsilon)
        return (normal_btd * self.scale_d[...].astype(jnp.float32)).astype(x_btd.dtype)


@jax.custom_vjp
def rope(x_btnh: jax.Array, angle_th: jax.Array) -> jax.Array:
    """Rotary position embedding by halves (arXiv:2104.09864, in the layout of Llama), in float32.

    Args:
      x_btnh: queries or keys.
      angle_th: of each position and each pair, (t, h / 2); from :func:`rope_angles`.
    """
    return _rotated(x_btnh, angle_th)


def rope_angles(positions_t: jax.Array, width: int, theta: float) -> jax.Array:
    """float32 (t, width / 2): how far each pair is turned at each position."""
    half = width // 2
    frequency_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return positions_t.astype(jnp.float32)[:, None] * frequency_h


def _rotated(x_btnh: jax.Array, angle_th: jax.Array) -> jax.Array:
    cos, sin = (jnp.tile(f(angle_th), 2)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    x32_btnh = x_btnh.astype(jnp.float32)
    first, second = jnp.split(x32_btnh, 2, axis=-1)
    return (x32_btnh * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x_btnh.dtype)


def _rope_forward(x_btnh: jax.Array, angle_th: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rotated(x_btnh, angle_th), angle_th


def _rope_backward(angle_th: jax.Array, cotangent_btnh: jax.Array) -> tuple[jax.Array, None]:
    # The transpose of a rotation turns back. Kept apart from the matmuls that it feeds: fused into them it
    # is computed anew for every tile (a third more estimated cycles of the query projection on v5p).
    return jax.lax.optimization_barrier(_rotated(cotangent_btnh, -angle_th)), None


rope.defvjp(_rope_forward, _rope_backward)


class Attention(nnx.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs) -> None:
        d, n, k, h = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.execution = config, execution
        self.q_dnh = weight(rngs, (d, n, h), _Q_DNH, fan_in=d)
        self.k_dkh = weight(rngs, (d, k, h), _K_DKH, fan_in=d)
        self.v_dkh = weight(rngs, (d, k, h), _K_DKH, fan_in=d)
        self.o_nhd = weight(rngs, (n, h, d), _O_NHD, fan_in=n * h, scale=residual_scale(config))

    def __call__(self, x_btd: jax.Array, places: Places) -> jax.Array:
        """``x_btd`` divided like the residual stream, and so is the output."""
        config = self.config
        q_btnh, k_btkh, v_btkh = self._queries_keys_values(x_btd)
        angle_th = rope_angles(places.positions_t, config.head_dim, config.rope_theta)
        q_btnh, k_btkh = named(rope(q_btnh, angle_th), "query"), named(rope(k_btkh, angle_th), "key")
        out_btnh = attend(q_btnh, k_btkh, named(v_btkh, "value"), places, self._spec())
        if config.attention != "splash":
            # The kernel names its output itself, together with the normaliser that its gradient needs.
            out_btnh = named(out_btnh, "attention_out")
        return named(self._project_out(out_btnh), "attention_projected")

    def _spec(self) -> AttentionSpec:
        config, execution = self.config, self.execution
        return AttentionSpec(
            implementation=config.attention,
            chunk=config.attention_chunk,
            window=config.attention_window,
            soft_cap=config.attention_soft_cap,
            exchange=execution.context_exchange,
            interpret=execution.interpret_kernels,
        )

    def _queries_keys_values(self, x_btd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        config, out_axes = self.config, ("batch", "sequence", "heads", None)
        if _exchanges_while_multiplying(self.execution):
            matrices = ((self.q_dnh, _Q_DNH), (self.k_dkh, _K_DKH), (self.v_dkh, _K_DKH))
            flat = [use(m[...], axes, x_btd.dtype) for m, axes in matrices]
            outputs = gather_matmul(x_btd, [m.reshape(m.shape[0], -1) for m in flat])
            q, k, v = (
                out.reshape(*out.shape[:2], *m.shape[1:]) for out, m in zip(outputs, flat, strict=True)
            )
            return q, k, v
        x_btd = constrain(x_btd, WHOLE_BTD, "attention input")
        q_btnh = project(config, "btd,dnh->btnh", x_btd, self.q_dnh, _Q_DNH, out_axes, "query")
        kv_axes = ("batch", "sequence", "kv_heads", None)
        k_btkh = project(config, "btd,dkh->btkh", x_btd, self.k_dkh, _K_DKH, kv_axes, "key")
        v_btkh = project(config, "btd,dkh->btkh", x_btd, self.v_dkh, _K_DKH, kv_axes, "value")
        return q_btnh, k_btkh, v_btkh

    def _project_out(self, out_btnh: jax.Array) -> jax.Array:
        if _exchanges_while_multiplying(self.execution):
            matrix = use(self.o_nhd[...], _O_NHD, out_btnh.dtype)
            flat = out_btnh.reshape(*out_btnh.shape[:2], -1)
            return matmul_scatter(flat, matrix.reshape(-1, matrix.shape[-1]))
        return project(
            self.config, "btnh,nhd->btd", out_btnh, self.o_nhd, _O_NHD, RESIDUAL_BTD, "attention output"
        )


class Mlp(nnx.Module):
    """SwiGLU of ``width``, or relu without a gate."""

    def __init__(self, config: ModelConfig, execution: Execution, width: int, *, rngs: nnx.Rngs) -> None:
        d, f = config.embed_dim, width
        self.config, self.execution = config, execution
        if config.mlp_activation == "swiglu":
            self.gate_df = weight(rngs, (d, f), _UP_DF, fan_in=d)
        self.up_df = weight(rngs, (d, f), _UP_DF, fan_in=d)
        self.down_fd = weight(rngs, (f, d), _DOWN_FD, fan_in=f, scale=residual_scale(config))

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        """``x_btd`` divided like the residual stream, and so is the output."""
        if _exchanges_while_multiplying(self.execution):
            matrices = [use(m[...], _UP_DF, x_btd.dtype) for m, _ in self._inputs()]
            hidden_btf = self._activated(gather_matmul(x_btd, matrices))
            down_fd = use(self.down_fd[...], _DOWN_FD, x_btd.dtype)
            return named(matmul_scatter(hidden_btf, down_fd), "mlp_out")
        x_btd = constrain(x_btd, WHOLE_BTD, "mlp input")
        hidden_btf = self._activated(
            [
                project(self.config, "btd,df->btf", x_btd, m, _UP_DF, _HIDDEN_BTF, name)
                for m, name in self._inputs()
            ]
        )
        out_btd = project(
            self.config, "btf,fd->btd", hidden_btf, self.down_fd, _DOWN_FD, RESIDUAL_BTD, "mlp output"
        )
        return named(out_btd, "mlp_out")

    def _inputs(self) -> Sequence[tuple[nnx.Param[jax.Array], str]]:
        up = (self.up_df, "mlp up")
        return ((self.gate_df, "mlp gate"), up) if self.config.mlp_activation == "swiglu" else (up,)

    def _activated(self, outputs: Sequence[jax.Array]) -> jax.Array:
        """Of the outputs of :meth:`_inputs`."""
        up_btf = named(outputs[-1], "mlp_up")
        if self.config.mlp_activation == "relu":
            return nnx.relu(up_btf)
        return nnx.silu(named(outputs[0], "mlp_gate")) * up_btf

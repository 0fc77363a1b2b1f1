"""Matmuls rounded to int8 or fp8, forward and backward, by qwix.

Each operand is scaled by the largest magnitude along what is contracted, rounded, multiplied, and the
product scaled back. Weights and optimizer state stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

Quantization = Literal["none", "int8", "fp8"]

_FORWARD = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_BACKWARD = {"int8": jnp.int8, "fp8": jnp.float8_e5m2}
"""Gradients have the wider range and need the fewer digits (arXiv:2209.05433)."""


def einsum_options(quantization: Quantization) -> Mapping[str, Any]:
    """What ``jnp.einsum`` must be given beside its arrays; nothing without quantization."""
    if quantization == "none":
        return {}
    # qwix takes half a second to import, which unquantised training need not wait for.
    from qwix._src.core import dot_general_qt as qt

    config = qt.DotGeneralQtConfig(**_dtypes(quantization))

    def dot_general(x: jax.Array, y: jax.Array, dimension_numbers: Any, *_: Any, **__: Any) -> jax.Array:
        out: jax.Array = qt.dot_general_qt(x, y, dimension_numbers, config)
        return out

    return {"_dot_general": dot_general}


def ragged_dot(
    x_rd: jax.Array, w_edf: jax.Array, group_sizes_e: jax.Array, *, quantization: Quantization
) -> jax.Array:
    """``jax.lax.ragged_dot``: rows of each group times the group's matrix; (r, f)."""
    if quantization == "none":
        return jax.lax.ragged_dot(x_rd, w_edf, group_sizes_e)
    from qwix._src.core import ragged_dot_qt as qt

    config = qt.RaggedDotQtConfig(**_dtypes(quantization))
    out: jax.Array = qt.ragged_dot_qt(x_rd, w_edf, group_sizes_e, config)
    return out


def _dtypes(quantization: Quantization) -> Mapping[str, Any]:
    """As qwix names them in all its configurations."""
    forward, backward = _FORWARD[quantization], _BACKWARD[quantization]
    return {
        "lhs_qtype": forward,
        "rhs_qtype": forward,
        "dlhs_grad_qtype": backward,
        "drhs_grad_qtype": backward,
    }

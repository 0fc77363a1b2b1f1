"""Grouped matmul: every group of rows times its own matrix, in several ways with one meaning.

Rows behind the last group belong to nobody: what stands there, in the output and in the gradient of the
rows, is undefined.

Legend: r row, d what is contracted, e group (an expert), f output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from recipes.schema import ModelConfig
from trainer.execution import Execution, largest_block
from trainer.quantization import ragged_dot

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows (r, d), matrices (e, d, f) and int32 group sizes (e,) -> (r, f)."""

_MOST_ROWS, _MOST_COLUMNS = 512, 1024
"""Largest tile of rows, and of contraction and output, that the kernel holds in vector memory at once."""
_LANES = 128


def grouped_matmul_of(config: ModelConfig, execution: Execution) -> GroupedMatmul:
    """As the recipe says.

    XLA's ``ragged_dot`` is a kernel of its own on TPU, but takes matrices in one layout only: for the
    gradient of the rows libtpu copies each of them transposed. Megablox reads them transposed.
    """
    if config.grouped_matmul == "megablox":
        return functools.partial(_megablox, interpret=execution.interpret_kernels)
    return functools.partial(ragged_dot, quantization=config.quantization)


def _megablox(x_rd: jax.Array, w_edf: jax.Array, group_sizes_e: jax.Array, *, interpret: bool) -> jax.Array:
    # Half a second of imports that dense models need not wait for.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    # Nothing wider than the matrices, which the kernel would fill up; its gradients swap their sides.
    columns = min(_MOST_COLUMNS, -(-max(w_edf.shape[1:]) // _LANES) * _LANES)
    tile = (largest_block(len(x_rd), _MOST_ROWS), columns, columns)
    out: jax.Array = gmm(x_rd, w_edf, group_sizes_e, x_rd.dtype, tile, interpret=interpret)
    return out

"""FLOPs of kernels, of which the compiler estimates nothing: splash attention and grouped matmuls.

Read from names and shapes. Attention counts whole score matrices here; how much of them a causal mask or a
window leaves is for the caller to say, who knows the recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.preflight.hlo import Array, Instruction

ATTENTION, GROUPED_MATMUL = "attention", "grouped matmul"
_SUFFIX = re.compile(r"(\.\d+|\.clone|\.remat\d*)+$")
_FLOATS = ("bf16", "f32", "f16")
_INDICES = ("s8", "s32", "u32")
# Matmuls of a score matrix: scores and their mix; scores again, gradients of scores, queries; and of
# scores, gradients of scores, keys and values. A fused backward kernel has five.
_ATTENTION_MATMULS = {"dkv": 4, "dq": 3, "fwd": 2}
_FUSED_BACKWARD_MATMULS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One call of a kernel."""

    category: str
    """ATTENTION or GROUPED_MATMUL."""
    flops: int
    width: int
    """The narrowest dimension that its matmuls contract or make: of attention the width of a head."""


def kernel_of(call: Instruction, operands: Sequence[Array]) -> Kernel | None:
    """None for what is no kernel, or is none of these."""
    name = _SUFFIX.sub("", call.name)
    if "splash" in name or "flash" in name:
        return _attention(name, operands, call.arrays)
    if "gmm" in name or "ragged" in name:
        return _grouped(operands, call.arrays)
    return None


def _attention(name: str, operands: Sequence[Array], results: Sequence[Array]) -> Kernel | None:
    # Queries, keys and values are the first arrays of floats: (..., heads, positions, width).
    inputs = [array.dims for array in operands if array.dtype in _FLOATS and len(array.dims) > 2]
    if len(inputs) < 3:
        return None
    query, key = inputs[0], inputs[1]
    matmuls = next((count for mark, count in _ATTENTION_MATMULS.items() if mark in name), 2)
    if "dkv" in name and len([array for array in results if len(array.dims) > 2]) > 2:
        matmuls = _FUSED_BACKWARD_MATMULS
    rows = math.prod(query[:-1])
    return Kernel(category=ATTENTION, flops=2 * matmuls * rows * key[-2] * query[-1], width=query[-1])


def _grouped(operands: Sequence[Array], results: Sequence[Array]) -> Kernel | None:
    """Rows (m, k) times matrices (groups, k, n), or the gradient of those from (m, k) and (m, n)."""
    inputs = [array for array in operands if array.dtype not in _INDICES and len(array.dims) in (2, 3)]
    if len(inputs) < 2 or not results or len(results[0].dims) not in (2, 3):
        return None
    out = results[0].dims
    if len(out) == 3:
        rows, made = inputs[0].num_elements // out[1], out[1] * out[2]
        return Kernel(category=GROUPED_MATMUL, flops=2 * rows * made, width=min(out[1:]))
    contracted = inputs[0].dims[-1]
    flops = 2 * results[0].num_elements * contracted
    return Kernel(category=GROUPED_MATMUL, flops=flops, width=min(out[1], contracted))

"""FLOPs of dot products and convolutions, counted as the hardware must do them.

The TPU compiler turns every matmul into a convolution, and batch dimensions into window dimensions that
are dilated so far that only one position of the window meets data: those alone are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.preflight.hlo import Computation, Instruction

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """One spatial dimension of a convolution."""

    size: int
    stride: int
    pad_low: int
    lhs_dilation: int
    rhs_dilation: int


def matmul_flops(computation: Computation, instruction: Instruction) -> int:
    """FLOPs of one execution; 0 for what is neither a dot product nor a convolution."""
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return 0


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    lhs = computation.operands(instruction)[0].arrays[0]
    contracting = [int(dim) for dim in _list(instruction.attribute("lhs_contracting_dims"))]
    return 2 * instruction.arrays[0].num_elements * math.prod(lhs.dims[dim] for dim in contracting)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    labels = _LABELS.fullmatch(instruction.attribute("dim_labels") or "")
    if labels is None:
        return 0
    lhs, rhs = (operand.arrays[0].dims for operand in computation.operands(instruction))
    out = instruction.arrays[0].dims
    lhs_at, rhs_at, out_at = (_places(text) for text in labels.groups())
    positions = math.prod(
        _positions(window, lhs[lhs_at[str(dim)]], out[out_at[str(dim)]])
        for dim, window in enumerate(_windows(instruction.attribute("window")))
    )
    features = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    multiplications = lhs[lhs_at["b"]] * lhs[lhs_at["f"]] * rhs[rhs_at["o"]] * positions
    return 2 * multiplications // features // batches


def _places(labels: str) -> Mapping[str, int]:
    return {label: place for place, label in enumerate(labels)}


def _list(text: str | None) -> list[str]:
    return [item for item in (text or "").strip("{}").split(",") if item]


def _windows(text: str | None) -> list[_Window]:
    """The dimensions of ``{size=3x8 pad=0_0x7_7 lhs_dilate=1x8}``."""
    fields = dict(item.split("=", 1) for item in (text or "{}").strip("{}").split())
    if "size" not in fields:
        return []
    sizes = fields["size"].split("x")
    ones = "x".join("1" for _ in sizes)
    columns = zip(
        sizes,
        fields.get("stride", ones).split("x"),
        fields.get("pad", "x".join("0_0" for _ in sizes)).split("x"),
        fields.get("lhs_dilate", ones).split("x"),
        fields.get("rhs_dilate", ones).split("x"),
        strict=True,
    )
    return [
        _Window(
            size=int(size),
            stride=int(stride),
            pad_low=int(pad.split("_")[0]),
            lhs_dilation=int(lhs),
            rhs_dilation=int(rhs),
        )
        for size, stride, pad, lhs, rhs in columns
    ]


def _positions(window: _Window, lhs_size: int, out_size: int) -> int:
    """Pairs of an output and a window position that meet an element, not padding or a hole."""
    divisor = math.gcd(window.stride, window.lhs_dilation)
    period = window.lhs_dilation // divisor
    inverse = pow(window.stride // divisor, -1, period) if period > 1 else 0
    total = 0
    for position in range(window.size):
        # Output o reads element (o * stride + offset) / lhs_dilation, if that is whole and exists.
        offset = position * window.rhs_dilation - window.pad_low
        low = max(0, -(offset // window.stride))
        high = min(out_size - 1, ((lhs_size - 1) * window.lhs_dilation - offset) // window.stride)
        if offset % divisor or high < low:
            continue
        first = low + (-(offset // divisor) * inverse - low) % period
        total += max(0, (high - first) // period + 1)
    return total

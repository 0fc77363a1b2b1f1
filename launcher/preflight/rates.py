"""How fast a generation is at each kind of thing: what turns a program into seconds.

Speeds are shares of data sheets. The shares are fitted to published steps, one number for a generation or
for all of them, never for a model; docs/prediction.md says how, and how far off the result is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.preflight.kernels import ATTENTION, Kernel
from launcher.preflight.torus import Link
from recipes.generations import generation

_DATA_FILE = Path(__file__).with_name("rates.json")
_HOP_S = 1e-6
_DCN_LATENCY_S = 1e-3
_CORE_TO_CORE_SHARE = 0.1
"""Of HBM's speed, between the cores of a chip: far more than a link of the torus has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What is fitted."""

    cycle_scale: Mapping[str, float]
    """By generation: seconds of a cycle that the compiler estimates, over the nominal clock's."""
    matmul_share: Mapping[str, float]
    """By generation: of the peak, in matmuls that were not compiled."""
    attention_share: float
    """Of the peak, in attention kernels where heads are as wide as the matrix unit."""
    grouped_matmul_share: float
    hbm_share: float
    """Of HBM's speed, where that is what limits."""
    beside_share: float
    """Of an exchange that goes on beside other work, how long it holds that work up all the same."""
    dcn_share: float
    slice_wait_share: float
    """Of a step, that slices wait for one another, for each doubling of their number."""
    quantized_speed: Mapping[str, float]
    """Of matmuls that were not compiled, over bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """How far off predictions were of published steps that had no part in the fit."""

    median: float
    p90: float
    """Nine of ten are nearer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one JAX device of a generation."""

    cycle_s: float
    matmul_flops_per_s: float
    attention_flops_per_s: float
    grouped_matmul_flops_per_s: float
    matmul_width: int
    """Rows and columns of its matrix unit."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """Of one link of the torus, one direction."""
    core_bytes_per_s: float
    """Between the cores of a chip."""
    dcn_bytes_per_s: float
    host_bytes_per_s: float
    beside_share: float
    slice_wait_share: float


def rates_of(name: str, quantization: str, constants: Constants) -> Rates:
    """Of a device of the generation ``name``; where nothing was fitted for it, as the median of others."""
    chip, data = generation(name), _data()
    own = data["generations"][name]
    assert chip.hbm_bytes_per_s and chip.ici_link_bytes_per_s and chip.dcn_bytes_per_s
    peak, hbm = chip.peak_flops_per_s["bf16"] / chip.devices_per_chip, chip.hbm_bytes_per_s
    # A chip without units for a dtype multiplies in bfloat16.
    faster = chip.peak_flops_per_s.get(quantization, 0.0) / chip.peak_flops_per_s["bf16"]
    speed = max(1.0, min(faster, constants.quantized_speed.get(quantization, 1.0)))
    matmul = _of(constants.matmul_share, name) * speed
    return Rates(
        cycle_s=_of(constants.cycle_scale, name) / own["clock_hz"],
        matmul_flops_per_s=peak * matmul,
        attention_flops_per_s=peak * constants.attention_share,
        grouped_matmul_flops_per_s=peak * constants.grouped_matmul_share,
        matmul_width=own["matmul_width"],
        hbm_bytes_per_s=hbm * constants.hbm_share / chip.devices_per_chip,
        link_bytes_per_s=chip.ici_link_bytes_per_s * data["link_share"] / chip.devices_per_chip,
        core_bytes_per_s=hbm * _CORE_TO_CORE_SHARE,
        dcn_bytes_per_s=chip.dcn_bytes_per_s * constants.dcn_share / chip.devices_per_chip,
        host_bytes_per_s=own["host_bytes_per_s"] * data["host_share"] / chip.devices_per_chip,
        beside_share=constants.beside_share,
        slice_wait_share=constants.slice_wait_share,
    )


def slowed(rates: Rates, factor: float) -> Rates:
    """The same rates with every speed divided by ``factor``."""
    speeds = {
        field.name: getattr(rates, field.name) / factor
        for field in dataclasses.fields(rates)
        if field.name.endswith("_per_s")
    }
    return dataclasses.replace(rates, cycle_s=rates.cycle_s * factor, **speeds)


def overlapping_exchanges(name: str) -> Sequence[str]:
    """Kinds of exchanges of weights and gradients inside a slice that go on beside other work."""
    return tuple(_data()["generations"][name]["overlapping_exchanges"])


@functools.cache
def fitted_constants() -> Constants:
    return Constants(**_data()["fitted"])


@functools.cache
def error_bands() -> Mapping[str, Band]:
    """By kind of program: ``compiled``, ``outline``."""
    return {kind: Band(**band) for kind, band in _data()["error"].items()}


def kernel_s(rates: Rates, kernel: Kernel, attended_share: float) -> float:
    """Seconds of a kernel.

    Args:
      attended_share: of the score matrix, what a mask leaves to compute.
    """
    filled = min(1.0, kernel.width / rates.matmul_width)
    if kernel.category == ATTENTION:
        return kernel.flops * attended_share / (rates.attention_flops_per_s * filled)
    return kernel.flops / (rates.grouped_matmul_flops_per_s * filled)


def exchange_s(rates: Rates, kind: str, size_bytes: int, group_size: int, link: Link) -> float:
    """Seconds of a collective inside a slice.

    Rings use both directions of the links of every side that the group spans; a side that does not wrap
    around has half of that (jax-ml/scaling-book, sharding.md).

    Args:
      size_bytes: the larger of what one device puts in and gets out.
    """
    moved = size_bytes * (group_size - 1) / group_size
    if not link.sides:
        return _passes(kind) * moved / rates.core_bytes_per_s
    latency_s = _HOP_S * sum(side.size // 2 if side.wraps else side.size - 1 for side in link.sides)
    match kind:
        case "all-to-all" | "ragged-all-to-all":
            # Half of everything crosses the middle of the longest side, which two links do, or four.
            sides = [side.size / (8 if side.wraps else 4) for side in link.sides]
            return latency_s + size_bytes * max(sides) / rates.link_bytes_per_s
        case "collective-permute" | "collective-broadcast":
            # Around a ring both ways, half of everything each.
            ways = 2 if link.sides[0].wraps else 1
            return latency_s + size_bytes / (ways * rates.link_bytes_per_s)
        case _:
            links = sum(2 if side.wraps else 1 for side in link.sides)
            return _passes(kind) * (latency_s + moved / (links * rates.link_bytes_per_s))


def dcn_s(rates: Rates, kind: str, size_bytes: int, num_slices: int) -> float:
    """Seconds of a collective between slices."""
    moved = size_bytes if kind == "collective-permute" else size_bytes * (num_slices - 1) / num_slices
    return _DCN_LATENCY_S + _passes(kind) * moved / rates.dcn_bytes_per_s


def _passes(kind: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if kind == "all-reduce" else 1


def _of(by_generation: Mapping[str, float], name: str) -> float:
    return by_generation.get(name) or statistics.median(by_generation.values())


@functools.cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(_DATA_FILE.read_text(encoding="ascii"))
    return data

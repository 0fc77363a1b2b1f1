"""TPU generations: what a chip can do, which topologies it comes in and how hosts divide them.

The data is in `hardware.json` beside this file, with its public sources; the rules that expand it are
here. Everything is per chip unless it says otherwise.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU = "cpu"
CUBE_EDGE = 4
_DATA_FILE = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    """List prices in USD per chip-hour; None where no public price was found."""

    on_demand: float | None
    spot: float | None
    region: str
    date: str
    """ISO date on which the source was read; Google changes spot prices up to once a day."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubes:
    """Topologies made of whole 4x4x4 cubes."""

    machine_type: str
    chips_per_host: int
    max_cubes: int
    max_side: int
    ordered: bool
    """Sides must not decrease from left to right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShape:
    """One way in which a topology is divided into hosts."""

    machine_type: str
    chips_per_host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One TPU generation, per chip unless said otherwise. For cpu, what is unknown is None or empty."""

    name: str
    gke_accelerator: str | None
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    cloud_tpu_prefix: str | None
    """Prefix of Cloud TPU API accelerator types; None where that API has none."""
    xpk_prefix: str | None
    xpk_min_chips: int
    """Smallest slice that xpk has a name for."""
    aot_platform: str | None
    """Generation as jax.experimental.topologies names it, as in ``v5:4x4x4`` for v5p."""
    cores_per_chip: int
    devices_per_chip: int
    """JAX devices."""
    requires_workload_policy: bool
    """Whether multi-host GKE node pools need a workload policy."""
    pod_chips: int | None
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    peak_flops_per_s: Mapping[str, float]
    """Dense peak by precision: bf16, int8, fp8."""
    ici_links: int
    ici_link_bytes_per_s: float | None
    """One link, one direction."""
    dcn_bytes_per_s: float | None
    """Data-center network, one direction."""
    shapes: Mapping[str, Sequence[HostShape]]
    cubes: Cubes | None
    price: PriceList | None

    @property
    def num_dims(self) -> int:
        """Sides of a topology."""
        return 3 if self.cubes else 2


def generation(name: str) -> Generation:
    """The generation called ``name``.

    Raises:
      ValueError: there is none; the message is a clause for :class:`recipes.errors.Problem`.
    """
    try:
        return generations()[name]
    except KeyError:
        raise ValueError(f"is not a generation (one of {', '.join(generations())})") from None


@functools.cache
def generations() -> Mapping[str, Generation]:
    """Every generation by name, oldest first; cpu last."""
    entries = catalogue()["generations"]
    return {name: _generation(name, entry) for name, entry in entries.items()} | {CPU: _CPU_GENERATION}


@functools.cache
def catalogue() -> Mapping[str, Any]:
    """The data file as it is."""
    data: Mapping[str, Any] = json.loads(_DATA_FILE.read_text(encoding="ascii"))
    return data


def host_shapes(chip: Generation, topology: tuple[int, ...]) -> Sequence[HostShape]:
    """The ways in which ``topology`` is divided into hosts; empty when it does not exist."""
    listed = chip.shapes.get(topology_name(topology), ())
    if listed or chip.cubes is None:
        return listed
    whole = len(topology) == 3 and all(side % CUBE_EDGE == 0 for side in topology)
    ascending = not chip.cubes.ordered or list(topology) == sorted(topology)
    too_large = math.prod(topology) > max_chips(chip) or max(topology) > chip.cubes.max_side
    if too_large or not whole or not ascending:
        return ()
    return (HostShape(machine_type=chip.cubes.machine_type, chips_per_host=chip.cubes.chips_per_host),)


@functools.cache
def topologies(name: str) -> Sequence[tuple[int, ...]]:
    """Every topology of a TPU generation, smallest first."""
    chip = generation(name)
    found = {tuple(map(int, text.split("x"))) for text in chip.shapes}
    if chip.cubes is not None:
        most = chip.cubes.max_cubes
        cubes = (
            (a * CUBE_EDGE, b * CUBE_EDGE, c * CUBE_EDGE)
            for a in range(1, most + 1)
            for b in range(1, most // a + 1)
            for c in range(1, most // (a * b) + 1)
        )
        found.update(cube for cube in cubes if host_shapes(chip, cube))
    return sorted(found, key=lambda sides: (math.prod(sides), sum(sides), sides))


def max_chips(chip: Generation) -> int:
    """Chips of the largest slice of a TPU generation."""
    if chip.cubes is not None:
        return chip.cubes.max_cubes * CUBE_EDGE**3
    return max(math.prod(map(int, text.split("x"))) for text in chip.shapes)


def topology_name(topology: Sequence[int]) -> str:
    """Sides joined by ``x``, as in ``4x4x8``."""
    return "x".join(map(str, topology))


def _generation(name: str, entry: Mapping[str, Any]) -> Generation:
    shapes: dict[str, tuple[HostShape, ...]] = {}
    for topology, machine_type, chips in entry["shapes"]:
        host = HostShape(machine_type=machine_type, chips_per_host=chips)
        shapes[topology] = (*shapes.get(topology, ()), host)
    parsed: dict[str, Any] = {
        "shapes": shapes,
        "cubes": Cubes(**entry["cubes"]) if entry["cubes"] else None,
        "price": _price_list(entry["price"]),
    }
    return Generation(name=name, **{**entry, **parsed})


def _price_list(entry: Mapping[str, Any] | None) -> PriceList | None:
    listing = catalogue()["prices"]
    return PriceList(**entry, date=listing["date"], source=listing["source"]) if entry else None


_CPU_GENERATION = Generation(
    name=CPU,
    gke_accelerator=None,
    cloud_tpu_prefix=None,
    xpk_prefix=None,
    xpk_min_chips=1,
    aot_platform=None,
    cores_per_chip=1,
    devices_per_chip=1,
    requires_workload_policy=False,
    pod_chips=None,
    hbm_bytes=None,
    hbm_bytes_per_s=None,
    peak_flops_per_s={},
    ici_links=0,
    ici_link_bytes_per_s=None,
    dcn_bytes_per_s=None,
    shapes={},
    cubes=None,
    price=None,
)

"""The hardware catalogue: from the recipe's `hardware` to one slice, its hosts, links and price.

The catalogue's front door: `slice_shape`, `generation` and `expand_alias` are what others use.
The data is in `hardware.json`, what a chip is in `generations.py`, other tools' names in `aliases.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.aliases import AliasMeaning, expand_alias, render_alias
from recipes.generations import (
    CPU,
    CUBE_EDGE,
    Generation,
    HostShape,
    PriceList,
    generation,
    generations,
    host_shapes,
    max_chips,
    topologies,
    topology_name,
)
from recipes.schema import HardwareConfig

__all__ = [
    "CPU",
    "AliasMeaning",
    "Generation",
    "HostShape",
    "PriceList",
    "SliceShape",
    "expand_alias",
    "generation",
    "generations",
    "host_shapes",
    "max_chips",
    "render_alias",
    "slice_shape",
    "topologies",
    "topology_name",
]

_MAX_CPU_DEVICES = 4096
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceShape:
    """One slice: what is connected by ICI."""

    generation: str
    topology: tuple[int, ...]
    topology_name: str
    machine_type: str
    chips_per_host: int
    devices_per_chip: int
    wrap: tuple[bool, ...]
    """By side: whether its ends are linked."""
    gke_accelerator: str | None
    accelerator_type: str | None
    """As the Cloud TPU API names it; None where that API has no such slice."""
    aot_topology: str | None
    """As jax.experimental.topologies names it; None on cpu."""
    requires_workload_policy: bool

    @property
    def num_chips(self) -> int:
        return math.prod(self.topology)

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return self.num_chips * self.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        return self.chips_per_host * self.devices_per_chip

    @property
    def is_multi_host(self) -> bool:
        return self.num_hosts > 1


def slice_shape(hardware: HardwareConfig) -> SliceShape:
    """The slice that ``hardware`` names.

    Raises:
      ValueError: there is no such slice; the message is "reason; fix", the two clauses of a
        :class:`recipes.errors.Problem`.
    """
    chip = generation(hardware.generation)
    topology = _parse(hardware.topology, chip)
    if chip.name == CPU:
        return _cpu_slice(topology, hardware.chips_per_host)
    hosts = host_shapes(chip, topology)
    if not hosts:
        raise ValueError(f"is not a topology of {chip.name}; {_describe_choices(chip, topology)}")
    return _slice(chip, topology, _choose(hosts, hardware.chips_per_host, chip, topology))


def _parse(text: str, chip: Generation) -> tuple[int, ...]:
    if _TOPOLOGY.fullmatch(text) is None:
        raise ValueError(_alias_meaning(text) or f"is not a topology; give {_example(chip)}")
    return tuple(map(int, text.split("x")))


def _alias_meaning(text: str) -> str | None:
    """What to write instead of a name that other tools use; None when no tool does."""
    try:
        meanings = expand_alias(text)
    except ValueError:
        return None
    tools: dict[str, list[str]] = {}
    for meaning in meanings:
        tools.setdefault(meaning.overrides, []).append(meaning.tool)
    ways = [f"{overrides} (as in {', '.join(names)})" for overrides, names in tools.items()]
    return f"is a name of other tools, not a topology; use {' or '.join(ways)}"


def _example(chip: Generation) -> str:
    if chip.name == CPU:
        return "HOSTSxDEVICES, for example 1x4"
    return f"the chips of each side, for example {'4x4x8' if chip.num_dims == 3 else '8x16'}"


def _cpu_slice(topology: tuple[int, ...], chips_per_host: int | None) -> SliceShape:
    if len(topology) != 2 or math.prod(topology) > _MAX_CPU_DEVICES:
        raise ValueError(
            f"is not two sides of at most {_MAX_CPU_DEVICES} devices; give {_example(generation(CPU))}"
        )
    if chips_per_host not in (None, topology[1]):
        raise ValueError(
            f"{chips_per_host} chips a host contradict the topology; leave hardware.chips_per_host out"
        )
    return SliceShape(
        generation=CPU,
        topology=topology,
        topology_name=topology_name(topology),
        machine_type=CPU,
        chips_per_host=topology[1],
        devices_per_chip=1,
        wrap=(False, False),
        gke_accelerator=None,
        accelerator_type=None,
        aot_topology=None,
        requires_workload_policy=False,
    )


def _choose(
    hosts: Sequence[HostShape], chips_per_host: int | None, chip: Generation, topology: tuple[int, ...]
) -> HostShape:
    fitting = [host for host in hosts if chips_per_host in (None, host.chips_per_host)]
    if len(fitting) == 1:
        return fitting[0]
    ways = " or ".join(_describe_hosts(host, topology) for host in hosts)
    what = f"{chip.name} {topology_name(topology)} comes as {ways}"
    if not fitting:
        raise ValueError(f"{what}, not with {chips_per_host} chips a host; {_choice_of_hosts(hosts)}")
    raise ValueError(f"{what}; {_choice_of_hosts(hosts)}")


def _choice_of_hosts(hosts: Sequence[HostShape]) -> str:
    if len(hosts) == 1:
        return "leave hardware.chips_per_host out"
    return "use hardware.chips_per_host=" + " or ".join(str(host.chips_per_host) for host in hosts)


def _describe_hosts(host: HostShape, topology: tuple[int, ...]) -> str:
    count = math.prod(topology) // host.chips_per_host
    return f"{count} host{'s' * (count > 1)} of {host.chips_per_host} ({host.machine_type})"


def _describe_choices(chip: Generation, topology: tuple[int, ...]) -> str:
    swapped = tuple(sorted(topology))
    if host_shapes(chip, swapped):
        return f"sides go from small to large: use {topology_name(swapped)}"
    if chip.cubes is None:
        return f"use one of {', '.join(chip.shapes)}"
    near = " or ".join(topology_name(sides) for sides in _nearest(chip, topology))
    return (
        f"use {near} (there are {', '.join(chip.shapes)} and whole 4x4x4 cubes up to {max_chips(chip)} chips)"
    )


def _nearest(chip: Generation, topology: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    """The largest topology of at most as many chips and the smallest of at least as many."""
    size, known = math.prod(topology), topologies(chip.name)
    below = [sides for sides in known if math.prod(sides) <= size]
    above = [sides for sides in known if math.prod(sides) >= size]
    most = max((math.prod(sides) for sides in below), default=0)
    lower = [sides for sides in below if math.prod(sides) == most][:1]
    return list(dict.fromkeys([*lower, *above[:1]]))


def _slice(chip: Generation, topology: tuple[int, ...], host: HostShape) -> SliceShape:
    name = topology_name(topology)
    return SliceShape(
        generation=chip.name,
        topology=topology,
        topology_name=name,
        machine_type=host.machine_type,
        chips_per_host=host.chips_per_host,
        devices_per_chip=chip.devices_per_chip,
        wrap=_wrap(topology),
        gke_accelerator=chip.gke_accelerator,
        accelerator_type=_accelerator_type(chip, topology, host),
        aot_topology=f"{chip.aot_platform}:{name}",
        requires_workload_policy=chip.requires_workload_policy and math.prod(topology) > host.chips_per_host,
    )


def _wrap(topology: tuple[int, ...]) -> tuple[bool, ...]:
    if len(topology) == 3:
        return (min(topology) >= CUBE_EDGE,) * 3
    return tuple(side == 16 for side in topology)


def _accelerator_type(chip: Generation, topology: tuple[int, ...], host: HostShape) -> str | None:
    """The Cloud TPU API gives a topology the fewest hosts it can have; the others are GKE's only."""
    fewest = max(shape.chips_per_host for shape in host_shapes(chip, topology))
    if chip.cloud_tpu_prefix is None or host.chips_per_host < fewest:
        return None
    return f"{chip.cloud_tpu_prefix}-{math.prod(topology) * chip.cores_per_chip}"

"""What `v5p-128` and `v6e-8` mean in the tools that use such names: not the same hardware in each.

The number counts TensorCores for v4, v5p and tpu7x (two a chip) and chips for v5e and v6e, and the same
name can mean one host of 8 chips in one tool and two hosts of 4 in another. So recipes never use
aliases: they name generation and topology. This explains an alias in those terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.generations import (
    Generation,
    HostShape,
    catalogue,
    generations,
    host_shapes,
    topologies,
    topology_name,
)

_CLOUD_TPU_API = "Cloud TPU API"
_XPK = "xpk"
_OWN_NAMES = {
    "v6e-8-1": ("axlearn", "v6e", (2, 4)),
    # Counts chips, although the Cloud TPU API's v5p-8 for the same machine counts TensorCores.
    "v5p-4": ("cluster-toolkit", "v5p", (2, 2, 1)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasMeaning:
    """What one tool takes an alias to be."""

    tool: str
    generation: str
    topology: str
    """The one the tool takes when nothing else is said."""
    other_topologies: tuple[str, ...]
    """Of the same size; the tool must be told."""
    num_chips: int
    num_hosts: int
    chips_per_host: int
    machine_type: str

    @property
    def overrides(self) -> str:
        """The same hardware in a recipe."""
        text = f"hardware.generation={self.generation} hardware.topology={self.topology}"
        return f"{text} hardware.chips_per_host={self.chips_per_host}" if self.topology == "2x4" else text


def expand_alias(alias: str) -> Sequence[AliasMeaning]:
    """What each tool that knows ``alias`` takes it to be.

    Raises:
      ValueError: no tool knows it; the message is a clause that says what is known.
    """
    found = list(_meanings(alias))
    if found:
        return found
    if alias.startswith("v5e-"):
        raise ValueError(f"is no tool's name: v5e slices are called v5litepod-{alias.removeprefix('v5e-')}")
    prefixes = [chip.xpk_prefix for chip in generations().values() if chip.xpk_prefix]
    raise ValueError(f"is no tool's name for a slice (PREFIX-NUMBER with a prefix of {', '.join(prefixes)})")


def render_alias(alias: str) -> str:
    """The same as text, a paragraph a tool, and whether the tools agree.

    Raises:
      ValueError: as :func:`expand_alias`.
    """
    meanings = expand_alias(alias)
    lines = [line for meaning in meanings for line in _render(alias, meaning)]
    shapes = {(meaning.topology, meaning.chips_per_host) for meaning in meanings}
    if len(shapes) > 1:
        lines.append(f"{alias} is not the same hardware in every tool; name the topology instead.")
    return "\n".join(lines) + "\n"


def _render(alias: str, meaning: AliasMeaning) -> Iterator[str]:
    chip = generations()[meaning.generation]
    size = f"{meaning.num_chips} chip{'s' * (meaning.num_chips > 1)}"
    if chip.cores_per_chip > 1:
        size += f" ({meaning.num_chips * chip.cores_per_chip} TensorCores)"
    hosts = f"{meaning.num_hosts} host{'s' * (meaning.num_hosts > 1)} of {meaning.chips_per_host}"
    slice_text = f"{chip.name} {meaning.topology}, {size}, {hosts}, {meaning.machine_type}"
    yield f"{alias} in {meaning.tool}: {slice_text}"
    if meaning.other_topologies:
        yield f"  also of that size: {', '.join(meaning.other_topologies)}"
    yield f"  recipe: {meaning.overrides}"


def _meanings(alias: str) -> Iterator[AliasMeaning]:
    prefix, _, rest = alias.partition("-")
    for chip in generations().values():
        if prefix == chip.cloud_tpu_prefix and rest.isdecimal():
            yield from _by_size(chip, int(rest), _CLOUD_TPU_API)
        if prefix == chip.xpk_prefix and rest.isdecimal():
            yield from _by_size(chip, int(rest), _XPK)
        if prefix == chip.xpk_prefix and "x" in rest:
            yield from _by_topology(chip, rest)
    if alias in _OWN_NAMES:
        tool, name, topology = _OWN_NAMES[alias]
        chip = generations()[name]
        yield _meaning(tool, chip, [topology], host_shapes(chip, topology)[0])


def _by_size(chip: Generation, size: int, tool: str) -> Iterator[AliasMeaning]:
    candidates = [sides for sides in topologies(chip.name) if math.prod(sides) * chip.cores_per_chip == size]
    if not candidates or (tool == _XPK and math.prod(candidates[0]) < chip.xpk_min_chips):
        return
    if tool == _XPK and size in catalogue()["xpk_flat_cores"].get(chip.name, ()):
        candidates.sort()
    elif chip.cubes is not None:
        candidates.sort(key=lambda sides: (sum(sides), list(sides) != sorted(sides), sides))
    yield _meaning(tool, chip, candidates, _host_shape(chip, candidates[0], tool))


def _by_topology(chip: Generation, text: str) -> Iterator[AliasMeaning]:
    named = [sides for sides in topologies(chip.name) if topology_name(sides) == text]
    if named and math.prod(named[0]) >= chip.xpk_min_chips:
        yield _meaning(_XPK, chip, named, _host_shape(chip, named[0], _XPK))


def _host_shape(chip: Generation, topology: tuple[int, ...], tool: str) -> HostShape:
    """The Cloud TPU API takes the fewest hosts, xpk the most."""
    pick = max if tool == _CLOUD_TPU_API else min
    return pick(host_shapes(chip, topology), key=lambda host: host.chips_per_host)


def _meaning(
    tool: str, chip: Generation, candidates: Sequence[tuple[int, ...]], host: HostShape
) -> AliasMeaning:
    topology, *others = candidates
    return AliasMeaning(
        tool=tool,
        generation=chip.name,
        topology=topology_name(topology),
        other_topologies=tuple(topology_name(sides) for sides in others if list(sides) == sorted(sides)),
        num_chips=math.prod(topology),
        num_hosts=math.prod(topology) // host.chips_per_host,
        chips_per_host=host.chips_per_host,
        machine_type=host.machine_type,
    )

"""How the members of a collective lie on the torus of a slice: which sides they span, and which wrap.

Device ids count the chips of a slice with the first coordinate fastest, and the cores of a chip before
that (`jax.experimental.topologies`; ids of further slices are 100,000 apart).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.hardware import SliceShape

IDS_OF_SLICE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One dimension of the torus as far as a group spans it."""

    size: int
    """Chips of the group along it."""
    wraps: bool
    """The group is a ring: it has the whole dimension, whose ends are linked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a group exchanges over: sides with more than one chip. None: the cores of one chip."""

    sides: tuple[Side, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus:
    """The chips of one slice."""

    topology: tuple[int, ...]
    wrap: tuple[bool, ...]
    devices_per_chip: int

    @classmethod
    def of(cls, shape: SliceShape) -> Torus:
        return cls(topology=shape.topology, wrap=shape.wrap, devices_per_chip=shape.devices_per_chip)

    def coordinates(self, device_id: int) -> tuple[int, ...]:
        """Of the chip that a device is, or is a core of."""
        chip = device_id % IDS_OF_SLICE // self.devices_per_chip
        found = []
        for side in self.topology:
            chip, coordinate = divmod(chip, side)
            found.append(coordinate)
        return tuple(found)

    def link(self, device_ids: Sequence[int]) -> Link:
        """What a group of devices of one slice spans."""
        places = [self.coordinates(device) for device in device_ids]
        sizes = [len(set(along)) for along in zip(*places, strict=True)]
        return Link(
            sides=tuple(
                Side(size=size, wraps=wraps and size == whole)
                for size, whole, wraps in zip(sizes, self.topology, self.wrap, strict=True)
                if size > 1
            )
        )

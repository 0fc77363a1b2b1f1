"""Who talks to whom: device groups of collectives as HLO prints them, and the mesh axes they lie along.

Inside a slice partitions are numbered in mesh order; across slices devices have the ids of the topology.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Groups = Sequence[Sequence[int]]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_PART_OF_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_LIST = re.compile(r"\{([\d,]+)\}")
_PAIR = re.compile(r"\{(\d+)(?:,|->)(\d+)\}")
_ACROSS = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_IDS_OF_SLICE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """How the mesh lies over the devices; all in mesh order."""

    axes: Mapping[str, int]
    """Size by axis, outermost first."""
    device_ids: Sequence[int]
    device_slices: Sequence[int]

    def local_positions(self) -> list[int]:
        """Positions of the devices of one slice: of its partitions 0, 1, 2 ..."""
        first = self.device_slices[0]
        return [place for place, number in enumerate(self.device_slices) if number == first]

    def positions(self) -> Mapping[int, int]:
        """Position by device id."""
        return {device: place for place, device in enumerate(self.device_ids)}

    def axes_between(self, groups: Iterable[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which positions of a group differ, outermost first."""
        sizes = tuple(self.axes.values())
        differing = {
            dim
            for group in groups
            for dim, places in enumerate(zip(*(_unravel(place, sizes) for place in group), strict=True))
            if len(set(places)) > 1
        }
        return tuple(axis for dim, axis in enumerate(self.axes) if dim in differing)


def replica_groups(text: str, num_partitions: int) -> Groups:
    """The groups of ``replica_groups``: listed, as an iota, or as axes of a mesh.

    Raises:
      ValueError: in no form that is known.
    """
    text = text.strip()
    if text == "{}":
        return [range(num_partitions)]
    if found := _IOTA.fullmatch(text):
        shape, dims, order = (_numbers(part or "") for part in found.groups())
        return _chunks(_transposed(range(math.prod(dims)), dims, order or range(len(dims))), shape[-1])
    if found := _MESH.fullmatch(text):
        return _mesh_groups(found[1], _numbers(found[2] or ""), found[3])
    if text.startswith("{{"):
        return [_numbers(group) for group in _LIST.findall(text)]
    raise ValueError(f"replica_groups={text[:80]} is in no known form")


def pairs(text: str) -> Groups:
    """``{{0,1},{1,0}}`` or ``{{0->1},{1->0}}`` without those who keep what they have."""
    found = [(int(source), int(target)) for source, target in _PAIR.findall(text)]
    return [pair for pair in found if pair[0] != pair[1]]


def groups_across_slices(text: str) -> Groups:
    """Device ids of ``_xla_megascale_target``: listed, paired, or ``{1,2}x{0:7}``.

    The last means that devices 0 to 7 of slices 1 and 2 each talk to their like.
    """
    if found := _ACROSS.fullmatch(text):
        slices, local = _ranges(found[1]), _ranges(found[2])
        return [[number * _IDS_OF_SLICE + device for number in slices] for device in local]
    if "->" in text:
        return pairs(text)
    return [_numbers(group) for group in _LIST.findall(text)]


def _mesh_groups(axes: str, device_ids: Sequence[int], along: str) -> Groups:
    """Groups along whole axes, or along parts of an axis, as ``x:(2)4``: 2 before it, 4 of it."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in _PART_OF_AXIS.findall(along):
        parts.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    dims: list[int] = []
    grouped: list[int] = []
    for name, full in sizes.items():
        done = 1
        for before, size in sorted(parts.get(name, [])):
            if before != done:
                dims.append(before // done)
            grouped.append(len(dims))
            dims.append(size)
            done = before * size
        if done != full or name not in parts:
            dims.append(full // done)
    order = [dim for dim in range(len(dims)) if dim not in grouped] + grouped
    devices = device_ids or range(math.prod(dims))
    return _chunks(_transposed(devices, dims, order), math.prod(dims[dim] for dim in grouped))


def _transposed(flat: Sequence[int], dims: Sequence[int], order: Sequence[int]) -> list[int]:
    strides = [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
    places = itertools.product(*(range(dims[dim]) for dim in order))
    return [
        flat[sum(place * strides[dim] for place, dim in zip(index, order, strict=True))] for index in places
    ]


def _chunks(flat: Sequence[int], size: int) -> Groups:
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _unravel(place: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        place, index = divmod(place, size)
        found.append(index)
    return found[::-1]


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _ranges(text: str) -> list[int]:
    """``1,4:6`` as 1, 4, 5, 6."""
    bounds = [[int(bound) for bound in item.split(":")] for item in _items(text)]
    return [number for each in bounds for number in range(each[0], each[-1] + 1)]

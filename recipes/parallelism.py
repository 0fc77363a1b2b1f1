"""Mesh arithmetic shared by check, plan and trainer: fills -1 and splits the batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.hardware import slice_shape
from recipes.schema import MeshConfig, MultisliceConfig, Recipe

AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")
"""Mesh axes, outermost first."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that the batch dimension is divided over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Degrees by axis: ``ici`` inside a slice, ``dcn`` across slices. No -1 left."""

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    @property
    def total(self) -> Mapping[str, int]:
        """ICI degree times DCN degree, by axis."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.total.values())

    @property
    def batch_shards(self) -> int:
        """Parts that the batch dimension is divided into."""
        return math.prod(self.total[axis] for axis in BATCH_AXES)


def mesh_shape(mesh: MeshConfig, multislice: MultisliceConfig, *, devices_per_slice: int) -> MeshShape:
    """The degrees with -1 filled.

    Raises:
      ValueError: more than one -1, a degree below 1, or a product that does not match; the message
        is a clause for :class:`recipes.errors.Problem`.
    """
    ici = _fill({axis: getattr(mesh, axis) for axis in AXES}, devices_per_slice, "devices of a slice")
    across = {axis: getattr(multislice, axis, 1) for axis in AXES}
    dcn = _fill(across, multislice.num_slices, "slices")
    return MeshShape(ici=ici, dcn=dcn)


def recipe_mesh(recipe: Recipe) -> MeshShape:
    """The degrees of a recipe on its own hardware.

    Raises:
      ValueError: as :func:`mesh_shape`, or there is no such hardware.
    """
    devices = slice_shape(recipe.hardware).num_devices
    return mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=devices)


def _fill(degrees: Mapping[str, int], total: int, what: str) -> dict[str, int]:
    bad = [f"{axis}={degree}" for axis, degree in degrees.items() if degree < 1 and degree != -1]
    if bad:
        raise ValueError(f"{', '.join(bad)} is not a degree (at least 1, or -1 to fill)")
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{' and '.join(open_axes)} are both -1; only one axis can be filled")
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    if open_axes and total % known == 0:
        return {**degrees, open_axes[0]: total // known}
    if open_axes or known != total:
        product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree not in (1, -1))
        raise ValueError(f"{product or 'all axes 1'} does not make the {total} {what}")
    return dict(degrees)

"""Processes and devices: jax.distributed from the contract, and the hybrid ICI x DCN mesh.

On TPU the slices of the mesh are the hardware's; on CPU they are groups of processes, because the
CPU client knows no slices: devices are ordered by process and divided evenly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from recipes.contract import HostContext
from recipes.hardware import slice_shape
from recipes.parallelism import AXES, MeshShape, mesh_shape
from recipes.schema import Recipe

_SHUTDOWN_TIMEOUT_S = 60
_MIN_CPU_THREADS = 32
_IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""Otherwise processes may begin independent collectives in different orders, and gloo, which matches them by
order, ends with "collective mismatch": large programs, such as a pipeline over two processes."""


def configure_platform(recipe: Recipe, num_processes: int) -> None:
    """Makes the CPU stand-in devices of this process; nothing on TPU. Call before any JAX computation."""
    if recipe.hardware.generation != "cpu":
        return
    total = slice_shape(recipe.hardware).num_devices * recipe.multislice.num_slices
    if total > 1:
        # Devices that wait in a collective hold a thread each, and a step may have several collectives under
        # way: with XLA's usual one thread a core, they now and then wait for ever ("Termination timeout").
        os.environ.setdefault("NPROC", str(_MIN_CPU_THREADS))
    if num_processes > 1:
        # Read at the first compilation; what the user set comes last, and counts.
        os.environ["XLA_FLAGS"] = f"{_IN_ORDER} {os.environ.get('XLA_FLAGS', '')}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", total // num_processes)
    # Devices of one process meet in memory; across processes the CPU client needs gloo.
    jax.config.update("jax_cpu_collectives_implementation", None if num_processes == 1 else "gloo")


def connect(context: HostContext, *, peer_timeout_s: float) -> None:
    """Initialises jax.distributed, also for one process: without it SIGTERM would save nothing.

    The coordinator binds to its own address only, because gRPC shares ports silently.
    """
    jax.distributed.initialize(
        coordinator_address=context.coordinator,
        num_processes=context.num_processes,
        process_id=context.process_id,
        cluster_detection_method="deactivate",
        coordinator_bind_address=context.coordinator,
        heartbeat_timeout_seconds=math.ceil(peer_timeout_s),
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
    )


def make_mesh(recipe: Recipe, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the recipe over all devices of the job: DCN degrees outermost on each axis.

    ``devices`` are the job's when None; others are those of a topology to compile for.
    """
    devices = jax.devices() if devices is None else devices
    num_slices = recipe.multislice.num_slices
    shape = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=len(devices) // num_slices)
    if devices[0].platform == "cpu":
        grid = _cpu_grid(devices, shape)
    elif num_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            [shape.ici[axis] for axis in AXES],
            [shape.dcn[axis] for axis in AXES],
            devices,
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(
            [shape.ici[axis] for axis in AXES], devices, allow_split_physical_axes=True
        )
    kind = AxisType.Explicit if recipe.mesh.sharding_mode == "explicit" else AxisType.Auto
    return Mesh(grid, AXES, axis_types=(kind,) * len(AXES))


def _cpu_grid(devices: Sequence[jax.Device], shape: MeshShape) -> np.ndarray:
    """Devices as (dcn x ici) per axis, where each slice is a contiguous run of processes."""
    ordered = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)), dtype=object)
    dcn, ici = [shape.dcn[axis] for axis in AXES], [shape.ici[axis] for axis in AXES]
    interleaved = [
        dim for pair in zip(range(len(AXES)), range(len(AXES), 2 * len(AXES)), strict=True) for dim in pair
    ]
    grid = ordered.reshape(dcn + ici).transpose(interleaved)
    return grid.reshape([shape.total[axis] for axis in AXES])

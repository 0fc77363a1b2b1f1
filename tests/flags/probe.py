"""Compiles a small sharded program for a TPU that is not there: does libtpu accept its flags?

    LIBTPU_INIT_ARGS="--xla_..." python -m tests.flags.probe v5p:2x2x1 1

libtpu reads flags when it is loaded, so each set of flags takes a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TOPOLOGIES: Mapping[str, str] = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""The smallest slice of each generation that has something to gather."""
TIMEOUT_S = 150.0
_REPO = Path(__file__).resolve().parents[2]
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")


def probe(
    generation: str, flags: Mapping[str, str], *, num_slices: int = 1
) -> subprocess.CompletedProcess[str]:
    """Compiles under ``flags`` in another process; what libtpu says is in its stderr."""
    argv = [sys.executable, "-m", "tests.flags.probe", TOPOLOGIES[generation], str(num_slices)]
    environment = {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return subprocess.run(
        argv, cwd=_REPO, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def main(arguments: Sequence[str]) -> None:
    """Weights are gathered in a loop, as the layers of a model with FSDP gather theirs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    name, num_slices = arguments
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=int(num_slices))
    mesh = Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))
    layers, width, rows = 2, 1024, 128 * mesh.size

    def forward(x_bd: jax.Array, w_ldd: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h_bd, w_dd: (jax.nn.silu(h_bd @ w_dd), None), x_bd, w_ldd)[0]

    def shaped(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = shaped((layers, width, width), PartitionSpec(None, "fsdp", None))
    jax.jit(forward).lower(shaped((rows, width), PartitionSpec("fsdp", None)), weights).compile()


if __name__ == "__main__":
    main(sys.argv[1:])

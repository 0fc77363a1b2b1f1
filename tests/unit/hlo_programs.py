"""The small programs whose scheduled HLO lies in tests/unit/hlo, and how it is made.

python -m tests.unit.hlo_programs [NAME ...]     (needs libtpu, no TPU)

What no test reads is cut off: tables of source files, and of ``backend_config`` all but the cycles.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.unit.hlo_support import FOLDER

FLAGS: Mapping[str, str] = {
    # The compiler hides collectives in chains of fusions only when asked to.
    "async_chain": "--xla_tpu_enable_async_collective_fusion=true"
    " --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
    " --xla_tpu_enable_async_collective_fusion_multiple_steps=true"
    " --xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true"
    " --xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
}
_TABLES = re.compile(r"\n\nFileNames\n.*?(?=\n\n\n)", re.DOTALL)
_CYCLES = re.compile(r'"estimated_cycles":"\d+"')
_FRAME = re.compile(r" stack_frame_id=\d+")


def mesh_of(sizes: Mapping[str, int], topology: str = "v5e:2x4", num_slices: int = 1) -> Mesh:
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=num_slices)
    return Mesh(np.array(found.devices).reshape(tuple(sizes.values())), tuple(sizes))


def abstract(mesh: Mesh, shape: tuple[int, ...], *axes: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))


def text(function: Callable[..., object], *arguments: object, **options: object) -> str:
    return jax.jit(function, **options).lower(*arguments).compile().as_text() or ""  # type: ignore[call-overload]


def two_axes() -> Mesh:
    return mesh_of({"fsdp": 2, "tensor": 4})


def layers(mesh: Mesh, x_bd: jax.Array, w_ldd: jax.Array) -> jax.Array:
    def layer(x_bd: jax.Array, w_dd: jax.Array) -> tuple[jax.Array, None]:
        y_bd = jnp.tanh(x_bd @ w_dd)
        return jax.lax.with_sharding_constraint(y_bd, NamedSharding(mesh, P("fsdp"))), None

    return jax.lax.scan(layer, x_bd, w_ldd)[0]


def fsdp_scan() -> str:
    mesh = mesh_of({"fsdp": 8})
    x_bd, w_ldd = abstract(mesh, (64, 256), "fsdp"), abstract(mesh, (6, 256, 256), None, "fsdp")
    return text(functools.partial(layers, mesh), x_bd, w_ldd)


def async_chain() -> str:
    mesh = mesh_of({"fsdp": 8})
    x_bd, w_ldd = abstract(mesh, (8192, 4096), "fsdp"), abstract(mesh, (6, 4096, 4096), None, "fsdp")

    def twice(x_bd: jax.Array, w_ldd: jax.Array, v_ldd: jax.Array) -> jax.Array:
        def layer(x_bd: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            for w_dd in weights:
                x_bd = jnp.tanh(x_bd @ w_dd)
                x_bd = jax.lax.with_sharding_constraint(x_bd, NamedSharding(mesh, P("fsdp")))
            return x_bd, None

        return jax.lax.scan(layer, x_bd, (w_ldd, v_ldd))[0]

    return text(twice, x_bd, w_ldd, w_ldd)


def tensor_sum() -> str:
    mesh = two_axes()
    x_bd, w_df = abstract(mesh, (64, 4096), "fsdp", "tensor"), abstract(mesh, (4096, 512), "tensor")
    return text(jnp.matmul, x_bd, w_df, out_shardings=NamedSharding(mesh, P("fsdp")))


def slices_sum() -> str:
    mesh = mesh_of({"data": 2, "fsdp": 8}, num_slices=2)
    return text(
        functools.partial(jnp.sum, axis=0),
        abstract(mesh, (16, 4096), ("data", "fsdp")),
        out_shardings=NamedSharding(mesh, P()),
    )


def ring() -> str:
    mesh = two_axes()
    along = [(place, (place + 1) % 4) for place in range(4)]
    shift = functools.partial(jax.lax.ppermute, axis_name="tensor", perm=along)
    spec = P(None, "tensor")
    return text(
        jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec),
        abstract(mesh, (512, 512), None, "tensor"),
    )


def exchange() -> str:
    mesh = two_axes()
    swap = functools.partial(jax.lax.all_to_all, axis_name="tensor", split_axis=0, concat_axis=1, tiled=True)
    spec = P(None, "tensor")
    return text(
        jax.shard_map(swap, mesh=mesh, in_specs=spec, out_specs=spec),
        abstract(mesh, (512, 512), None, "tensor"),
    )


def offload() -> str:
    mesh = mesh_of({"fsdp": 8})
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w_ldd: jax.Array, x_bd: jax.Array) -> jax.Array:
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def layer(x_bd: jax.Array, w_dd: jax.Array) -> tuple[jax.Array, None]:
            x_bd = jax.ad_checkpoint.checkpoint_name(x_bd, "x")
            return jnp.tanh(x_bd @ w_dd), None

        return jax.lax.scan(layer, x_bd, w_ldd)[0].astype(jnp.float32).sum()

    return text(jax.grad(loss), abstract(mesh, (6, 512, 512)), abstract(mesh, (8192, 512), "fsdp"))


def kernel_in_scan() -> str:
    mesh = mesh_of({"fsdp": 4}, topology="v5e:2x2")

    def attend(q_bnth: jax.Array, k_bnth: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha_single_device(
            mask=masks.MultiHeadMask([masks.CausalMask((1024, 1024))] * 2)
        )

        def layer(q_bnth: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.vmap(kernel)(q_bnth, k_bnth, k_bnth).astype(q_bnth.dtype), None

        return jax.lax.scan(layer, q_bnth, None, length=3)[0]

    spec = P("fsdp")
    q_bnth = abstract(mesh, (4, 2, 1024, 128), "fsdp")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return text(mapped, q_bnth, q_bnth)


PROGRAMS: Mapping[str, Callable[[], str]] = {
    made.__name__: made
    for made in (fsdp_scan, async_chain, tensor_sum, slices_sum, ring, exchange, offload, kernel_in_scan)
}


def cut(text: str) -> str:
    """Without what no test reads."""
    kept = _FRAME.sub("", _TABLES.sub("", text))
    return "\n".join(_cut_config(line) for line in kept.splitlines()) + "\n"


def _cut_config(line: str) -> str:
    head, found, config = line.partition(", backend_config={")
    cycles = _CYCLES.search(config)
    if not found:
        return line
    return f"{head}, backend_config={{{cycles[0]}}}" if cycles else head


def main(names: list[str]) -> None:
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if len(names) != 1:
        for name in names or [path.stem for path in FOLDER.glob("*.txt")]:
            environment = {**os.environ, "LIBTPU_INIT_ARGS": FLAGS.get(name, "")}
            os.spawnve(
                os.P_WAIT,
                sys.executable,
                [sys.executable, "-m", "tests.unit.hlo_programs", name],
                environment,
            )
        return
    (FOLDER / f"{names[0]}.txt").write_text(cut(PROGRAMS[names[0]]()), encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])

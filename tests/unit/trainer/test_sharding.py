"""What a wrong shape is told, before anything is compiled; how optimizer state is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.schema import Recipe
from trainer.devices import make_mesh
from trainer.program import build_program
from trainer.sharding import ShardingError, _by_rows, check_shape, constrain, einsum

MakeRecipe = Callable[..., Recipe]

MESH_SHAPE = {"data": 2, "stage": 1, "fsdp": 4, "context": 2, "expert": 1, "tensor": 3}


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        (
            (10, 12),
            ("embed", "mlp"),
            "w (embed 10, mlp 12): logical axis embed of size 10 cannot be divided over the mesh axes fsdp 4",
        ),
        (
            (16, 9, 8),
            ("batch", "split_sequence", None),
            "w (batch 16, split_sequence 9, - 8): logical axis split_sequence of size 9 cannot be divided"
            " over the mesh axes context 2 x tensor 3",
        ),
        ((8,), ("embed", "mlp"), "w (8,) with axes ('embed', 'mlp'): 1 dimensions, but 2 logical axes"),
        ((8,), ("widht",), "w (widht 8): no such logical axis: widht"),
    ],
)
def test_errors_name_tensor_axes_and_mesh(
    shape: Sequence[int], axes: Sequence[str | None], message: str
) -> None:
    with pytest.raises(ShardingError) as caught:
        check_shape("w", shape, axes, MESH_SHAPE)
    assert str(caught.value) == message


def test_a_weight_is_refused_before_any_compilation(small: MakeRecipe) -> None:
    recipe = small({"model.mlp_dim": 33, "mesh.tensor": 2, "mesh.fsdp": 4})
    with pytest.raises(ShardingError, match=r"blocks\.mlp\.down_fd .*mlp 33.*mesh axes tensor 2"):
        build_program(recipe, make_mesh(recipe))


def test_an_activation_is_refused_while_it_is_traced(small: MakeRecipe) -> None:
    mesh = make_mesh(small({"mesh.fsdp": 2, "mesh.context": 4}))
    with jax.set_mesh(mesh), pytest.raises(ShardingError, match=r"hidden .*sequence 6.*context 4"):
        jax.eval_shape(lambda x: constrain(x, ("batch", "sequence"), "hidden"), jnp.zeros((4, 6)))


@pytest.mark.parametrize(
    ("subscripts", "by_rows"),
    [
        ("btd,df->btf", "md,df->mf"),
        ("btd,dnh->btnh", "md,dnh->mnh"),
        ("btnh,nhd->btd", "mnh,nhd->md"),
        ("btd,btw->wd", None),
        ("btd,btec->becd", None),
        ("becd,edf->becf", None),
    ],
)
def test_batch_and_sequence_are_one_dimension_of_rows(subscripts: str, by_rows: str | None) -> None:
    assert _by_rows(subscripts) == by_rows


@pytest.mark.parametrize("changes", [{"mesh.fsdp": 8}, {"mesh.fsdp": 4, "mesh.tensor": 2}])
def test_matmuls_of_rows_are_those_of_einsum(small: MakeRecipe, changes: dict[str, int]) -> None:
    rng = np.random.default_rng(3)
    x_btd, w_df = rng.standard_normal((8, 4, 6)), rng.standard_normal((6, 10))

    def loss(x_btd: jax.Array, w_df: jax.Array) -> jax.Array:
        out_btf = einsum("btd,df->btf", x_btd, w_df, ("batch", "sequence", "mlp"), name="out")
        return jnp.sum(jnp.sin(out_btf))

    expected = jax.value_and_grad(loss, argnums=(0, 1))(x_btd, w_df)
    mesh = make_mesh(small(changes))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x_btd, w_df)
        text = jax.jit(loss).lower(x_btd, w_df).as_text()
    assert ("tensor<32x6xf32>" in text) == ("mesh.tensor" not in changes)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"optimizer.second_moment_dtype": "bfloat16"}])
def test_zero1_divides_moments_and_not_weights(small: MakeRecipe, changes: dict[str, str]) -> None:
    recipe = small({"mesh.data": 4, "mesh.fsdp": 2, "mesh.zero1": True, **changes})
    state = build_program(recipe, make_mesh(recipe)).state
    parts = jax.tree.leaves(state.opt_state, is_leaf=lambda node: hasattr(node, "nu"))
    adam = next(part for part in parts if hasattr(part, "nu"))
    weight, first = state.params["output_vd"], adam.mu["output_vd"]
    assert np.prod(weight.sharding.shard_shape(weight.shape)) == weight.size // 2
    assert np.prod(first.sharding.shard_shape(first.shape)) == first.size // 8
    assert adam.nu["output_vd"].dtype == recipe.optimizer.second_moment_dtype

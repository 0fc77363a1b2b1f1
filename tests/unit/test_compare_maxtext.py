"""The parts of the comparison with MaxText that need neither MaxText nor a compiler."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.compare_maxtext import Compiled, compared, ratio_of_turns, read
from benchmarks.maxtext_pairs import COMMON, CPU_RECIPE, PAIRS, Pair, cpu_overrides, cpu_settings
from benchmarks.maxtext_runs import compiler_environment, fingerprint, read_steps
from launcher.compose import compose
from recipes.hardware import generation, slice_shape
from recipes.schema import Recipe

MAXTEXT_TOPOLOGIES = {
    "v5p-256": "v5p:4x4x8",
    "v5p-128": "v5p:4x4x4",
    "v5e-256": "v5e:16x16",
    "v6e-8": "v6e:2x4",
}
MODULE = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,128]) -> f32[4] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %ag = bf16[32,128]{1,0:T(8,128)(2,1)} all-gather(%x), replica_groups=[1,4]<=[4]
  %k.1 = f32[16]{0:T(128)} custom-call(%ag), custom_call_target="tpu_custom_call"
  %rs = f32[4]{0:T(128)} reduce-scatter(%k.1), replica_groups=[1,4]<=[4], to_apply=%sum
  ROOT %c = f32[4]{0:T(128)} copy(%rs), backend_config={"window_config":{},"estimated_cycles":"700"}
}
"""


def settings_of(pair: Pair) -> dict[str, str]:
    return dict(word.split("=", 1) for word in (*COMMON, *pair.settings))


def recipe_of(pair: Pair) -> Recipe:
    return compose(pair.recipe, pair.overrides).recipe


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_both_sides_have_the_same_work(pair: Pair) -> None:
    settings, recipe = settings_of(pair), recipe_of(pair)
    shape = slice_shape(recipe.hardware)
    topology = f"{recipe.hardware.generation}:{recipe.hardware.topology}"
    assert MAXTEXT_TOPOLOGIES[settings["compile_topology"]] == topology
    assert recipe.train.global_batch_size == int(settings["per_device_batch_size"]) * shape.num_chips
    assert recipe.train.sequence_length == int(settings["max_target_length"])
    assert (recipe.model.compute_dtype, recipe.model.weight_dtype) == (
        settings["dtype"],
        settings["weight_dtype"],
    )
    assert recipe.model.attention == "splash"
    assert (recipe.multislice.num_slices, recipe.train.grad_accum_steps) == (1, 1)
    degrees = (
        recipe.mesh.data,
        recipe.mesh.tensor,
        recipe.mesh.context,
        recipe.mesh.expert,
        recipe.mesh.stage,
    )
    assert (recipe.mesh.fsdp, degrees) == (-1, (1, 1, 1, 1, 1))
    assert settings["model_name"] in pair.name
    assert topology == pair.name.split(", ")[1].replace(" ", ":")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_flags_are_given_once_and_not_those_that_the_chip_refuses(pair: Pair) -> None:
    names = [flag.partition("=")[0] for flag in pair.flags]
    assert len(names) == len(set(names))
    refused = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
    chip = generation(recipe_of(pair).hardware.generation).name
    assert (refused in pair.flags) == (chip == "v5e")


@pytest.mark.parametrize("num_devices", [1, 4])
def test_cpu_runs_train_the_same_model_on_the_same_batch(num_devices: int) -> None:
    recipe = compose(CPU_RECIPE, cpu_overrides(num_devices, 12)).recipe
    settings = dict(word.split("=", 1) for word in cpu_settings(num_devices, 12))
    widths = {
        "base_num_decoder_layers": recipe.model.num_layers,
        "base_emb_dim": recipe.model.embed_dim,
        "base_mlp_dim": recipe.model.mlp_dim,
        "base_num_query_heads": recipe.model.num_heads,
        "base_num_kv_heads": recipe.model.num_kv_heads,
        "head_dim": recipe.model.head_dim,
        "vocab_size": recipe.model.vocab_size,
        "max_target_length": recipe.train.sequence_length,
        "steps": recipe.train.num_steps,
    }
    assert {name: int(settings[name]) for name in widths} == widths
    assert int(settings["per_device_batch_size"]) * num_devices == recipe.train.global_batch_size
    assert slice_shape(recipe.hardware).num_chips * recipe.multislice.num_slices == num_devices
    assert recipe.model.compute_dtype == settings["dtype"]
    assert recipe.train.eval_num_batches == 0


def test_a_kept_step_is_found_by_all_that_it_depends_on() -> None:
    pair = PAIRS[0]
    changed = (
        dataclasses.replace(pair, flags=pair.flags[1:]),
        dataclasses.replace(pair, settings=(*pair.settings, "remat_policy=minimal")),
    )
    others = [fingerprint("1", each) for each in changed]
    assert len({fingerprint("1", pair), fingerprint("2", pair), *others}) == 4
    ours = dataclasses.replace(pair, name="renamed", overrides=())
    assert fingerprint("1", ours) == fingerprint("1", pair)


def test_flags_reach_the_compiler_in_the_environment() -> None:
    assert compiler_environment(("--a=1", "--b=2"))["LIBTPU_INIT_ARGS"] == "--a=1 --b=2"


def test_steps_are_read_from_what_maxtext_prints() -> None:
    lines = [
        "I1201 metric_logger.py:240] completed step: 0, seconds: 0.152, TFLOP/s/device: 2.878\n",
        "something else\n",
        "I1201 metric_logger.py:240] completed step: 1, seconds: 10.620, TFLOP/s/device: 0.041\n",
    ]
    clock = iter((7.5,))
    steps = read_steps(lines, start_s=5.0, now=lambda: next(clock))
    assert (steps.first_s, steps.times_s, steps.tail) == (2.5, [0.152, 10.62], lines)
    assert read_steps(["Traceback\n"], start_s=0.0, now=lambda: 1.0).first_s is None


def test_both_sides_are_read_from_the_same_files(tmp_path: Path) -> None:
    memory = {"argument": 100, "temp": 40, "output": 90, "alias": 80, "peak": 130, "generated_code": 7}
    host = {f"host_{name}": 0 for name in ("argument", "temp", "output", "alias")}
    facts: dict[str, object] = dict.fromkeys(("recipe", "generation", "topology", "compiler_flags"), "")
    facts |= dict.fromkeys(("lower_s", "compile_s", "peak_rss_bytes", "usable_hbm_bytes"), 0)
    facts |= {"num_slices": 1, "mesh_axes": {"data": 1, "fsdp": 4}, "jax_version": "", "libtpu_version": ""}
    facts |= {"device_ids": [0, 1, 2, 3], "device_slices": [0] * 4, "memory_bytes": {**memory, **host}}
    (tmp_path / "compiled.txt").write_text(MODULE)
    (tmp_path / "compiled.json").write_text(json.dumps(facts))
    assert read(tmp_path) == Compiled(
        hbm_bytes=130,
        host_bytes=0,
        cycles=700,
        num_kernel_calls=1,
        waiting_bytes={"all-gather": 32 * 128 * 2, "reduce-scatter": 16 * 4},
    )


def test_a_pair_is_compared_by_ratios_with_what_is_in_no_estimate_beside_them() -> None:
    gb = 10**9
    ours = Compiled(
        hbm_bytes=9 * gb, host_bytes=gb, cycles=2 * gb, num_kernel_calls=96, waiting_bytes={"all-gather": 9}
    )
    theirs = Compiled(
        hbm_bytes=12 * gb,
        host_bytes=0,
        cycles=4 * gb,
        num_kernel_calls=0,
        waiting_bytes={"all-reduce": 5 * gb},
    )
    memory, cycles = compared("8b", ours, theirs)
    assert (memory.name, memory.value, memory.aim) == ("8b: memory, over MaxText", 0.75, 1.0)
    assert memory.note == "9.0 GB and 12.0 GB; of the host 1.0 GB and 0.0 GB"
    assert cycles.value == 0.5
    expected = "2.00 and 4.00 G; not in them: 96 kernel calls; 0 kernel calls, all-reduce 5.0 GB"
    assert cycles.note == expected


def test_turns_are_compared_round_by_round() -> None:
    ratio, ours, theirs = ratio_of_turns("step time", "ABBA", [1.0, 2.0, 4.0, 2.0])
    assert (ratio.name, ratio.value, ratio.aim) == ("step time: over MaxText", 0.5, 0.9)
    assert (ours.value, ours.low, ours.high, theirs.value) == (1.5, 1.0, 2.0, 3.0)

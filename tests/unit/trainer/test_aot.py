"""A train step compiled for TPUs without one: memory, FLOPs and collectives against hand computations."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.compiled import SHIPPED, measure
from launcher.compose import compose
from launcher.preflight.collectives import axes_label
from launcher.preflight.compiled import Analysis, Compiled, analyze, read_compiled
from recipes.contract import COMPILED_FACTS_FILE, COMPILED_HLO_FILE
from recipes.errors import UserError
from recipes.hardware import CPU
from recipes.load import flatten, nest
from trainer.aot import DoesNotFit, configure_environment, needed_and_usable

REPO = Path(__file__).resolve().parents[3]
NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)

TINY = {
    "hardware": {"generation": "v5e", "topology": "2x4", "chips_per_host": 4},
    "model": {
        "vocab_size": 512,
        "num_layers": 2,
        "embed_dim": 256,
        "mlp_dim": 512,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 128,
    },
    "mesh": {"fsdp": 4, "tensor": 2},
    "data": {"source": "synthetic"},
    "optimizer": {"learning_rate": 0.01},
    "target": {"kind": "gke"},
    "train": {"num_steps": 10, "global_batch_size": 8, "sequence_length": 256, "remat_policy": "full"},
}
NUM_TOKENS = 8 * 256
LAYER_WEIGHTS = 4 * 256 * 512 + 3 * 256 * 512
TABLE_WEIGHTS = 512 * 256
NORM_WEIGHTS = 5 * 256


def compile_recipe(
    tmp_path: Path, changes: dict[str, object] | None = None, *, out: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs trainer.aot in a process of its own: libtpu reads its environment once."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(nest({**flatten(TINY), **(changes or {})})))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    return subprocess.run(
        [sys.executable, "-m", "trainer.aot", str(path), "--out", str(out or tmp_path)],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:", "Traceback"))]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("aot")
    done = compile_recipe(folder)
    assert done.returncode == 0, done.stderr
    return read_compiled(folder)


@pytest.fixture(scope="module")
def analysis(compiled: Compiled) -> Analysis:
    return analyze(compiled)


@NEEDS_LIBTPU
def test_the_mesh_is_that_of_the_recipe(compiled: Compiled) -> None:
    assert {axis: size for axis, size in compiled.mesh.axes.items() if size > 1} == {"fsdp": 4, "tensor": 2}
    assert sorted(compiled.mesh.device_ids) == list(range(8))
    assert set(compiled.mesh.device_slices) == {0}


@NEEDS_LIBTPU
def test_arguments_are_weights_and_moments_in_float32(compiled: Compiled) -> None:
    divided = 2 * LAYER_WEIGHTS + 2 * TABLE_WEIGHTS
    state = 3 * 4 * (divided / 8 + NORM_WEIGHTS)
    batch = 2 * 4 * NUM_TOKENS / 4
    memory = compiled.memory
    assert memory.argument_bytes == pytest.approx(state + batch, rel=0.01)
    # The new state takes the place of the old one.
    assert memory.alias_bytes == pytest.approx(state, rel=0.01)
    assert memory.host_bytes == 0


@NEEDS_LIBTPU
def test_usable_hbm_is_less_than_the_chip_has(compiled: Compiled) -> None:
    assert compiled.memory.usable_hbm_bytes is not None
    assert 15 * 2**30 < compiled.memory.usable_hbm_bytes < 16 * 2**30
    assert compiled.memory.peak_bytes < compiled.memory.usable_hbm_bytes


@NEEDS_LIBTPU
def test_the_peak_read_off_the_schedule_is_between_arguments_and_the_compilers_peak(
    compiled: Compiled, analysis: Analysis
) -> None:
    memory = compiled.memory
    assert analysis.hbm_bytes == memory.peak_bytes
    # Most of what so small a program makes is in vector memory, which the compiler's peak has in it.
    assert 0.95 * memory.argument_bytes < analysis.peak.size_bytes < 1.1 * memory.peak_bytes
    assert any(buffer.is_argument for buffer in analysis.peak.buffers)


@NEEDS_LIBTPU
def test_flops_are_those_of_a_step_that_recomputes_its_layers(analysis: Analysis) -> None:
    layers = 2 * LAYER_WEIGHTS
    once = 2 * NUM_TOKENS * (layers + TABLE_WEIGHTS)
    again = 2 * NUM_TOKENS * (layers - 2 * 256 * 512)  # the last matmul of a layer need not be
    attention = 2 * 4 * (4 * NUM_TOKENS * 256 * 512)
    expected = (3 * once + again + attention) / 8
    assert analysis.cost.matmul_flops == pytest.approx(expected, rel=0.03)
    assert analysis.cost.estimated_cycles > 0
    assert analysis.schedule.uncounted_loops == ()


@NEEDS_LIBTPU
def test_weights_are_gathered_over_fsdp_and_sums_go_over_tensor(analysis: Analysis) -> None:
    sums: dict[tuple[str, bool], int] = {}
    for each in analysis.collectives:
        key = axes_label(each), each.kind == "all-gather"
        sums[key] = sums.get(key, 0) + each.total_bytes
    # Twice in bfloat16, forward and backward; the output projection once; half of each on a device.
    gathered = 2 * (2 * 2 * LAYER_WEIGHTS + TABLE_WEIGHTS) / 2
    assert sums["fsdp", True] == pytest.approx(gathered, rel=0.1)
    # At least one activation for each of two matmuls in two layers, forward and backward.
    activation = 2 * NUM_TOKENS / 4 * 256
    assert sums["tensor", False] > 2 * 2 * 2 * activation / 2
    assert not [each for each in analysis.collectives if each.is_dcn]
    assert {axis for each in analysis.collectives for axis in each.axes} == {"fsdp", "tensor"}


@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("changes", "returncode", "words"),
    [
        ({"hardware.generation": "cpu", "hardware.topology": "1x8", "hardware.chips_per_host": None,
          "target.kind": "local"}, 2, "for TPUs only"),
        ({"mesh.fsdp": 3}, 2, "mesh"),
        ({"model.vocab_size": "many"}, 2, "vocab_size"),
        ({"train.global_batch_size": 65536, "train.sequence_length": 16384}, 1, "GiB of the 15.75 GiB"),
    ],
)  # fmt: skip
def test_mistakes_are_told_without_a_traceback(
    tmp_path: Path, changes: dict[str, object], returncode: int, words: str
) -> None:
    (tmp_path / COMPILED_HLO_FILE).write_text("of an earlier step")
    done = compile_recipe(tmp_path, changes)
    assert done.returncode == returncode, done.stderr
    lines = error_lines(done)
    assert lines[0].startswith("error:")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / COMPILED_FACTS_FILE).exists()
    assert returncode == 2 or not (tmp_path / COMPILED_HLO_FILE).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = compile_recipe(tmp_path, out=tmp_path / "file")
    assert done.returncode == 2
    assert error_lines(done)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("E1000: for HLO temporaries (40.25G) exceeds available HBM (15.75G). HLO module", (40.25, 15.75)),
        ("memory space hbm. Used 32.90G of 31.25G hbm. Exceeded by 1.65G.", (32.9, 31.25)),
        ("total (1.5T) exceeds available HBM (512.0M)", (1536, 0.5)),
        ("INTERNAL: something else", None),
    ],
)
def test_sizes_in_the_words_of_the_compiler(message: str, sizes: tuple[float, float] | None) -> None:
    expected = None if sizes is None else tuple(round(size * 2**30) for size in sizes)
    assert needed_and_usable(message) == expected


def test_what_does_not_fit_is_said_with_numbers() -> None:
    error = DoesNotFit(round(32.9 * 2**30), round(31.25 * 2**30))
    assert "32.90 GiB of the 31.25 GiB" in error.message
    assert error.exit_code == 1


def test_the_environment_keeps_jax_off_the_chips() -> None:
    environment = {"JAX_PLATFORMS": "tpu", "TPU_SKIP_MDS_QUERY": "0"}
    configure_environment(environment)
    assert environment == {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


@pytest.mark.parametrize(
    ("facts", "text"),
    [(None, "HloModule m"), ("{}", "HloModule m"), ("[]", "HloModule m"), ("?", "HloModule m"), ("{}", None)],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, facts: str | None, text: str | None) -> None:
    for name, contents in ((COMPILED_FACTS_FILE, facts), (COMPILED_HLO_FILE, text)):
        if contents is not None:
            (tmp_path / name).write_text(contents)
    with pytest.raises(UserError) as caught:
        read_compiled(tmp_path)
    assert "trainer.aot" in caught.value.hint


@NEEDS_LIBTPU
def test_a_program_of_another_form_is_refused(compiled: Compiled) -> None:
    other = dataclasses.replace(compiled, hlo_text="not HLO")
    with pytest.raises(UserError, match="cannot be read"):
        analyze(other)


@NEEDS_LIBTPU
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.yaml")))
def test_shipped_recipes_fit(name: str, tmp_path: Path) -> None:
    recipe = compose(name, []).recipe
    if recipe.hardware.generation == CPU:
        pytest.skip("a recipe for CPU devices")
    row = measure(recipe, tmp_path)
    assert row.problem == ""
    assert row.analysis is not None
    assert row.analysis.schedule.uncounted_loops == ()

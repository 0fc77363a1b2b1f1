"""Memory from sizes alone, beside what the TPU compiler says of the same steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks.maxtext_pairs import PAIRS
from launcher.cli import main
from launcher.compose import compose
from launcher.preflight.estimate import USABLE_SHARE, estimate

PEAKS = [
    ("llama3-405b-v5p-8x8x8-x2", (), 29.78),
    ("llama3-70b-v5p-4x4x8", (), 38.50),
    ("llama3-8b-v5e-16x16", (), 4.29),
    ("llama3-8b-v6e-16x16-x2", (), 4.75),
    ("mixtral-8x7b-v6e-16x16", (), 14.87),
    # Refused by libtpu 0.0.50.1, which says what it needs (hardware.tuned_flags=false).
    ("llama3-8b-v5e-16x16", ("train.remat_policy=none",), 98.5),
    (PAIRS[1].recipe, PAIRS[1].overrides, 24.70),
    (PAIRS[3].recipe, PAIRS[3].overrides, 21.33),
]
"""GB of HBM by libtpu 0.0.50.1, as docs/compiled.md and docs/compare-maxtext.md have them."""


@pytest.mark.parametrize(("name", "overrides", "peak_gb"), PEAKS)
def test_an_estimate_is_within_a_fifth_of_the_compiler(
    name: str, overrides: Sequence[str], peak_gb: float
) -> None:
    found = estimate(compose(name, overrides).recipe)
    assert found.hbm_bytes / 1e9 == pytest.approx(peak_gb, rel=0.2)
    assert found.hbm_bytes == sum(part.size_bytes for part in found.parts)


@pytest.mark.parametrize(
    ("overrides", "part", "factor"),
    [
        (["train.global_batch_size=512"], "saved for the backward pass", 2),
        (["train.global_batch_size=512", "train.grad_accum_steps=2"], "saved for the backward pass", 1),
        (["mesh.tensor=2"], "saved for the backward pass", 1),
        (["train.remat_policy=named", "train.remat_offload=[layer_input]"], "saved for the backward pass", 0),
        (["model.weight_dtype=bfloat16"], "gradients", 0.5),
        (["hardware.topology=8x16", "train.global_batch_size=128"], "gradients", 2),
    ],
)
def test_parts_follow_what_they_are_made_of(overrides: list[str], part: str, factor: float) -> None:
    name = "llama3-8b-v5e-16x16"
    before, after = (
        {each.name: each.size_bytes for each in estimate(compose(name, changes).recipe).parts}
        for changes in ([], overrides)
    )
    assert after[part] == pytest.approx(factor * before[part], rel=0.01)


def test_bfloat16_weights_need_no_copy_to_compute_with() -> None:
    recipe = compose("llama3-8b-v5e-16x16", ["model.weight_dtype=bfloat16"]).recipe
    assert "weights to compute with" not in {part.name for part in estimate(recipe).parts}


def test_usable_memory_is_that_of_a_device() -> None:
    for name, gib in (("llama3-8b-v5e-16x16", 16), ("llama3-8b-v6e-16x16-x2", 32)):
        usable = estimate(compose(name, []).recipe).usable_hbm_bytes
        assert usable == pytest.approx(USABLE_SHARE * gib * 2**30, rel=1e-6)


def test_the_verb_estimates_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "llama3-70b-v5p-4x4x8", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "fits: 37.7 GiB of 93.1 GiB of HBM on each device" in out
    assert "estimated from sizes" in out
    assert "6.2 GiB  weights and optimizer state" in out
    words = ["preflight", "llama3-8b-v5e-16x16", "train.global_batch_size=2048", "--quick", "--json"]
    assert main(words) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["is_estimate"], found["fits"], found["step"]) == (True, False, None)
    assert found["remedy"]["overrides"][-1].startswith("train.")
    assert "trying train.vocab_chunks" in captured.err


def test_without_libtpu_the_answer_is_an_estimate() -> None:
    """In a process of its own, in which libtpu cannot be found."""
    hidden = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'libtpu' else find(name, *rest);"
        "from launcher.cli import main; sys.exit(main(['preflight', 'llama3-8b-v5e-16x16']))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "estimated from sizes" in done.stdout


def test_cpu_recipes_have_no_preflight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "quickstart"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: quickstart is for CPU devices")

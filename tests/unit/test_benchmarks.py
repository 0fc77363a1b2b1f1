"""The arithmetic and the table of the benchmarks; what they measure is never a test."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import PARTS, as_json, parse
from benchmarks.figures import abba, best, ratio_of_bests, round_ratios, summary, table
from benchmarks.gke import LARGE, LAUNCHES, NUM_SLICES, SLICES, Times, figures, target
from benchmarks.machine import Machine
from benchmarks.step_time import NUM_WARMUP_STEPS, steady_recipe
from launcher.compose import compose
from launcher.plan import make_plan
from recipes.check_target import launch_problems

MACHINE = Machine(num_cores=4, load=2.1, system="Linux x86_64", python="3.12.1", jax="0.12.0")


@pytest.mark.parametrize("argv", [["nosuch"], ["--rounds", "0"], ["--steps", "0"], ["--round", "2"]])
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_parts_are_chosen_by_name() -> None:
    assert parse([]).parts == []
    assert parse(["cli", "step", "--json"]).parts == ["cli", "step"]
    assert list(PARTS) == ["step", "restart", "cli", "gke", "maxtext-cpu", "maxtext-tpu"]


def test_a_drift_of_the_machine_cancels_out() -> None:
    drifting = [(1.2 if who == "A" else 1.0) + 0.1 * place for place, who in enumerate(abba(1))]
    assert round_ratios(abba(1), drifting) == pytest.approx([1.35 / 1.15])
    assert round_ratios("ABBAABBA", [2, 1, 1, 2, 3, 2, 2, 3]) == [2.0, 1.5]


def test_figures_sum_up_rounds() -> None:
    assert (figure := summary("f", "s", [3.0, 1.0, 2.0])).value == 2.0
    assert (figure.low, figure.high) == (1.0, 3.0)
    assert best("f", "ms", [3.0, 1.0]).value == 1.0


def test_bests_are_compared_beside_the_range_of_runs_side_by_side() -> None:
    figure = ratio_of_bests("f", [1.0, 4.0], [4.0, 2.0])
    assert (figure.value, figure.low, figure.high) == (0.5, 0.25, 2.0)


def test_table_and_json_say_the_same() -> None:
    figures = [summary("ratio", "x", [1.01, 1.02, 1.05], aim=1.03), best("help", "ms", [90.4, 97.0])]
    lines = table(figures).splitlines()
    assert lines[2:] == [
        "| ratio | 1.020 | 1.010 to 1.050 | <= 1.030 |  |",
        "| help | 90 ms | 90 to 97 |  | best of 2 |",
    ]
    data = json.loads(as_json(MACHINE, figures))
    assert [figure["value"] for figure in data["figures"]] == [1.02, 90.4]
    assert data["machine"]["num_cores"] == 4


def test_a_busy_machine_is_noticed() -> None:
    assert MACHINE.is_busy
    assert not Machine(num_cores=5, load=2.1, system="", python="", jax="").is_busy


@pytest.mark.parametrize("num_devices", [1, 4])
def test_both_sides_train_a_recipe_that_passes_every_check(num_devices: int) -> None:
    recipe = steady_recipe(num_devices, 1 + NUM_WARMUP_STEPS)
    assert (recipe.multislice.num_slices, recipe.hardware.topology) == (1, f"1x{num_devices}")
    assert recipe.train.eval_num_batches == 0 and recipe.checkpoint.save_interval_steps is None


def test_the_peer_is_left_out_where_it_cannot_be_had() -> None:
    launches = {name: [0.9, 0.8] for name in LAUNCHES}
    alone = Times(there=launches, returned=launches, manifest=[0.4, 0.5])
    beside = Times(there=launches, returned=launches, manifest=[0.4, 0.5], dry_run=[2.0, 1.6])
    names = [figure.name for figure in figures(beside)]
    assert [figure.name for figure in figures(alone)] == names[:5]
    ratios = {figure.name: figure.value for figure in figures(beside) if figure.unit == "x"}
    assert ratios == {
        "JobSet of quickstart there, over xpk's dry run": 0.5,
        f"JobSet of {SLICES} there, over xpk's dry run": 0.5,
        "`muster plan --manifest`, over xpk's dry run": 0.25,
    }


def test_the_large_launch_passes_every_check() -> None:
    recipe = compose(LARGE[0], (*LARGE[1:], *target("large", "gs://bucket/runs"))).recipe
    assert launch_problems(recipe) == []
    hardware = make_plan(recipe).hardware
    assert (hardware.num_slices, hardware.num_chips) == (NUM_SLICES, NUM_SLICES * 256)
